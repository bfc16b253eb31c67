"""Vectors of a TPU, and the JAX that compiles kernels for them."""

import math

LANES, SUBLANES = 128, 8
"""Shape of a vector of 4-byte words."""

OLDEST_JAX = (0, 12)
"""Oldest JAX by which the kernels were compiled."""


def num_vectors(rows: int, columns: int) -> int:
    """Return the number of vectors of a matrix of 4-byte words."""
    return math.ceil(rows / SUBLANES) * math.ceil(columns / LANES)

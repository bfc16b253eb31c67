"""Vectors of a TPU, and the JAX that compiles kernels for them."""

import math

from jax.extend.backend import get_default_device

LANES, SUBLANES = 128, 8
"""Shape of a vector of 4-byte words."""

OLDEST_JAX = (0, 12)
"""Oldest JAX by which the kernels were compiled."""


def num_vectors(rows: int, columns: int) -> int:
    """Return the number of vectors of a matrix of 4-byte words."""
    return math.ceil(rows / SUBLANES) * math.ceil(columns / LANES)


def tile_rows() -> int:
    """Return the rows of a tile of a product that hide the load of the next matrix, on the default device."""
    # They are the width of the matrix units: 256 since v6e.
    kind = str(getattr(get_default_device(), "device_kind", ""))
    return 256 if kind.startswith(("TPU v6", "TPU7", "TPU v7")) else 128

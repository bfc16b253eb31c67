"""Interleaved timing of several functions in one process, to reduce the effect of noise."""

import time
from collections.abc import Callable

import jax
import numpy as np


def interleaved_s(functions: dict[str, Callable[[], object]], repeats: int = 15) -> dict[str, np.ndarray]:
    """Return the seconds of each call, `[repeats]` per function, after one warm-up call each."""
    for function in functions.values():
        jax.block_until_ready(function())
    times_s = {name: np.empty(repeats) for name in functions}
    for i in range(repeats):
        for name, function in functions.items():
            start_s = time.perf_counter()
            jax.block_until_ready(function())
            times_s[name][i] = time.perf_counter() - start_s
    return times_s

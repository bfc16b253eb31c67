"""Seconds of a part of the user's own model, for the models that decide by them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def measured_s(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """The median seconds of a call once it is compiled, until its results are there.

    For `Work.pre_expert_s`: give what the model computes between one layer's experts and the next one's, and its
    arguments as they lie on the devices. In a program of several processes all of them call this.

    Args:
        function: jitted or not.
        *args: of it; not donated.
        repeats: calls that count; two go before.

    Raises:
        ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected at least 1")
    program = jax.jit(function)
    return median_s(lambda: program(*args), repeats)


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """The median seconds of a call, until its results are there; two go before."""
    times_s = []
    for _ in range(2 + repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(call())
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])

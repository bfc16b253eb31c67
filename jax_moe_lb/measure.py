"""`measured_s` times a part of the user's own model, for what decides by such times."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def measured_s(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Measures the median seconds of a call once it is compiled, until its results are there.

    Use it for `Work.pre_expert_s`: give what the model computes between one layer's experts and the next one's, and its
    arguments as they lie on the devices. In a program of several processes all of them call this.

    Args:
        function: what is timed, jitted or not.
        *args: its arguments, which are not donated.
        repeats: the calls that count, usually 5; two more go before, to warm up.

    Raises:
        ValueError: `repeats` is below 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import measured_s
        >>> measured_s(jnp.sin, jnp.zeros(8)) > 0
        True
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected at least 1")
    program = jax.jit(function)
    return median_s(lambda: program(*args), repeats)


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Measures the median seconds of a call until its results are there, after two calls that do not count.

    Args:
        call: what is timed, without arguments.
        repeats: the calls that count, at least 1.
    """
    times_s = []
    for _ in range(2 + repeats):
        start_s = time.perf_counter()
        # JAX returns before the devices are done: without it this would time the dispatch.
        jax.block_until_ready(call())
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])

"""Checks of planner kernels: their time beside estimate and round trip of the host."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.device import custom_call_seconds
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.plans import random_counts
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import Table, read
from benchmarks.render.timing import interleaved_s
from jax_moe_lb.core.custom_calls import like
from jax_moe_lb.planners.base import plan_call
from jax_moe_lb.planners.exact import UNBOUNDED, exact

SIZES = ((8, 128, 20), (32, 256, 10), (64, 256, 6))
"""Ranks, experts and slots, as in `benchmarks.plans.times`."""

OPTIONS = {"eps = 0": (0.0, False), "eps = 0.01, localize": (0.01, True)}


def estimates() -> dict[tuple[int, int, int, str], tuple[float, float]]:
    """Return the least and the largest estimated us of a kernel over the recorded loads, by size and options."""
    found: dict[tuple[int, int, int, str], tuple[float, float]] = {}
    for row in read(RESULTS / "plans.json")["plans_times"].tables["times"].dicts():
        low, high = row["kernel, loads overlap"], row["kernel, no loads overlap"]
        if low is not None and high is not None:
            ranks, experts = map(int, row["ranks x experts"].split(" x "))
            found[ranks, experts, experts // ranks + row["S - L"], row["options"]] = min(low), max(high)
    return found


def on_host(counts: jax.Array, slots: int, eps: float, localize: bool) -> tuple[jax.Array, ...]:
    """Plan in a host function of the stream, as for plans that fit no kernel."""
    ranks, experts = counts.shape
    results = like(counts, (ranks, slots)), like(counts, (experts, ranks))
    options = {"domain": ranks, "eps": np.float64(eps), "max_fan_out": UNBOUNDED, "localize": localize, "brief": False}
    return plan_call("exact", results, counts, **options)


def exact_kernel(scale: Scale) -> Finding:
    """Compare the time of the kernel of `exact` with its estimate and with a planner on the host."""
    rows, late = [], []
    for ranks, experts, slots in scale.of(SIZES, ((8, 32, 6),)):
        for label, (eps, localize) in OPTIONS.items():
            low, high = estimates().get((ranks, experts, slots, label), (None, None))
            kernel_us, calls_us = _measure(ranks, experts, slots, eps, localize, scale.of(20, 2))
            rows.append([f"{ranks} x {experts}", label, kernel_us, low, high, *calls_us])
            if kernel_us and high and kernel_us > high:
                late.append(f"{ranks} x {experts}, {label}: {kernel_us:.0f} us; estimated at most {high:.0f}")
    columns = {"ranks x experts": "", "options": ""} | dict.fromkeys(
        ("kernel us", "estimated, least us", "estimated, most us", "program with kernel us", "with host us"), ".0f"
    )
    reached = any(row[2] and row[4] for row in rows)
    return Finding(not late if reached else None, "; ".join(late) or "see the table", Table(columns, rows))


def _measure(ranks: int, experts: int, slots: int, eps: float, localize: bool, calls: int) -> tuple:
    counts = [jnp.asarray(one) for one in random_counts(ranks, experts, calls)]
    planner = jax.jit(partial(exact, num_slots=slots, domain=ranks, eps=eps, localize=localize))
    kernel = planner.lower(counts[0]).compile()
    host = jax.jit(partial(on_host, slots=slots, eps=eps, localize=localize))

    def all_counts(program: Callable) -> Callable[[], object]:
        return lambda: [program(one) for one in counts]

    times = interleaved_s({"kernel": all_counts(kernel), "host": all_counts(host)}, repeats=5)
    seconds = custom_call_seconds("moe_lb_plan_exact_kernel", "Exact", kernel, all_counts(kernel))
    return seconds and seconds * 1e6, [float(np.median(one)) / calls * 1e6 for one in times.values()]


def kernel_is_faster_than_host(scale: Scale) -> Finding:
    """Check that a program with the kernel at 64 x 256 and defaults is faster than one with a planner on the host."""
    ranks, experts, slots = scale.of(SIZES[-1], (8, 32, 6))
    _, (kernel_us, host_us) = _measure(ranks, experts, slots, 0.01, True, scale.of(20, 2))
    return Finding(kernel_us < host_us, f"{kernel_us:.0f} us with the kernel, {host_us:.0f} us with the host")

"""Comparison of all systems: one layer, forward and backward, on 8 virtual devices of one process.

Every system runs the same sequence of microbatches, so systems with a
history have seen earlier ones. The bounds are plain expert parallelism, and the same layer with force-balanced routing.

Virtual devices share the cores of the machine: these times show the overhead of a system, but not the time lost to a
straggler.

Means are over the last microbatches. "Tokens moved" counts rows to the experts, forward. A step sends them five times:
inputs and outputs forward; inputs again, gradients of outputs and gradients of inputs backward. "Weights moved" counts
the forward pass; a step moves them three times.
"""

import argparse
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.stages import Compiled

from benchmarks.layer.skewed_layer import Sizes, jitted_step, logits_by_popularity, tokens_of, weights_of
from benchmarks.layer.workloads import WORKLOADS
from benchmarks.render.results import Table, spread
from benchmarks.render.timing import interleaved_s
from jax_moe_lb import Stats, System, plain, use_virtual_cpu_devices
from jax_moe_lb.core.types import State
from jax_moe_lb.layer.systems import system_named, system_names
from jax_moe_lb.routing import ForceBalanced
from jax_moe_lb.routing.routers import Router

SIZES = Sizes(num_ranks=8, num_tokens=1024, width=256, inner=256, num_experts=32, per_tok=4)
BATCHES = 8
"""Microbatches, sampled from the same popularity."""

SETTLING = 3
"""Number of first microbatches to exclude, as a history is empty at first."""

BOUND = "plain, force-balanced routing"
COLUMNS = {
    "system": "",
    "imbalance": ".3f",
    "straggler, tokens": ".0f",
    "rounds": ".1f",
    "tokens moved MB": ".1f",
    "weights moved MB": ".1f",
    "temporary MB per rank": ".1f",
    "step ms": ".0f",
    "over plain": ".2f",
}


def configurations() -> dict[str, tuple[System, Router]]:
    """Return system and router of each row: every function of `jax_moe_lb.layer.systems` with defaults, and the
    bound.
    """
    systems = {name: (system_named(name), SIZES.router) for name in system_names()}
    return systems | {BOUND: (plain(), ForceBalanced(SIZES.router))}


def zipf(seed: int) -> np.ndarray:
    """Return logits `[R * T, E]` of the workload of that name, with the same popularity for all seeds."""
    (workload,) = (workload for workload in WORKLOADS if workload.name == "zipf")
    preference = workload.preference(np.random.default_rng(0), SIZES.num_ranks, SIZES.num_experts)[0]
    return logits_by_popularity(np.exp(preference), SIZES, seed)


def run_batches(step: Compiled, system: System, batches: list, weights: tuple) -> tuple[Stats, State]:
    """Return stacked statistics of the counted batches, and the balancer's last state."""
    state, stats = _first_state(system), []
    for x in batches:
        _, of_batch, state = step(state, x, *weights)
        stats.append(jax.device_get(of_batch))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *stats[SETTLING:]), state


def compiled(mesh: Mesh) -> dict[str, Compiled]:
    """Return the compiled step of every configuration."""
    args = (tokens_of(mesh, SIZES, zipf(0)), *weights_of(mesh, SIZES))
    return {
        name: jitted_step(mesh, system, router).lower(_first_state(system), *args).compile()
        for name, (system, router) in configurations().items()
    }


def _first_state(system: System) -> State:
    return system.balancer.init((SIZES.num_ranks, SIZES.num_experts))


def measure(mesh: Mesh, steps: dict[str, Compiled]) -> Table:
    batches = [tokens_of(mesh, SIZES, zipf(seed)) for seed in range(BATCHES)]
    weights, stats = weights_of(mesh, SIZES), {}
    calls: dict[str, Callable[[], object]] = {}
    for name, (system, _) in configurations().items():
        stats[name], state = run_batches(steps[name], system, batches, weights)
        calls[name] = functools.partial(steps[name], state, batches[-1], *weights)
    times_s = interleaved_s(calls, repeats=7)
    rows = []
    for name, of in stats.items():
        moved_mb = of.rows_moved.mean() * SIZES.width * 4 / 1e6, of.weight_bytes_moved.mean() / 1e6
        numbers = of.imbalance_after.mean(), of.straggler_after.mean(), of.rounds.mean(), *moved_mb
        times = spread(times_s[name] * 1e3), spread(times_s[name] / times_s["plain"])
        rows.append([name, *map(float, numbers), _temporary_bytes(steps[name]) / 1e6, *times])
    before = stats["plain"]
    title = f"Before: imbalance {before.imbalance_before.mean():.3f}, straggler {before.straggler_before.mean():.0f}"
    return Table(COLUMNS, rows, title)


def _temporary_bytes(step: Compiled) -> int:
    """Return the temporary memory per device."""
    analysis = step.memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend has no memory_analysis; expected one")
    return analysis.temp_size_in_bytes


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(SIZES.num_ranks)
    mesh = jax.make_mesh((SIZES.num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
    return {"zipf": measure(mesh, compiled(mesh))}

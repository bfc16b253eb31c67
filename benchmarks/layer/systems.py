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
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Wrapped

from benchmarks.layer.workloads import WORKLOADS
from benchmarks.render.results import Table, spread
from benchmarks.render.timing import interleaved_s
from jax_moe_lb import Experts, MoEParams, MoEState, Stats, System, TopK, Topology, moe, plain, use_virtual_cpu_devices
from jax_moe_lb.core.types import State
from jax_moe_lb.layer.systems import system_named, system_names
from jax_moe_lb.routing import ForceBalanced
from jax_moe_lb.routing.routers import Router

RANKS, TOKENS, WIDTH, INNER, EXPERTS, PER_TOK = 8, 1024, 256, 256, 32, 4

LOGIT_SCALE = 20.0
"""Scale of the logits stored in tokens, which keeps the experts' inputs near 1."""

BATCHES = 8
"""Microbatches, sampled from the same popularity."""

SETTLING = 3
"""Number of first microbatches to exclude, as a history is empty at first."""

BOUND = "plain, force-balanced routing"
COLUMNS = {"system": "", "imbalance": ".3f", "straggler, tokens": ".0f", "rounds": ".1f", "tokens moved MB": ".1f"}
COLUMNS |= {"weights moved MB": ".1f", "temporary MB per rank": ".1f", "step ms": ".0f", "over plain": ".2f"}


def configurations() -> dict[str, tuple[System, Router]]:
    """Return system and router of each row: every function of `jax_moe_lb.layer.systems` with defaults, and the
    bound.
    """
    systems = {name: (system_named(name), TopK(PER_TOK)) for name in system_names()}
    return systems | {BOUND: (plain(), ForceBalanced(TopK(PER_TOK)))}


# ---- the layer -----------------------------------------------------------------


def jitted_step(mesh: Mesh, system: System, router: Router) -> Wrapped:
    """Return `(state, x, kernel, experts) -> (gradients, statistics, state)`, forward and backward of one layer."""
    topology = Topology.from_mesh(mesh)
    by_rank, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(state: State, x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, Stats, State]:
        y, stats, after = moe(x, MoEParams(kernel, experts), router, system, topology, MoEState(state))
        return y, stats, after.balancer

    specs = (whole, by_rank, whole, by_rank)
    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=(by_rank, whole, whole))

    def loss(x: jax.Array, kernel: jax.Array, experts: Experts, state: State) -> tuple[jax.Array, tuple[Stats, State]]:
        y, *rest = run(state, x, kernel, experts)
        return jnp.square(y).mean(), tuple(rest)

    def step(state: State, *args: jax.Array) -> tuple[tuple, Stats, State]:
        gradients, rest = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*args, state)
        return gradients, *rest

    return jax.jit(step)


def weights_of(mesh: Mesh) -> tuple[jax.Array, Experts]:
    """Return a router kernel that reads logits from the first channels of a token, and small random experts."""
    rng = np.random.default_rng(0)
    kernel = np.zeros((WIDTH, EXPERTS), np.float32)
    kernel[:EXPERTS] = LOGIT_SCALE * np.eye(EXPERTS)
    up, gate, down = (0.05 * rng.standard_normal((EXPERTS, WIDTH, INNER), np.float32) for _ in range(3))
    arrays = up, down.reshape(EXPERTS, INNER, WIDTH), gate
    experts = Experts(*(_placed(array, mesh, PartitionSpec("expert")) for array in arrays))
    return _placed(kernel, mesh, PartitionSpec()), experts


def zipf_tokens(mesh: Mesh, seed: int) -> jax.Array:
    """Return random tokens whose first `E` channels are scaled logits of the workload `zipf`.

    All seeds have the same popularity, by which top-k experts are sampled without replacement on every rank.
    """
    (workload,) = (workload for workload in WORKLOADS if workload.name == "zipf")
    preference = workload.preference(np.random.default_rng(0), RANKS, EXPERTS)[0]
    noise = np.random.default_rng(seed).gumbel(size=(RANKS * TOKENS, EXPERTS))
    x = np.random.default_rng(1).standard_normal((RANKS * TOKENS, WIDTH), np.float32)
    x[:, :EXPERTS] = (preference[None] + noise) / LOGIT_SCALE
    return _placed(x, mesh, PartitionSpec("expert"))


def _placed(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


# ---- measurements --------------------------------------------------------------


def run_batches(step: Compiled, system: System, batches: list, weights: tuple) -> tuple[Stats, State]:
    """Return stacked statistics of the counted batches, and the balancer's last state."""
    state, stats = _first_state(system), []
    for x in batches:
        _, of_batch, state = step(state, x, *weights)
        stats.append(jax.device_get(of_batch))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *stats[SETTLING:]), state


def compiled(mesh: Mesh) -> dict[str, Compiled]:
    """Return the compiled step of every configuration."""
    args = (zipf_tokens(mesh, 0), *weights_of(mesh))
    return {
        name: jitted_step(mesh, system, router).lower(_first_state(system), *args).compile()
        for name, (system, router) in configurations().items()
    }


def _first_state(system: System) -> State:
    return system.balancer.init((RANKS, EXPERTS))


def measure(mesh: Mesh, steps: dict[str, Compiled]) -> Table:
    batches = [zipf_tokens(mesh, seed) for seed in range(BATCHES)]
    weights, stats = weights_of(mesh), {}
    calls: dict[str, Callable[[], object]] = {}
    for name, (system, _) in configurations().items():
        stats[name], state = run_batches(steps[name], system, batches, weights)
        calls[name] = functools.partial(steps[name], state, batches[-1], *weights)
    times_s = interleaved_s(calls, repeats=7)
    rows = []
    for name, of in stats.items():
        moved_mb = of.rows_moved.mean() * WIDTH * 4 / 1e6, of.weight_bytes_moved.mean() / 1e6
        numbers = of.imbalance_after.mean(), of.straggler_after.mean(), of.rounds.mean(), *moved_mb
        times = spread(times_s[name] * 1e3), spread(times_s[name] / times_s["plain"])
        temporary_bytes = steps[name].memory_analysis().temp_size_in_bytes
        rows.append([name, *map(float, numbers), temporary_bytes / 1e6, *times])
    before = stats["plain"]
    title = f"Before: imbalance {before.imbalance_before.mean():.3f}, straggler {before.straggler_before.mean():.0f}"
    return Table(COLUMNS, rows, title)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(RANKS)
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    return {"zipf": measure(mesh, compiled(mesh))}

"""Planning inside a jitted program on a CPU for one layer, and the overhead of each way to call a planner.

Run it with `python -m benchmarks.bench_planning`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Table, Value, out_alone, report, spread
from benchmarks.timing import interleaved_s
from benchmarks.workloads import WORKLOADS
from jax_moe_lb import Topology, _planning
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.core import imbalance, load, nearest_first, plain_plan, traffic
from jax_moe_lb.core.validation import fallback_to_plain
from jax_moe_lb.planners.greedy import greedy, greedy_reference

SHAPES = ((8, 128), (64, 256), (256, 256))
LOGNORMAL = next(workload for workload in WORKLOADS if workload.name == "lognormal")


def measure(num_ranks: int, num_experts: int) -> list[Value]:
    """Return one row of the table."""
    topology = Topology.flat(num_ranks)
    slots = num_experts // num_ranks + 2
    counts = jnp.asarray(LOGNORMAL.counts(0, num_ranks, 256, num_experts, 8))

    @jax.jit
    def plan(counts: jax.Array):
        return Greedy().rebalance(counts, plain_plan(counts, topology, slots), topology, ())[0]

    split, check = jax.jit(nearest_first, static_argnums=3), jax.jit(fallback_to_plain)
    planned, rank = plan(counts), jnp.int32(num_ranks // 2)
    times_s = interleaved_s(
        {
            "greedy": lambda: plan(counts),
            "check": lambda: check(planned, counts),
            "split": lambda: split(counts, planned.quota, rank, num_ranks),
            "split in domains": lambda: split(counts, planned.quota, rank, 8),
        },
        repeats=30,
    )
    before, after = imbalance(load(plain_plan(counts, topology))), imbalance(load(planned))
    replicas = int(traffic(planned, counts).replicas)
    times = [spread(of_name * 1e6) for of_name in times_s.values()]
    return [f"{num_ranks} x {num_experts}", *times, float(before), float(after), replicas]


LAYERS = 100
"""Layers planned in one call of `_planning`, to amortize the call overhead."""


def compare_calls(name: str, module: Callable, op: Callable, reference: Callable, *case: np.ndarray) -> list[Value]:
    """Return one row: the time of the same plan by every way to call the planner."""
    case = tuple(np.asarray(array) for array in case)
    layers = tuple(np.repeat(array[None], LAYERS, 0) for array in case)
    results = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), module(*case))

    @jax.jit
    def callback(*case: jax.Array):
        return jax.pure_callback(lambda *case: module(*map(np.asarray, case)), results, *case)

    native, loop, empty = jax.jit(op), jax.jit(reference), jax.jit(lambda *case: case)
    on_device = tuple(map(jnp.asarray, case))
    times_s = interleaved_s(
        {
            "C++": lambda: module(*layers),
            "empty": lambda: empty(*on_device),
            "native": lambda: native(*on_device),
            "while_loop": lambda: loop(*on_device),
            "callback": lambda: callback(*on_device),
        },
        repeats=100,
    )
    times_s["C++"] /= LAYERS
    return [name, *(spread(times * 1e6) for times in times_s.values())]


def compare_all_calls(num_ranks: int = 64, num_experts: int = 256, slots: int = 6) -> Table:
    """Return the second table."""
    counts = LOGNORMAL.counts(0, num_ranks, 256, num_experts, 8)
    topology = Topology.flat(num_ranks)
    plan = plain_plan(counts, topology, slots)
    greedily = num_ranks, 1
    row = compare_calls(
        "greedy",
        lambda *case: _planning.greedy(*case, *greedily),
        lambda *case: greedy(*case, *greedily),
        lambda *case: greedy_reference(*case, *greedily),
        plan.placement,
        plan.quota,
    )
    ways = ("C++", "empty jit", "custom call in jit", "jnp loop in jit", "pure_callback of the C++")
    columns = {"planner": ""} | dict.fromkeys(ways, ".0f")
    return Table(columns, [row], f"{num_ranks} ranks x {num_experts} experts, us")


def main() -> None:
    """Report both tables."""
    out = out_alone(__doc__)
    times = ("greedy us", "legality us", "split us", "split, domains of 8, us")
    columns = {"ranks x experts": ""} | dict.fromkeys(times, ".0f")
    columns |= {"imbalance before": ".3f", "after": ".3f", "replicas": "d"}
    parts = Table(columns, [measure(*shape) for shape in SHAPES])
    report({"parts": parts, "calls": compare_all_calls()}, out)


if __name__ == "__main__":
    main()

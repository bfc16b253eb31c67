"""Planning inside a jitted program on a CPU, one layer.

Run it with `python -m benchmarks.bench_planning`.
"""

import jax
import jax.numpy as jnp

from benchmarks.timing import interleaved_s, summary
from benchmarks.workloads import WORKLOADS
from jax_moe_lb import Greedy, Topology, imbalance, load, nearest_first, plain_plan, traffic
from jax_moe_lb.legality import ensure_legal

SHAPES = ((8, 128), (64, 256), (256, 256))
LOGNORMAL = next(workload for workload in WORKLOADS if workload.name == "lognormal")


def measure(num_ranks: int, num_experts: int) -> None:
    """One row of the table."""
    topology = Topology.flat(num_ranks)
    slots = num_experts // num_ranks + 2
    counts = jnp.asarray(LOGNORMAL.counts(0, num_ranks, 256, num_experts, 8))

    @jax.jit
    def plan(counts: jax.Array):
        return Greedy().rebalance(counts, plain_plan(counts, topology, slots), topology, ())[0]

    split, check = jax.jit(nearest_first, static_argnums=3), jax.jit(ensure_legal)
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
    columns = " | ".join(summary(times_s[name], 1e6, 0) for name in times_s)
    print(f"| {num_ranks} x {num_experts} | {columns} | {float(before):.3f} -> {float(after):.3f} | {replicas} |")


def main() -> None:
    """Prints the table."""
    print("| ranks x experts | greedy us | legality us | split us | split, domains of 8, us | imbalance | replicas |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        measure(*shape)


if __name__ == "__main__":
    main()

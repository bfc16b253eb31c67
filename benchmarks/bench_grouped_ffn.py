"""The grouped FFN on a CPU against one dense FFN of the same operations.

Run it with `python -m benchmarks.bench_grouped_ffn`.

The floor is the dense one: the same SwiGLU over all rows with one expert.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import interleaved_s, summary
from jax_moe_lb import Experts
from jax_moe_lb.ops.grouped_ffn import dense_ffn, grouped_ffn

CASES = (  # groups, rows per group, width, inner width
    (8, 512, 256, 512),
    (32, 128, 256, 512),
    (64, 64, 256, 512),
    (16, 100, 256, 512),
    (8, 256, 512, 1024),
    (16, 64, 512, 1024),
    (256, 16, 256, 512),
)


def measure(num_groups: int, rows_per_group: int, width: int, inner: int) -> None:
    """One row of the table: forward and both gradients."""
    rng = np.random.default_rng(0)
    num_rows = num_groups * rows_per_group
    rows = jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float32)
    up, gate = (jnp.asarray(0.05 * rng.normal(size=(num_groups, width, inner)), jnp.float32) for _ in range(2))
    experts = Experts(up, jnp.asarray(0.05 * rng.normal(size=(num_groups, inner, width)), jnp.float32), gate)
    one = jax.tree.map(lambda w: w[0], experts)
    sizes = jnp.full((num_groups,), rows_per_group, jnp.int32)
    grouped, dense = jax.jit(grouped_ffn), jax.jit(dense_ffn)
    grouped_gradients = jax.jit(jax.grad(lambda r, e: grouped_ffn(r, e, sizes).sum(), argnums=(0, 1)))
    dense_gradients = jax.jit(jax.grad(lambda r, e: dense_ffn(r, e).sum(), argnums=(0, 1)))
    times_s = interleaved_s(
        {
            "grouped": lambda: grouped(rows, experts, sizes),
            "dense": lambda: dense(rows, one),
            "grouped gradients": lambda: grouped_gradients(rows, experts),
            "dense gradients": lambda: dense_gradients(rows, one),
        }
    )
    flops = 6 * num_rows * width * inner
    forward = times_s["grouped"] / times_s["dense"]
    backward = times_s["grouped gradients"] / times_s["dense gradients"]
    gflops = flops / np.median(times_s["dense"]) / 1e9
    print(
        f"| {num_groups} | {rows_per_group} | {width} x {inner} | {gflops:.0f} | {summary(times_s['grouped'], 1e3)} "
        f"| {summary(forward)} | {summary(backward)} |"
    )


def main() -> None:
    """Prints the table."""
    print("| groups | rows each | expert | dense GFLOP/s | forward ms | / dense | gradients / dense |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        measure(*case)


if __name__ == "__main__":
    main()

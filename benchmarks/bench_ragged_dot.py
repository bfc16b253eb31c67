"""Compiled form of XLA's ragged product on an H100: `python -m benchmarks.bench_ragged_dot`.

Requires the compiler: `jax_moe_lb[cuda]`. The layer does not use this product on H100; see `kernels/backends.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.results import Table, out_alone, report
from jax_moe_lb.aot import Target, compile_for, quiet_stderr, use_no_accelerators

ROWS, WIDTH, INNER, GROUPS = 36_864, 2048, 768, 32
OPTIONS = (None, "xla_gpu_experimental_use_ragged_dot_fusion", "xla_gpu_experimental_use_ragged_dot_grouped_gemm")


def main() -> None:
    """Report a row for each of XLA's options."""
    out = out_alone(__doc__)
    use_no_accelerators()
    target = Target.parse("h100:1x8")
    mesh = target.mesh()

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    args = array(jnp.bfloat16, ROWS, WIDTH), array(jnp.bfloat16, GROUPS, WIDTH, INNER), array(jnp.int32, GROUPS)
    rows = []
    for option in OPTIONS:
        with quiet_stderr():
            found = compile_for(
                target,
                jax.jit(jax.lax.ragged_dot),
                args,
                mesh,
                ideal_flops=2 * ROWS * WIDTH * INNER,
                options={option: True} if option else {},
            )
        rows.append([option or "none", found.flops_over_ideal, found.temp_bytes / 1e6])
    report({"options": Table({"option": "", "FLOPs over ideal": ".1f", "temporary MB": ".0f"}, rows)}, out)


if __name__ == "__main__":
    main()

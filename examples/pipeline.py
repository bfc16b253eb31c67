"""Train with pipeline parallelism (GPipe): a mesh axis of stages around balanced layers."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import jax_moe_lb as lb

jax.config.update("jax_platforms", "cpu")
lb.use_virtual_cpu_devices(8)

STAGES, MICROBATCHES = 2, 4
MESH = jax.make_mesh((STAGES, 4), ("stage", "expert"), axis_types=(AxisType.Auto,) * 2)
TOPOLOGY, TOKENS = lb.Topology.from_mesh(MESH, data_axes=()), PartitionSpec(None, "expert")


def block(kernel, up, down, x):
    """Apply the MoE layer of a stage to a microbatch `[T, H]`, with a residual connection."""
    params = lb.MoEParams(kernel, lb.Experts(up, down))
    return x + lb.moe(x, params, lb.TopK(2), lb.greedy(2), TOPOLOGY)[0]


def pipelined(kernel, up, down, x):
    """Send microbatches `[M, T, H]` through the stages; in warm-up and drain steps, stages compute unused outputs."""
    stage, onwards = jax.lax.axis_index("stage"), [(i, i + 1) for i in range(STAGES - 1)]

    def tick(arrived, step):
        first = x[jnp.minimum(step, MICROBATCHES - 1)]
        y = block(kernel[0], up[0], down[0], jnp.where(stage == 0, first, arrived))
        return jax.lax.ppermute(y, "stage", onwards), y

    _, y = jax.lax.scan(tick, jax.lax.pcast(0 * x[0], "stage", to="varying"), jnp.arange(MICROBATCHES + STAGES - 1))
    return jax.lax.psum(jnp.where(stage == STAGES - 1, y[STAGES - 1 :], 0), "stage")


def one_by_one(kernel, up, down, x):
    """Send each microbatch through all layers without a pipeline; every device has all stages."""
    for stage in range(STAGES):
        x = jax.lax.map(lambda one, at=stage: block(kernel[at], up[at], down[at], one), x)
    return x


def main() -> None:
    """Compute outputs and gradients both ways and compare them."""
    sizes = [(STAGES, 32, 16), (STAGES, 16, 32, 64), (STAGES, 16, 64, 32), (MICROBATCHES, 256, 32)]
    args = [0.3 * jax.random.normal(jax.random.key(i), size) for i, size in enumerate(sizes)]
    both = []
    for function, stages in ((pipelined, "stage"), (one_by_one, None)):
        specs = (PartitionSpec(stages), *[PartitionSpec(stages, "expert")] * 2, TOKENS)
        run = jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=TOKENS)
        y, pull_back = jax.jit(lambda *args, run=run: jax.vjp(run, *args))(*args)
        both.append((y, *jax.jit(pull_back)(y)))
    errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*both, strict=True)]
    assert max(errors) < 1e-5, errors
    print(f"outputs differ by {errors[0]:.0e} of the largest, gradients by {max(errors[1:]):.0e}")


if __name__ == "__main__":
    main()

"""Take one training step of an MoE layer under skewed routing, with plain and with balanced expert parallelism."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import jax_moe_lb as lb

jax.config.update("jax_platforms", "cpu")
lb.use_virtual_cpu_devices(8)

LEARNING_RATE = 0.1


def skewed_tokens(num_tokens: int, width: int) -> jax.Array:
    """Return tokens with a large common component, which prefer the same experts."""
    common, own = jax.random.split(jax.random.key(0))
    return jax.random.normal(common, (width,)) + jax.random.normal(own, (num_tokens, width))


def train_step(system: lb.System) -> tuple[jax.Array, jax.Array, lb.Stats]:
    """Take a gradient descent step; return the loss before and after it, and the statistics of the layer."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    options = {"system": system, "experts": lb.ExpertConfig(64), "rngs": nnx.Rngs(0)}
    layer = lb.MoE(32, 16, lb.TopK(2), mesh=mesh, topology=lb.Topology.from_mesh(mesh), **options)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    x = skewed_tokens(2048, 32)

    def loss(params: nnx.State) -> tuple[jax.Array, lb.Stats]:
        y, stats = nnx.merge(graph, params, rest)(x)
        return jnp.square(y - jnp.roll(x, 1, axis=1)).mean() + lb.router_loss(stats), stats

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (before, stats), gradients = step(params)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)
    (after, _), _ = step(params)
    return before, after, stats


def main() -> None:
    """Compare two systems on the same parameters and tokens: loads differ, losses do not."""
    print("system  imbalance        rounds  replicas moved  loss before -> after the step")
    for name, system in (("plain", lb.plain()), ("greedy", lb.greedy(replica_slots=2))):
        before, after, stats = train_step(system)
        imbalance = f"{stats.imbalance_before[0]:.2f} -> {stats.imbalance_after[0]:.2f}"
        moved_kib = stats.weight_bytes_moved[0] / 1024
        print(f"{name:7} {imbalance:16} {stats.rounds[0]:6}  {moved_kib:10.0f} KiB  {before:.6f} -> {after:.6f}")


if __name__ == "__main__":
    main()

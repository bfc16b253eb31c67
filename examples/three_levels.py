"""Train on three levels: experts move between datacenters, load is balanced inside them, tokens use all rails."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

import jax_moe_lb as lb

jax.config.update("jax_platforms", "cpu")
lb.use_virtual_cpu_devices(8)

# Two datacenters with two nodes of two GPUs each, one interface per GPU. Weights may move inside a datacenter.
BASE = jax.make_mesh((2, 2, 2), ("dc", "node", "gpu"), axis_types=(AxisType.Auto,) * 3)
WHOLE = lb.Topology.from_mesh(BASE, ("dc", "node", "gpu"), ranks_per_domain=4, rails_per_node=2)
# With HybridEP each datacenter holds all experts, so no tokens cross between datacenters.
MESH = lb.transport.hybrid_mesh(BASE, {"dc": 2, "node": 1, "gpu": 1})
MIGRATE = lb.transport.GatherExpertDomain(lb.transport.ExpertDomains.from_mesh(MESH, WHOLE), lb.transport.Codec())
BALANCER = lb.Chain((lb.balancers.Exact(), lb.balancers.RailS()))


def gradient_step(mesh, topology, system, x):
    """Take a gradient descent step; return the loss before and after it, the statistics and the layer."""
    experts, rngs = lb.ExpertConfig(64), nnx.Rngs(0)
    layer = lb.MoE(32, 16, lb.TopK(2), mesh=mesh, topology=topology, system=system, experts=experts, rngs=rngs)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params):
        y, stats = nnx.merge(graph, params, rest)(x)
        return jnp.square(y - jnp.roll(x, 1, axis=1)).mean(), stats

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (before, stats), gradients = step(params)
    return before, step(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))[0][0], stats, layer


def main() -> None:
    """Compare a step of plain expert parallelism with all three levels, and print the effect of each level."""
    common, own = jax.random.split(jax.random.key(0))
    x = jax.random.normal(common, (32,)) + jax.random.normal(own, (2048, 32))
    before, after, _, _ = gradient_step(BASE, WHOLE, lb.plain(), x)
    system = lb.System(BALANCER, dispatch=lb.transport.MultiRailDispatch(), replica_slots=2, migrate=MIGRATE)
    inside = MIGRATE.domains.between
    loss, stepped, stats, layer = gradient_step(MESH, inside, system, x)
    print(f"loss: plain {before:.6f} -> {after:.6f}, three levels {loss:.6f} -> {stepped:.6f}")
    experts_bytes = layer.up.get_value().nbytes + layer.down.get_value().nbytes + layer.gate.get_value().nbytes
    print(f"HybridEP: {experts_bytes / 8 / 1024:.0f} KiB of experts to each rank between datacenters, 0 tokens")
    for dc, counts in enumerate(np.asarray(stats.counts)):
        print(f"Exact in dc {dc}: imbalance {stats.imbalance_before[dc]:.2f} -> {stats.imbalance_after[dc]:.2f}")
        plan, _ = BALANCER.rebalance(counts, lb.core.plain_plan(counts, inside, slots=4 + 2), inside, ((), ()))
        own_rail = lb.core.rows_between(counts, plan)[:, :, None] * (np.arange(4)[:, None] % 2 == np.arange(2))
        rows = [int(np.max(lb.balancers.interface_rows(rails, 2))) for rails in (own_rail, plan.rails)]
        print(f"RailS in dc {dc}: busiest interface {rows[0]} -> {rows[1]} rows")


if __name__ == "__main__":
    main()

"""Serve each batch in one round without a loop, and repeat it in a second program if its plan needs more rounds."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from jax_moe_lb import Buffers, ExpertConfig, MoE, Stats, TopK, Topology, plain, raise_on_fault, use_virtual_cpu_devices
from jax_moe_lb.core import needs_more_rounds

jax.config.update("jax_platforms", "cpu")
use_virtual_cpu_devices(8)


def make_layers() -> tuple[MoE, MoE]:
    """Return a layer limited to one round, and one without a limit, with the same parameters."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    system, topology = plain(Buffers(headroom=1.5)), Topology.from_mesh(mesh)
    fast = plain(Buffers(headroom=1.5, max_rounds=1))
    experts, rngs = ExpertConfig(64), nnx.Rngs(0)
    layer = MoE(32, 16, TopK(2), mesh=mesh, topology=topology, system=fast, experts=experts, rngs=rngs)
    graph, variables = nnx.split(layer)
    other = nnx.merge(graph, variables)
    other.system = system
    return layer, other


@nnx.jit
def run(layer: MoE, x: jax.Array) -> tuple[jax.Array, Stats]:
    """Run a layer; each of the two layers compiles on first use."""
    return layer(x)


def serve(layer: MoE, other: MoE, x: jax.Array) -> tuple[jax.Array, Stats, str]:
    """Serve a batch; return outputs, statistics and the name of the program."""
    program = "one round"
    y, stats = run(layer, x)
    if needs_more_rounds(stats):
        program = "a loop"
        y, stats = run(other, x)
    # Raise on any other fault.
    raise_on_fault(stats)
    return y, stats, program


def main() -> None:
    """Serve tokens of different skew."""
    layer, other = make_layers()
    common, own = jax.random.normal(jax.random.key(1), (1, 32)), jax.random.normal(jax.random.key(2), (2048, 32))
    for skew in (0.0, 0.5, 8.0):
        y, stats, program = serve(layer, other, skew * common + own)
        print(f"skew {skew}: {program}, {stats.rounds[0]} needed, finite: {bool(jnp.isfinite(y).all())}")


if __name__ == "__main__":
    main()

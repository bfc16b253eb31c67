"""Save a layer on a mesh of 8 ranks with plain Orbax, and restore it on 4, 2, 1 and 16 ranks."""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from jax_moe_lb import ExpertConfig, MoE, SharedExpert, TopK, exact, use_virtual_cpu_devices
from jax_moe_lb.nn import mesh_independent_state, restore_mesh_independent_state


def make(num_ranks: int, system: str) -> MoE:
    """Return a layer of 16 experts with all kinds of state in a checkpoint."""
    devices = jax.devices()[:num_ranks]
    mesh = jax.make_mesh((num_ranks,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    chosen = exact().replace(relocates=True) if system == "exact" else system
    options = {"experts": ExpertConfig(32), "shared": SharedExpert(8), "rngs": nnx.Rngs(0)}
    return MoE(16, 16, TopK(2, selection_bias=True), mesh=mesh, system=chosen, **options)


def shapes(layer: MoE) -> nnx.State:
    """Return the shapes and shardings of a layer's mesh-independent state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), mesh_independent_state(layer)
    )


def main(systems: list[str]) -> None:
    """Save and restore the layer of each system, and print the maximum difference of its outputs."""
    use_virtual_cpu_devices(16)
    x = jax.random.normal(jax.random.key(1), (64, 16))
    for system in systems:
        layer = make(8, system)
        layer.bias[...] += jnp.arange(16.0) / 16  # stands for training
        y, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
        folder = Path(tempfile.mkdtemp()) / "checkpoint"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, mesh_independent_state(layer))
        for num_ranks in (4, 2, 1, 16):
            other = make(num_ranks, system)
            with ocp.StandardCheckpointer() as checkpointer:
                restore_mesh_independent_state(other, checkpointer.restore(folder, shapes(other)))
            z, _ = nnx.jit(lambda layer, x: layer(x))(other, x)
            error = float(jnp.abs(jax.device_get(z) - jax.device_get(y)).max())
            print(f"{system}: 8 ranks -> {num_ranks}, difference {error:.0e}", flush=True)
            assert error < 1e-5


if __name__ == "__main__":
    main(sys.argv[1:] or ["exact"])

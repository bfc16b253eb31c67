"""Saves a layer on a mesh of 8 ranks, with plain orbax, and restores it on 4, 2, 1 and 16."""

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
    """A layer of 16 experts on so many ranks, with all that a checkpoint may hold."""
    devices = jax.devices()[:num_ranks]
    mesh = jax.make_mesh((num_ranks,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    chosen = exact().replace(relocates=True) if system == "exact" else system
    options = {"experts": ExpertConfig(32), "shared": SharedExpert(8), "rngs": nnx.Rngs(0)}
    return MoE(16, 16, TopK(2, selection_bias=True), mesh=mesh, system=chosen, **options)


def shapes(layer: MoE) -> nnx.State:
    """The shapes of a layer's portable state, and where its arrays shall lie."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), mesh_independent_state(layer)
    )


def main(systems: list[str]) -> None:
    """Print what was restored where."""
    use_virtual_cpu_devices(16)
    x = jax.random.normal(jax.random.key(1), (64, 16))
    for system in systems:
        layer = make(8, system)
        layer.bias[...] += jnp.arange(16.0) / 16  # as if it had been trained
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

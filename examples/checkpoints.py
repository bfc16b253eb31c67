"""Train a model on 8 ranks, save it with plain Orbax, and continue with the same losses on other meshes."""

import math
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jax_moe_lb import ExpertConfig, MoE, SharedExpert, System, TopK, exact, use_virtual_cpu_devices
from jax_moe_lb.nn import mesh_independent_state, restore_mesh_independent_state, restore_target


def make(sizes: tuple[int, int], system: str | System) -> tuple[nnx.Module, nnx.Optimizer]:
    """Return a model on a mesh, with all kinds of state in a checkpoint, and its optimizer."""
    devices, axis_types = jax.devices()[: math.prod(sizes)], (jax.sharding.AxisType.Auto,) * 2
    mesh, rngs = jax.make_mesh(sizes, ("data", "expert"), axis_types=axis_types, devices=devices), nnx.Rngs(0)
    options = {"mesh": mesh, "experts": ExpertConfig(32), "shared": SharedExpert(8), "rngs": rngs}
    layer = MoE(16, 16, TopK(2), system=exact().replace(relocates=True) if system == "exact" else system, **options)
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs), layer)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model: nnx.Module, optimizer: nnx.Optimizer) -> jax.Array:
    """Do one training step and return its loss."""
    x = jax.random.normal(jax.random.key(1), (64, 16))
    loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x)[0] - x[::-1]).mean())(model)
    optimizer.update(model, gradients)
    return loss


def main(systems: list[str]) -> None:
    """Continue the training with each system on each mesh, and print the maximum difference of the losses."""
    for system in systems:
        trained, folder = make((1, 8), system), Path(tempfile.mkdtemp()) / "checkpoint"
        for _ in range(10):
            step(*trained)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, mesh_independent_state(trained))
        losses = [float(step(*trained)) for _ in range(3)]
        for sizes in ((1, 8), (1, 2), (1, 16), (2, 4)):
            other = make(sizes, system)
            with ocp.StandardCheckpointer() as checkpointer:
                restored = checkpointer.restore(folder, restore_target(mesh_independent_state(other)))
            restore_mesh_independent_state(other, restored)
            error = max(abs(float(step(*other)) - loss) for loss in losses)
            print(f"{system}: 8 ranks -> {sizes[0]} x {sizes[1]}, difference {error:.0e}", flush=True)
            assert error < 1e-5


if __name__ == "__main__":
    use_virtual_cpu_devices(16)
    main(sys.argv[1:] or ["exact"])

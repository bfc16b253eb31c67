"""These are the jitted parts of training: initial state, optimizer step, validation."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Migrate, Stats, System, Topology, compiler_options
from models.common import LanguageModel
from models.gradients import loss_and_gradients, next_token_loss
from models.optimizer import apply_gradients, make_optimizer
from models.parallel import placed_shapes, state_shardings
from models.presets import TrainConfig
from models.relocation import moved_state


@dataclass(frozen=True, eq=False)
class Programs:
    """These programs run on the devices.

    Args:
        state_shapes: shapes and shardings of the state: parameters, optimizer, balancer.
        init: `() -> state`, for the first step.
        step: `(state, tokens) -> (state, loss, stats)`, which consumes the state; see `loss_and_gradients`.
        evaluate: `(state, tokens) -> loss`, without a gradient.
        move: `(state, permutation) -> state`, with the experts at other places; it consumes the state.
        topology: the topology of the mesh.
    """

    state_shapes: nnx.State
    init: Callable[[], nnx.State]
    step: Wrapped
    evaluate: Callable[[nnx.State, Array], Array]
    move: Callable[[nnx.State, Array | np.ndarray], nnx.State]
    topology: Topology


def make_programs(config: TrainConfig, mesh: Mesh, system: System, migrate: Migrate | None = None) -> Programs:
    """Builds the programs, compiling nothing.

    Args:
        config: the sizes of the run.
        mesh: what `make_mesh` made; with `migrate` its own.
        system: the strategies that balance the load.
        migrate: gathers experts inside expert domains first; `None` keeps them at home.

    Raises:
        ValueError: the model does not fit the mesh.
    """
    if migrate is None:
        topology = Topology.from_mesh(mesh, ranks_per_domain=config.parallel.ranks_per_domain)
    else:
        topology = migrate.domains.between
    relocatable = config.relocate_interval is not None

    def create() -> tuple[LanguageModel, nnx.Optimizer]:
        rngs = nnx.Rngs(config.seed)
        model = LanguageModel(
            config.model,
            mesh=mesh,
            topology=topology,
            system=system,
            relocatable=relocatable,
            migrate=migrate,
            split=config.parallel.fsdp,
            rngs=rngs,
        )
        return model, nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param)

    graphdef, shapes = nnx.split(nnx.eval_shape(create))
    shardings = state_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, stats, gradients = loss_and_gradients(model, tokens, config.accumulate, mesh)
        apply_gradients(model, optimizer, gradients)
        for i, block in enumerate(model.blocks):
            of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], stats)
            if relocatable:
                block.moe.update_loads(of_layer)
            if config.model.bias_rate:
                block.moe.update_bias(of_layer, config.model.bias_rate)
        return nnx.state((model, optimizer)), loss, stats

    def evaluate(state: nnx.State, tokens: Array) -> Array:
        return next_token_loss(nnx.merge(graphdef, state)[0], tokens)[0]

    options = compiler_options(mesh)
    return Programs(
        state_shapes=placed_shapes(shapes, shardings),
        init=jax.jit(lambda: nnx.state(create()), out_shardings=shardings),
        step=jax.jit(
            step, out_shardings=(shardings, everywhere, everywhere), donate_argnums=0, compiler_options=options
        ),
        evaluate=jax.jit(evaluate, out_shardings=everywhere, compiler_options=options),
        move=jax.jit(moved_state, out_shardings=shardings, donate_argnums=0),
        topology=topology,
    )

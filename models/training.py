"""These are the jitted parts of training: initial state, optimizer step, validation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
        step: `(state, tokens) -> (state, loss, stats)`, which consumes the state; see `loss_and_gradients`. Where the
            system has `max_rounds`, a step with any fault returns the state as it was.
        step_again: the same for a step that needs more rounds than `step` has; `None` where `step` has all.
        evaluate: `(state, tokens) -> loss`, without a gradient.
        move: `(state, permutation) -> state`, with the experts at other places; it consumes the state.
        topology: the topology of the mesh.
    """

    state_shapes: nnx.State
    init: Callable[[], nnx.State]
    step: Wrapped
    step_again: Wrapped | None
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
    place: dict[str, Any] = {"mesh": mesh, "topology": topology, "migrate": migrate, "split": config.parallel.fsdp}

    def create(system: System) -> tuple[LanguageModel, nnx.Optimizer]:
        relocatable = config.relocate_interval is not None
        rngs = nnx.Rngs(config.seed)
        model = LanguageModel(config.model, system=system, relocatable=relocatable, rngs=rngs, **place)
        return model, nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(partial(create, system)))
    limited = system.dispatch.max_rounds is not None
    # Serves whatever comes. Validation has no second program, so it is always this one.
    whole = nnx.split(nnx.eval_shape(partial(create, system.with_rounds(None))))[0] if limited else graph
    shardings = state_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    options = compiler_options(mesh)

    def jitted(step: Callable) -> Wrapped:
        out = (shardings, everywhere, everywhere)
        return jax.jit(step, out_shardings=out, donate_argnums=0, compiler_options=options)

    def evaluate(state: nnx.State, tokens: Array) -> Array:
        return next_token_loss(nnx.merge(whole, state)[0], tokens)[0]

    step, step_again = partial(_step, config, mesh, graph), None
    if limited:
        step, step_again = partial(_step_if_served, step), jitted(partial(_step, config, mesh, whole))
    return Programs(
        state_shapes=placed_shapes(shapes, shardings),
        init=jax.jit(lambda: nnx.state(create(system)), out_shardings=shardings),
        step=jitted(step),
        step_again=step_again,
        evaluate=jax.jit(evaluate, out_shardings=everywhere, compiler_options=options),
        move=jax.jit(moved_state, out_shardings=shardings, donate_argnums=0),
        topology=topology,
    )


def _step(
    config: TrainConfig, mesh: Mesh, graph: nnx.GraphDef, state: nnx.State, tokens: Array
) -> tuple[nnx.State, Array, Stats]:
    model, optimizer = nnx.merge(graph, state)
    loss, stats, gradients = loss_and_gradients(model, tokens, config.accumulate, mesh)
    apply_gradients(model, optimizer, gradients)
    for i, block in enumerate(model.blocks):
        of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], stats)
        if config.relocate_interval is not None:
            block.moe.update_loads(of_layer)
        if config.model.bias_rate:
            block.moe.update_bias(of_layer, config.model.bias_rate)
    return nnx.state((model, optimizer)), loss, stats


def _step_if_served(step: Callable, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
    """Leaves the state as it was where a plan needs more rounds than there are, so that the step can be done again.

    It is donated, and the caller has no other. Old values are read by the update anyway.
    """
    # Flax changes the variables of `state` in place.
    before = jax.tree.map(lambda leaf: leaf, state)
    after, loss, stats = step(state, tokens)
    is_served = (stats.fault.code == 0).all()
    return jax.tree.map(partial(jnp.where, is_served), after, before), loss, stats

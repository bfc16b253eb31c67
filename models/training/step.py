"""Jitted programs of training: initial state, optimizer step and validation.

`loss_and_gradients` runs the forward and backward pass on the whole batch or in microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Stats, System, Topology, compiler_options, router_loss
from jax_moe_lb.nn import GradientResidual, keep_residuals
from models.config import TrainConfig
from models.data.marks import num_predicted
from models.decoder.config import DecoderConfig
from models.decoder.layers import KEPT, Adapter, expert_rules
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.mesh import all_axes, memory_bytes, placed_shapes, state_shardings, topology_of
from models.pretrained.adapters import target_paths
from models.settings import in_section
from models.training.optimizer import apply_gradients, gradient_norm, make_optimizer
from models.training.resume import moved_state
from models.training.source import preset_config

# Function of model, tokens with marks and their number, see `StackedDecoder.loss`.
LossOf = Callable[..., tuple[Array, tuple[Array, Stats]]]


def loss_and_gradients(
    model: Any,
    trained: Any,
    loss_of: LossOf,
    tokens: Array,
    counts: Array,
    accumulate: int,
    mesh: Mesh,
    experts: Array | None = None,
) -> tuple[Array, Stats, nnx.State]:
    """Compute the cross-entropy of a batch, statistics, and the gradient including the router losses."""
    # Each microbatch has the same number of sequences per device, and is routed and planned separately. The balancer
    # processes them in sequence, and their router losses are averaged. Otherwise the gradient equals the gradient of
    # the whole batch.
    # Residuals of encoded gradients belong to trained experts; the next microbatch begins with them.
    variables = nnx.Any(trained, GradientResidual) if trained is nnx.Param else trained

    def of_one(model: Any, tokens: Array, experts: Array | None) -> tuple[Array, Stats, nnx.State]:
        given = {} if experts is None else {"experts": experts}

        def objective(model: Any) -> tuple[Array, tuple[Array, Stats]]:
            total, (loss, stats) = loss_of(model, tokens, counts, **given)
            return total + router_loss(stats) / accumulate, (loss, stats)

        differentiated = nnx.value_and_grad(objective, argnums=nnx.DiffState(0, variables), has_aux=True)
        (_, (loss, stats)), gradients = differentiated(model)
        return loss, stats, keep_residuals(model, gradients)

    if accumulate == 1:
        return of_one(model, tokens, experts)
    graph, *states = nnx.split(model, trained, nnx.Param, ...)
    params, frozen, rest = states
    # Each device contributes sequences to every microbatch, so the split moves no data.
    parts = tokens.reshape(-1, accumulate, tokens.shape[1]).swapaxes(0, 1)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, all_axes(mesh))))
    given = None
    if experts is not None:
        given = jnp.moveaxis(experts.reshape(len(experts), -1, accumulate, *experts.shape[2:]), 2, 0)
    # Sums are float32, for parameters of any dtype.
    wide = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
    zeros = jax.lax.with_sharding_constraint(wide, state_shardings(params, mesh))

    def add(
        sums: tuple[nnx.State, Array, nnx.State], microbatch: tuple[Array, Array | None]
    ) -> tuple[tuple[nnx.State, Array, nnx.State], Stats]:
        (gradients, loss, rest), (part, experts) = sums, microbatch
        # Flax requires variables created inside the scan body.
        model = nnx.merge(graph, params, frozen, rest, copy=True)
        share, stats, more = of_one(model, part, experts)
        gradients = jax.tree.map(lambda total, one: total + one.astype(total.dtype), gradients, more)
        return (gradients, loss + share, nnx.state(model, nnx.Not(nnx.Param))), stats

    (gradients, loss, rest), stats = jax.lax.scan(add, (zeros, jnp.zeros((), jnp.float32), rest), (parts, given))
    nnx.update(model, rest)
    return loss, jax.tree.map(_as_groups, stats), gradients


def _as_groups(leaf: Array) -> Array:
    """Reshape `[microbatches, layers, D, ...]` to `[layers, microbatches * D, ...]`."""
    return leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1, *leaf.shape[3:])


@dataclass(frozen=True, eq=False)
class Programs:
    """Jitted programs of a training run."""

    state_shapes: nnx.State  # shapes and shardings of the state: parameters, optimizer, balancer
    init: Callable[[], nnx.State]  # `() -> state`, for the first step
    # `(state, tokens) -> (state, loss, norm, stats)`, donating the state, with the norm of the gradients; see
    # `loss_and_gradients`. If the system has `max_rounds`, a step with a fault returns the state unchanged. A third
    # argument are given experts, int32 `[layers, B, T, K]`.
    step: Wrapped
    step_again: Wrapped | None  # `step` without the limit on rounds; `None` if `step` has none
    evaluate: Callable[[nnx.State, Array], Array]  # `(state, tokens) -> loss`, without a gradient
    # `(state, permutation) -> state`, with the experts relocated; it donates the state
    move: Callable[[nnx.State, Array | np.ndarray], nnx.State]
    model: Callable[[nnx.State], Any]  # function returning the model of a state
    topology: Topology  # topology of the mesh


def _check_slots(config: TrainConfig, system: System) -> None:
    """Raise `ValueError` if there are more slots than experts; the error of the layer would not name the option."""
    most = config.model.num_experts - config.model.num_experts // config.parallel.expert_parallel
    # The layer leaves out the default slots of a system if all experts are at home.
    if system.replica_slots > most and (most or config.parallel.replica_slots):
        raise ValueError(
            f"parallel.replica_slots is {system.replica_slots}; expected at most {most}, the experts that are not at "
            "home on a rank"
        )


def check_memory(config: TrainConfig, mesh: Mesh) -> None:
    """Raise `ValueError` if the parameters, or a single array of the batch, exceed the memory of all devices."""
    model, there = config.model, memory_bytes(mesh)
    num_params = (model.vocab_size + 3 * model.num_layers * model.num_experts * model.mlp_dim) * model.embed_dim
    most = there // jnp.dtype(model.param_dtype).itemsize
    # A checkpoint has its own limits, and may have layers without experts.
    if model.checkpoint is None and num_params > most:
        raise ValueError(
            f"model has {num_params:.1e} parameters; expected at most {most:.1e}, the memory of {mesh.size} devices. "
            "Reduce num_layers, num_experts or a width"
        )
    sequence_bytes = config.batch.sequence_length * model.embed_dim * jnp.dtype(model.compute_dtype).itemsize
    most = there // sequence_bytes * config.num_microbatches
    if config.batch.size > most:
        length = config.batch.sequence_length
        raise ValueError(
            f"batch.size is {config.batch.size}; expected at most {most} sequences of {length} tokens, the memory of "
            f"{mesh.size} devices"
        )


def make_programs(
    config: TrainConfig, mesh: Mesh, system: System, decoder: DecoderConfig | None = None, *, has_padding: bool = False
) -> Programs:
    """Build the programs, without compiling."""
    _check_slots(config, system)
    if system.migrate is None:
        topology = topology_of(mesh, config.parallel.ranks_per_domain)
    else:
        topology = system.migrate.domains.between
    if config.parallel.stages > 1:
        _check_stateless(system, config)
    system = system.replace(relocates=config.relocation.interval is not None)
    trained = Adapter if config.lora.rank else nnx.Param

    def create(system: System) -> tuple[StackedDecoder, nnx.Optimizer]:
        model = _model(config, mesh, topology, system, decoder, has_padding)
        return model, nnx.Optimizer(model, make_optimizer(config), wrt=trained)

    graph, shapes = nnx.split(nnx.eval_shape(partial(create, system)))
    limited = system.dispatch.buffers.max_rounds is not None
    # Validation has no second program, so it uses the one without a limit on rounds.
    unlimited = system.replace(buffers=replace(system.dispatch.buffers, max_rounds=None))
    whole = nnx.split(nnx.eval_shape(partial(create, unlimited)))[0] if limited else graph
    shardings = state_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    options = compiler_options(mesh)

    def jitted(step: Callable) -> Wrapped:
        out = (shardings, everywhere, everywhere, everywhere)
        return jax.jit(step, out_shardings=out, donate_argnums=0, compiler_options=options)

    def evaluate(state: nnx.State, tokens: Array) -> Array:
        model: StackedDecoder = nnx.merge(whole, state)[0]
        return model.loss(tokens, num_predicted(tokens))[0]

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
        model=lambda state: nnx.merge(graph, state)[0],
        topology=topology,
    )


def _check_stateless(system: System, config: TrainConfig) -> None:
    sizes = config.parallel.expert_parallel, config.model.num_experts
    if system.migrate is not None or jax.tree.leaves(system.balancer.init(sizes)):
        raise ValueError(
            f"parallel.system is {config.parallel.system!r}; expected one without state between microbatches, as "
            f"parallel.stages is {config.parallel.stages}"
        )


def _model(
    config: TrainConfig,
    mesh: Mesh,
    topology: Topology,
    system: System,
    decoder: DecoderConfig | None,
    has_padding: bool,
) -> StackedDecoder:
    rngs, sizes = nnx.Rngs(config.seed), preset_config(config.model) if decoder is None else decoder
    if config.lora.rank > sizes.embed_dim:
        expected = f"at most {sizes.embed_dim}, the width of the model"
        raise ValueError(f"lora.rank is {config.lora.rank}; expected {expected}")
    # Experts of a domain of `migrate` are sharded by its own rules.
    rules = expert_rules(mesh, sizes.num_experts) if system.migrate is None else None
    whole = Decoder(sizes, mesh=mesh, system=system, topology=topology, rules=rules, rngs=rngs)
    remat = ",".join(KEPT) if config.model.remat is None else config.model.remat
    options: dict[str, Any] = {"has_padding": has_padding, "lora": config.lora, "rngs": rngs}
    options["within_documents"] = decoder is not None and config.data.within_documents
    options["adapted"] = target_paths(sizes, config.lora.targets) if config.lora.rank else None
    with in_section("parallel"):
        pipeline = config.parallel if config.parallel.stages > 1 else None
        return StackedDecoder(whole, remat=remat, pipeline=pipeline, **options)


def _step(
    config: TrainConfig,
    mesh: Mesh,
    graph: nnx.GraphDef,
    state: nnx.State,
    tokens: Array,
    experts: Array | None = None,
) -> tuple[nnx.State, Array, Array, Stats]:
    model, optimizer = nnx.merge(graph, state)
    weight = config.model.further_weight
    loss_of: LossOf = partial(StackedDecoder.loss, further_weight=weight)
    counts = num_predicted(tokens, len(model.further) if weight else 0)
    loss, stats, gradients = loss_and_gradients(
        model, optimizer.wrt, loss_of, tokens, counts, config.batch.accumulate, mesh, experts
    )
    norm = gradient_norm(gradients)
    apply_gradients(model, optimizer, gradients)
    if config.relocation.interval is not None:
        model.update_loads(stats)
    if config.model.bias_rate:
        model.update_bias(stats, config.model.bias_rate)
    return nnx.state((model, optimizer)), loss, norm, stats


def _step_if_served(
    step: Callable, state: nnx.State, tokens: Array, experts: Array | None = None
) -> tuple[nnx.State, Array, Array, Stats]:
    """Return the state unchanged if a plan needs more rounds than the program has, so that the step can be repeated."""
    # The state is donated, so the caller has no copy of it. The update reads the old values anyway.
    # Copy the tree, as Flax changes the variables of `state` in place.
    before = jax.tree.map(lambda leaf: leaf, state)
    after, loss, norm, stats = step(state, tokens, experts)
    is_served = (stats.fault.code == 0).all()
    return jax.tree.map(partial(jnp.where, is_served), after, before), loss, norm, stats

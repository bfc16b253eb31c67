"""Jitted programs of training: initial state, optimizer step and validation.

The optimizer is AdamW with a learning rate schedule and clipped gradients. `loss_and_gradients` runs the forward and
backward pass on the whole batch or in microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Stats, System, Topology, compiler_options, router_loss
from models.config import TrainConfig
from models.data.marks import are_predicted, segments, words
from models.decoder.config import DecoderConfig
from models.decoder.layers import EXPERT_RULES, KEPT, ROUTER
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.decoder.tiny import LanguageModel
from models.mesh import placed_shapes, state_shardings
from models.training.resume import moved_state

FINAL_LEARNING_RATE = 0.1
"""Final learning rate of decaying schedules, as a fraction of the peak."""

STABLE = 0.8
"""Fraction of the steps at which the schedule `wsd` starts to decay."""


def make_optimizer(config: TrainConfig, decays: Callable[[Any], Any] | None = None) -> optax.GradientTransformation:
    """Return AdamW with gradients clipped by their global norm over all devices.

    Args:
        config: configuration of the run.
        decays: function from the parameters to Booleans, True where weight decay applies; `None` (default) for all.
    """
    decay = config.optimizer.weight_decay
    return optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.adamw(make_schedule(config), b2=0.95, weight_decay=decay, mask=decays),
    )


def decays_weights(params: Any) -> Any:
    """Return True for the matrices of a decoder, False for norms, biases, attention sinks and routers."""

    def is_decayed(path: Any, leaf: Any) -> bool:
        names = tuple(str(jax.tree_util.keystr((key,), simple=True)) for key in path)
        names = tuple(name for name in names if name != "value")
        return leaf.ndim >= 2 and "bias" not in names[-1] and names[-2:] != ROUTER

    return jax.tree.map_with_path(is_decayed, params)


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, gradients: nnx.State) -> None:
    """Update a model and its optimizer in place, inside a traced step."""
    # optax mixes integer counts and floats, which strict dtype promotion rejects.
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate schedule, with steps from 0: a linear warm-up, then the configured schedule."""
    warmup_steps, peak = min(config.optimizer.warmup_steps, config.steps // 5), config.optimizer.learning_rate
    # Start above 0; otherwise the first step would not change the parameters.
    first, last = peak / (warmup_steps + 1), FINAL_LEARNING_RATE * peak
    if config.optimizer.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup_steps, config.steps, last)
    stable = {"linear": warmup_steps, "constant": config.steps, "wsd": max(warmup_steps, int(STABLE * config.steps))}
    start = stable[config.optimizer.schedule]
    return optax.join_schedules(
        [
            optax.linear_schedule(first, peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, max(config.steps - start, 1)),
        ],
        [warmup_steps, start],
    )


Model = Callable[[Array], tuple[Array, Stats]]


def next_token_loss(model: Model, tokens: Array) -> tuple[Array, Stats]:
    """Compute the mean cross-entropy of `tokens[:, 1:]` in nats per token, and statistics.

    Args:
        model: function from int32 `[B, T]` to logits `[B, T, vocab_size]` and statistics.
        tokens: int32 `[B, T + 1]`, with `marks`: starts of documents and context are not predicted.
    """
    return _share_of_loss(model, tokens, num_predicted(tokens))


def packed_loss(model: Decoder, tokens: Array) -> tuple[Array, Stats]:
    """Compute `next_token_loss` with attention and positions within documents; the arguments match."""
    return next_token_loss(lambda plain: model(plain, segments=segments(tokens[:, :-1])), tokens)


def num_predicted(tokens: Array) -> Array:
    """Return the number of predicted tokens of `[B, T + 1]`, at least 1, as float32."""
    return jnp.maximum(are_predicted(tokens[:, 1:]).sum(dtype=jnp.int32), 1).astype(jnp.float32)


def _share_of_loss(model: Model, tokens: Array, count: Array) -> tuple[Array, Stats]:
    """Return the summed cross-entropy of predicted tokens divided by `count`, the number over all microbatches."""
    plain = words(tokens)
    logits, stats = model(plain[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, plain[:, 1:])
    return jnp.where(are_predicted(tokens[:, 1:]), losses, 0).sum() / count, stats


def further_loss(model: Decoder, tokens: Array, weight: float) -> tuple[Array, Stats]:
    """Compute `next_token_loss` plus the weighted multi-token prediction loss.

    Args:
        model: return value of `from_pretrained(predict_further=True)`.
        tokens: int32 `[B, T + 1]`, with marks; no prediction crosses the start of a document.
        weight: factor on the mean loss of the `further` modules; the paper uses 0.3, and 0.1 for the last third.

    Reference:
        DeepSeek-V3 technical report, section 2.2.2.
    """
    plain, inside, losses = words(tokens), tokens[:, 1:] >= 0, []
    logits, stats = model.ahead(plain[:, :-1], plain[:, 1:], segments(tokens[:, :-1]))
    for k, one in enumerate(logits):
        if k > 0:
            inside = inside[:, :-1] & (tokens[:, 1 + k :] >= 0)
        each = optax.softmax_cross_entropy_with_integer_labels(one[:, : one.shape[1] - k], plain[:, 1 + k :])
        counted = inside & are_predicted(tokens[:, 1 + k :])
        count = jnp.maximum(counted.sum(dtype=jnp.int32), 1).astype(jnp.float32)
        losses.append(jnp.where(counted, each, 0).sum() / count)
    return losses[0] + weight * sum(losses[1:]) / len(losses[1:]), stats


def loss_and_gradients(model: Any, tokens: Array, accumulate: int, mesh: Mesh) -> tuple[Array, Stats, nnx.State]:
    """Compute the cross-entropy of a batch, statistics, and the gradient including the router losses.

    Each microbatch has the same number of sequences per device, and is routed and planned separately. The balancer
    processes them in sequence, and their router losses are averaged. Otherwise the gradient equals the gradient of the
    whole batch.

    Args:
        model: an `nnx.Module` as in `next_token_loss`; the state of its balancers is updated.
        tokens: int32 `[B, T + 1]`, with marks.
        accumulate: number of microbatches.
        mesh: devices over which sequences are split.

    Returns:
        The cross-entropy in nats per token; statistics `[layers, accumulate * D, ...]`, with microbatches as groups,
        those of the first microbatch first; and the gradient.
    """
    count = num_predicted(tokens)
    if accumulate == 1:
        return _of_one(model, tokens, count, 1)
    graph, _ = nnx.split(model)
    params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    # Each device contributes sequences to every microbatch, so the split moves no data.
    parts = tokens.reshape(-1, accumulate, tokens.shape[1]).swapaxes(0, 1)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)))
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), state_shardings(params, mesh))

    def add(sums: tuple[nnx.State, Array, nnx.State], part: Array) -> tuple[tuple[nnx.State, Array, nnx.State], Stats]:
        gradients, loss, rest = sums
        # Flax requires variables created inside the scan body.
        model = nnx.merge(graph, params, rest, copy=True)
        share, stats, more = _of_one(model, part, count, accumulate)
        return (jax.tree.map(jnp.add, gradients, more), loss + share, nnx.state(model, nnx.Not(nnx.Param))), stats

    (gradients, loss, rest), stats = jax.lax.scan(add, (zeros, jnp.zeros((), jnp.float32), rest), parts)
    nnx.update(model, rest)
    return loss, jax.tree.map(_as_groups, stats), gradients


def _of_one(model: Any, tokens: Array, count: Array, accumulate: int) -> tuple[Array, Stats, nnx.State]:
    def objective(model: Any) -> tuple[Array, tuple[Array, Stats]]:
        loss, stats = _share_of_loss(model, tokens, count)
        return loss + router_loss(stats) / accumulate, (loss, stats)

    (_, (loss, stats)), gradients = nnx.value_and_grad(objective, has_aux=True)(model)
    return loss, stats, gradients


def _as_groups(leaf: Array) -> Array:
    """Reshape `[microbatches, layers, D, ...]` to `[layers, microbatches * D, ...]`."""
    return leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1, *leaf.shape[3:])


@dataclass(frozen=True, eq=False)
class Programs:
    """Jitted programs of a training run.

    Args:
        state_shapes: shapes and shardings of the state: parameters, optimizer, balancer.
        init: `() -> state`, for the first step.
        step: `(state, tokens) -> (state, loss, stats)`, donating the state; see `loss_and_gradients`. If the system has
            `max_rounds`, a step with a fault returns the state unchanged.
        step_again: `step` without the limit on rounds; `None` if `step` has none.
        evaluate: `(state, tokens) -> loss`, without a gradient.
        move: `(state, permutation) -> state`, with the experts relocated; it donates the state.
        topology: topology of the mesh.
    """

    state_shapes: nnx.State
    init: Callable[[], nnx.State]
    step: Wrapped
    step_again: Wrapped | None
    evaluate: Callable[[nnx.State, Array], Array]
    move: Callable[[nnx.State, Array | np.ndarray], nnx.State]
    topology: Topology


def make_programs(config: TrainConfig, mesh: Mesh, system: System) -> Programs:
    """Build the programs, without compiling.

    Args:
        config: configuration of the run.
        mesh: return value of `make_mesh`; if the system has `migrate`, the mesh of its expert domains.
        system: load-balancing system.

    Raises:
        ValueError: the model does not fit the mesh.
    """
    if system.migrate is None:
        topology = Topology.from_mesh(mesh, ranks_per_domain=config.parallel.ranks_per_domain)
    else:
        topology = system.migrate.domains.between
    system = system.replace(relocates=config.relocation.interval is not None)
    place: dict[str, Any] = {"mesh": mesh, "topology": topology, "split": config.parallel.fsdp}

    def create(system: System) -> tuple[LanguageModel, nnx.Optimizer]:
        model = LanguageModel(config.model, system=system, rngs=nnx.Rngs(config.seed), **place)
        return model, nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(partial(create, system)))
    limited = system.dispatch.buffers.max_rounds is not None
    # Validation has no second program, so it uses the one without a limit on rounds.
    unlimited = system.replace(buffers=replace(system.dispatch.buffers, max_rounds=None))
    whole = nnx.split(nnx.eval_shape(partial(create, unlimited)))[0] if limited else graph
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
    loss, stats, gradients = loss_and_gradients(model, tokens, config.batch.accumulate, mesh)
    apply_gradients(model, optimizer, gradients)
    for i, block in enumerate(model.blocks):
        of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], stats)
        if config.relocation.interval is not None:
            block.moe.update_loads(of_layer)
        if config.model.bias_rate:
            block.moe.update_bias(of_layer, config.model.bias_rate)
    return nnx.state((model, optimizer)), loss, stats


def _step_if_served(step: Callable, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
    """Return the state unchanged if a plan needs more rounds than the program has, so that the step can be repeated.

    The state is donated, so the caller has no copy of it. The update reads the old values anyway.
    """
    # Copy the tree, as Flax changes the variables of `state` in place.
    before = jax.tree.map(lambda leaf: leaf, state)
    after, loss, stats = step(state, tokens)
    is_served = (stats.fault.code == 0).all()
    return jax.tree.map(partial(jnp.where, is_served), after, before), loss, stats


@dataclass(frozen=True, eq=False)
class SplitPrograms:
    """Jitted programs to train a decoder sharded over all devices.

    Args:
        graph: graph definition of model and optimizer, for `nnx.merge`.
        state_shapes: shapes and shardings of the state: parameters, optimizer, balancer.
        init: `() -> state`, for the first step.
        step: `(state, tokens) -> (state, loss, stats)`, donating the state; tokens are int32 `[B, T + 1]`.
    """

    graph: nnx.GraphDef
    state_shapes: nnx.State
    init: Callable[[], nnx.State]
    step: Wrapped


def make_split_programs(
    config: DecoderConfig, train: TrainConfig, mesh: Mesh, system: System, kept: Sequence[str] = KEPT
) -> SplitPrograms:
    """Build the programs, without compiling.

    Args:
        config: sizes of the model.
        train: configuration of the run; its model section is not used.
        mesh: return value of `models.mesh.make_mesh`.
        system: load-balancing system.
        kept: names of the residuals of a layer, see `StackedDecoder`.

    Raises:
        ValueError: the model does not fit the mesh.
    """

    def create() -> tuple[StackedDecoder, nnx.Optimizer]:
        decoder = Decoder(
            config,
            mesh=mesh,
            system=system,
            ranks_per_domain=train.parallel.ranks_per_domain,
            rules=EXPERT_RULES,
            rngs=nnx.Rngs(train.seed),
        )
        model = StackedDecoder(decoder, kept=tuple(kept))
        return model, nnx.Optimizer(model, make_optimizer(train), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(create))
    shardings = state_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        model, optimizer = nnx.merge(graph, state)
        (loss, stats), gradients = nnx.value_and_grad(StackedDecoder.loss, has_aux=True)(model, tokens)
        apply_gradients(model, optimizer, gradients)
        return nnx.state((model, optimizer)), loss, stats

    return SplitPrograms(
        graph=graph,
        state_shapes=placed_shapes(shapes, shardings),
        init=jax.jit(lambda: nnx.state(create()), out_shardings=shardings),
        step=jax.jit(
            step,
            out_shardings=(shardings, everywhere, everywhere),
            donate_argnums=0,
            compiler_options=compiler_options(mesh),
        ),
    )

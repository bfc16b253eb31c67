"""A layer under a transformation, with its gradients: as a module, or as `moe` in a `jax.shard_map` of the caller."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import MoE, MoEParams, MoEState, TokenInfo, moe, router_loss
from jax_moe_lb.core import prepare_export
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.nn.variables import BalancerState
from jax_moe_lb.routing import NoisyTopK
from tests.stress.dense_module import Tokens

TRANSFORMATIONS = (
    "not jitted",
    "jit",
    "jit, donated",
    "checkpoint",
    "checkpoint, names kept",
    "checkpoint, products kept",
    "checkpoint, received arrays kept",
    "checkpoint, everything kept",
    "scan over layers",
    "scan over layers with weights of their own, checkpoint, names kept",
    "microbatches",
    "nnx.jit",
    "nnx.jit, nnx.remat",
    "exported",
    "two meshes",
)
FORMS = ("MoE", "moe", "MoE", "moe without check_vma", "MoE", "moe in two shard_maps")


class Rest(NamedTuple):
    """Arguments without a gradient."""

    fixed: nnx.State
    state: nnx.State
    tokens: Tokens
    target: Array


Call = Callable[[nnx.State, Array, Rest], tuple]
"""`(params, x, rest) -> (y, stats, state)`."""

Step = Callable[[nnx.State, Array, Rest], tuple]
"""`(params, x, rest) -> ((value, (y, stats, state)), gradients of params and x)`."""


def fits(form: str, layer: MoE) -> bool:
    """Return whether `moe` alone can compute the layer."""
    plain = not (
        layer.topology.tensor_axes or layer.shards.exp_axes or layer.shards.embed_axes or layer.shards.mlp_axes
    )
    if form == "MoE":
        return True
    if form != "moe in two shard_maps":
        return plain and layer.shared_expert is None
    # Noise depends on the rank among all groups.
    within = layer.topology.data_axes == ("data",) and layer.system.migrate is None
    noisy = any(isinstance(router, NoisyTopK) for router in (layer.router, getattr(layer.router, "router", None)))
    return within and plain and layer.shared_expert is None and not noisy


class Parts(NamedTuple):
    """The parts of a layer."""

    graph: Any
    params: nnx.State
    fixed: nnx.State
    state: nnx.State
    others: nnx.State

    @classmethod
    def of(cls, layer: MoE) -> "Parts":
        def is_fixed(path: tuple, variable: Any) -> bool:
            return path[-1] in ("bias", "homes")

        return cls(*nnx.split(layer, nnx.Param, is_fixed, BalancerState, ...))

    def merged(self, params: nnx.State, fixed: nnx.State, state: nnx.State) -> MoE:
        return nnx.merge(self.graph, params, fixed, state, self.others, copy=True)


def given_of(tokens: Tokens, static: dict) -> dict:
    """Return the arguments of a call besides `x`; the reference has numbers of segments on the host."""
    segments = static["segments"]
    return tokens._asdict() | static | {"segments": None if segments is None else jnp.asarray(segments)}


def call_of(layer: MoE, form: str, static: dict) -> Call:
    parts = Parts.of(layer)

    def call(params: nnx.State, x: Array, rest: Rest) -> tuple:
        merged = parts.merged(params, rest.fixed, rest.state)
        given = given_of(rest.tokens, static)
        if form == "MoE":
            y, stats = merged(x, **given)
            return y, stats, nnx.state(merged, BalancerState)
        y, stats, state = function(merged, form, x, Tokens(**given))
        if merged.state is not None:
            merged.state.set_value(state)
        return y, stats, nnx.state(merged, BalancerState)

    return call


def function(layer: MoE, form: str, x: Array, tokens: Tokens) -> tuple:
    """Return outputs, statistics and balancer state of `moe` on all ranks, each group with its own entry."""
    mesh, topology, migrate = layer.mesh, layer.topology, layer.system.migrate
    by_token = PartitionSpec(topology.data_axes + topology.expert_axes)
    by_expert = PartitionSpec(topology.expert_axes if migrate is None else migrate.domains.expert_axes)
    by_group, whole = PartitionSpec(topology.data_axes or None), PartitionSpec()
    around = {"data"} if form == "moe in two shard_maps" else set()
    x = x if layer.precision.dtype is None else x.astype(layer.precision.dtype)
    number = tokens.num_segments
    segments = None if tokens.segments is None else jnp.asarray(tokens.segments, jnp.int32)
    of_tokens = (tokens.mask, jnp.asarray(tokens.token_ids, jnp.int32), segments, jnp.arange(len(x), dtype=jnp.int32))
    of_tokens += (tokens.experts, tokens.weights)
    experts = jax.tree.map(lambda w: w.astype(x.dtype), layer._experts())
    router = (
        layer.kernel[...],
        None if layer.kernel_bias is None else layer.kernel_bias[...],
        None if layer.bias is None else layer.bias[...],
    )
    homes = None if layer.homes is None else layer.homes[...]
    state = layer.empty_state if layer.state is None else layer.state.get_value()
    if around:
        topology = replace(topology, data_axes=())

    def one_rank(x, of_tokens, experts, router, homes, key, state):
        mask, ids, segments, position, given, weights = of_tokens
        position = position if around else None
        info = TokenInfo(mask, ids, key, segments, number if segments is not None else None, position, given, weights)
        start = MoEState(jax.tree.map(lambda leaf: leaf[0], state), homes)
        kernel, *biases = router
        params = MoEParams(kernel, experts, *biases)
        y, stats, after = moe(x, params, layer.router, layer.system, topology, start, info, layer.losses)
        return y, *jax.tree.map(lambda leaf: leaf[None], (stats, after.balancer))

    specs = (by_token, by_token, by_expert, whole, whole, whole, by_group)
    inner = [without(spec, around) for spec in specs]
    sharded = jax.shard_map(
        one_rank,
        mesh=None if around else mesh,
        in_specs=tuple(inner),
        out_specs=(inner[0], inner[-1], inner[-1]),
        axis_names=set(mesh.axis_names) - around,
        check_vma=form == "moe",
    )
    if around:
        inside = PartitionSpec("data")
        outer = (inside, inside, whole, whole, whole, whole, inside)
        options = {"mesh": mesh, "axis_names": around, "check_vma": False}
        sharded = jax.shard_map(sharded, in_specs=outer, out_specs=inside, **options)
    arguments = (x, of_tokens, experts, router, homes, tokens.key, state)
    if "Explicit" in str(mesh.axis_types):
        arguments = jax.tree.map(partial(put, mesh), specs, arguments)
    return sharded(*arguments)


def without(spec: PartitionSpec, around: set[str]) -> PartitionSpec:
    """Return a sharding without the axes of a surrounding `jax.shard_map`."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    return PartitionSpec(*(tuple(name for name in entry if name not in around) or None for entry in axes))


def put(mesh: Any, spec: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), tree)


def loss_of(mesh: Any, y: Array, stats: Any, target: Array) -> Array:
    """Return `sum(y * target)` plus all router losses."""
    if jax.typeof(y).sharding.mesh.are_all_axes_explicit:
        y = jax.sharding.reshard(y, NamedSharding(mesh, PartitionSpec()))
    return (y.astype(target.dtype) * target).sum() + router_loss(stats).astype(target.dtype)


def step_of(layer: MoE, transformation: str, form: str, static: dict) -> Step:
    if transformation.startswith("nnx"):
        return nnx_step(layer, "remat" in transformation, static)
    call = checkpointed(transformation, call_of(layer, form, static))
    call = over_layers(call, "own" in transformation) if transformation.startswith("scan") else call
    # Op-by-op execution on eight devices would take minutes.
    call = jax.jit(call) if transformation == "not jitted" else call

    def loss(params: nnx.State, x: Array, rest: Rest) -> tuple:
        y, stats, state = call(params, x, rest)
        return loss_of(layer.mesh, y, stats, rest.target), (y, stats, state)

    step = jax.value_and_grad(loss, (0, 1), has_aux=True)
    step = accumulated(step) if transformation == "microbatches" else step
    if transformation == "not jitted":
        return step
    return jax.jit(step, donate_argnums=(0, 1) if transformation == "jit, donated" else ())


def nnx_step(layer: MoE, remat: bool, static: dict) -> Step:
    def loss(layer: MoE, x: Array, tokens: Tokens, target: Array) -> tuple:
        y, stats = layer(x, **given_of(tokens, static))
        return loss_of(layer.mesh, y, stats, target), (y, stats)

    step = nnx.jit(nnx.value_and_grad(nnx.remat(loss) if remat else loss, argnums=(0, 1), has_aux=True))

    def run(params: nnx.State, x: Array, rest: Rest) -> tuple:
        nnx.update(layer, params, rest.fixed, rest.state)
        (value, (y, stats)), gradients = step(layer, x, rest.tokens, rest.target)
        return (value, (y, stats, nnx.state(layer, BalancerState))), gradients

    return run


RECEIVED = ("moe_dispatched_rows", "moe_replicas", "moe_hidden")
"""Names of the arrays kept by `Saved`."""


def checkpointed(transformation: str, call: Call) -> Call:
    policies = jax.checkpoint_policies
    if "names kept" in transformation:
        return jax.checkpoint(call, policy=policies.save_only_these_names(*CHECKPOINT_NAMES))
    named = {
        "checkpoint": None,
        "checkpoint, products kept": policies.dots_saveable,
        "checkpoint, received arrays kept": policies.save_only_these_names(*CHECKPOINT_NAMES, *RECEIVED),
        "checkpoint, everything kept": policies.everything_saveable,
    }
    return jax.checkpoint(call, policy=named[transformation]) if transformation in named else call


def exported(step: Step, arguments: tuple) -> Step:
    """Return the step after serialization for these arguments."""
    # Trees of types that `jax.export` does not serialize stay outside.
    leaves, tree = jax.tree.flatten(arguments)
    out_trees = []

    @jax.jit
    def flat(*leaves: Array) -> tuple:
        (value, (y, stats, state)), gradients = step(*jax.tree.unflatten(tree, leaves))
        rest, out_tree = jax.tree.flatten((state, gradients))
        out_trees.append(out_tree)
        return value, y, stats, rest

    program = jax.export.export(flat, disabled_checks=prepare_export())(*leaves)
    call = jax.jit(jax.export.deserialize(program.serialize()).call)

    def run(*arguments: Any) -> tuple:
        value, y, stats, rest = call(*jax.tree.leaves(arguments))
        state, gradients = jax.tree.unflatten(out_trees[0], rest)
        return (value, (y, stats, state)), gradients

    return run


LAYERS = 2
"""Layers of a scan."""


def residual(width: int, num_experts: int) -> Any:
    """Restrict the residual to features, so that tokens keep their preferences through all layers."""
    return jnp.where(jnp.arange(width) < width - num_experts, 0.5, 0.0)


def over_layers(call: Call, own: bool) -> Call:
    """Scan over layers with separate states, and optionally separate weights."""

    def scanned(params: nnx.State, x: Array, rest: Rest) -> tuple:
        part = residual(*params["kernel"].get_value().shape[-2:]).astype(x.dtype)

        def one(x: Array, now: tuple) -> tuple:
            mine, state = now
            y, stats, state = call(params if mine is None else mine, x, rest._replace(state=state))
            return x + part.reshape((1,) * (x.ndim - 1) + (-1,)) * y.astype(x.dtype), (stats, state)

        y, (stats, state) = jax.lax.scan(one, x, (params if own else None, rest.state), length=LAYERS)
        return y, stats, state

    return scanned


def accumulated(step: Step) -> Step:
    """Sum gradients of the parameters over microbatches, carrying the balancer's state."""

    def run(params: nnx.State, x: Array, rest: Rest) -> tuple:
        def one(carry: tuple, batch: tuple) -> tuple:
            total, sums, state = carry
            x, mask, target = batch
            mine = rest._replace(tokens=rest.tokens._replace(mask=mask), state=state, target=target)
            (value, (y, stats, state)), (gradients, by_x) = step(params, x, mine)
            return (total + value, jax.tree.map(jnp.add, sums, gradients), state), (y, stats, by_x)

        start = (jnp.zeros((), rest.target.dtype), jax.tree.map(jnp.zeros_like, params), rest.state)
        (value, sums, state), (y, stats, by_x) = jax.lax.scan(one, start, (x, rest.tokens.mask, rest.target))
        return (value, (y, stats, state)), (sums, by_x)

    return run

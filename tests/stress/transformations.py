"""The layer on all ranks under a transformation, with its gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Experts, MoEParams, MoEState, TokenInfo, moe
from jax_moe_lb.core import prepare_export
from jax_moe_lb.layer import CHECKPOINT_NAMES
from tests.layer_cases import sequences
from tests.stress.draws import residual
from tests.stress.float64_experts import Weights
from tests.stress.programs import Program
from tests.stress.strategies import Strategies


class Given(NamedTuple):
    """Arguments without a gradient."""

    mask: Array | None
    target: Array
    bias: Array | None
    homes: Array | None


Layer = Callable[[Array, Weights, Given, Any], tuple]
"""`(x, weights, given, state) -> (y, stats, state)`."""

Step = Callable[[Array, Weights, Given, Any], tuple]
"""`(x, weights, given, state) -> ((value, (y, stats, state)), gradients of x and weights)`."""


def make_step(program: Program, strategies: Strategies) -> Step:
    """Return the step with loss `sum(y * target)` plus all router losses."""
    layer = checkpointed(program, make_layer(program, strategies))
    layer = over_layers(program, layer) if program.scans else layer

    def loss(x: Array, weights: Weights, given: Given, state: Any) -> tuple:
        y, stats, state = layer(x, weights, given, state)
        return (y.astype(given.target.dtype) * given.target).sum() + stats.loss.sum(), (y, stats, state)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    step = accumulated(step) if program.microbatches > 1 else step
    if program.transformation == "not jitted":
        return step
    return jax.jit(step, donate_argnums=(0, 1) if program.transformation == "jit, donated" else ())


def make_layer(program: Program, strategies: Strategies) -> Layer:
    """Return `moe` on all ranks; statistics and state have one entry per group."""
    mesh, topology, migrate = strategies.mesh, strategies.topology, strategies.system.migrate
    by_token = PartitionSpec(topology.data_axes + topology.expert_axes)
    by_expert = PartitionSpec(topology.expert_axes if migrate is None else migrate.domains.expert_axes)
    by_group, whole = PartitionSpec(topology.data_axes or None), PartitionSpec()
    specs = (by_token, by_token, Weights(whole, by_expert, by_expert, by_expert), whole, whole, by_group)
    around = {"data"} if program.transformation == "nested" else set()
    length = program.rules().sequence_length

    def one_rank(x: Array, mask: Array, weights: Weights, bias: Array, homes: Array, state: Any) -> tuple:
        experts = Experts(weights.up, weights.down, weights.gate)
        params = MoEParams(weights.kernel, experts, selection_bias=bias)
        start = MoEState(jax.tree.map(lambda leaf: leaf[0], state), homes)
        info = TokenInfo(mask, **sequences(len(x), length, topology))
        layer = (params, strategies.router, strategies.system, topology, start, info)
        y, stats, after = moe(x, *layer, strategies.losses)
        return y, *jax.tree.map(lambda leaf: leaf[None], (stats, after.balancer))

    sharded = jax.shard_map(
        one_rank,
        mesh=None if around else mesh,
        in_specs=specs,
        out_specs=(by_token, by_group, by_group),
        axis_names=set(mesh.axis_names) - around,
        check_vma=program.check_vma,
    )
    if around:
        sharded = over_groups(mesh, sharded)

    def layer(x: Array, weights: Weights, given: Given, state: Any) -> tuple:
        arrays = (x, given.mask, weights, given.bias, given.homes, state)
        if program.explicit:
            arrays = jax.tree.map(partial(put, mesh), specs, arrays)
        return sharded(*arrays)

    # Op-by-op execution on eight devices would take minutes.
    return jax.jit(layer) if program.transformation == "not jitted" else layer


def over_groups(mesh: Mesh, layer: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return the layer of all groups, with a `shard_map` over the data axis around that of one group."""
    by_group, whole = PartitionSpec("data"), PartitionSpec()
    return jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(by_group, by_group, whole, whole, whole, by_group),
        out_specs=by_group,
        axis_names={"data"},
        check_vma=False,
    )


def put(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    return jax.sharding.reshard(tree, NamedSharding(mesh, spec))


RECEIVED = ("moe_dispatched_rows", "moe_replicas", "moe_hidden")
"""Names of the arrays that `Saved` keeps."""


def checkpointed(program: Program, layer: Layer) -> Layer:
    policies = jax.checkpoint_policies
    if "names kept" in program.transformation:
        return jax.checkpoint(layer, policy=policies.save_only_these_names(*CHECKPOINT_NAMES))
    named = {
        "checkpoint": None,
        "checkpoint, products kept": policies.dots_saveable,
        "checkpoint, received arrays kept": policies.save_only_these_names(*CHECKPOINT_NAMES, *RECEIVED),
        "checkpoint, everything kept": policies.everything_saveable,
    }
    if program.transformation not in named:
        return layer
    return jax.checkpoint(layer, policy=named[program.transformation])


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


def over_layers(program: Program, layer: Layer) -> Layer:
    """Scan over layers with separate states, and optionally separate weights."""

    def scanned(x: Array, weights: Weights, given: Given, state: Any) -> tuple:
        part = jnp.asarray(residual(program), x.dtype)

        def one(x: Array, now: tuple) -> tuple:
            own, state = now
            y, stats, state = layer(x, weights if own is None else own, given, state)
            return x + part[None] * y, (stats, state)

        own = weights if program.own_weights else None
        y, (stats, state) = jax.lax.scan(one, x, (own, state), length=program.layers)
        return y, stats, state

    return scanned


def accumulated(step: Step) -> Step:
    """Sum gradients of the weights over microbatches, carrying the balancer's state."""

    def run(x: Array, weights: Weights, given: Given, state: Any) -> tuple:
        def one(carry: tuple, batch: tuple) -> tuple:
            total, sums, state = carry
            x, mask, target = batch
            mine = given._replace(mask=mask, target=target)
            (value, (y, stats, state)), (by_x, gradients) = step(x, weights, mine, state)
            return (total + value, jax.tree.map(jnp.add, sums, gradients), state), (y, stats, by_x)

        start = (jnp.zeros((), given.target.dtype), jax.tree.map(jnp.zeros_like, weights), state)
        (value, sums, state), (y, stats, by_x) = jax.lax.scan(one, start, (x, given.mask, given.target))
        return (value, (y, stats, state)), (by_x, sums)

    return run

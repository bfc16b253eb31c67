"""Every exported activation, router, dispatch and mix in a layer equals the dense float64 layer, gradients included.

The rows of padding are NaN. One layer has one choice of each kind, so that few layers have all of them.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb import (
    ExpertConfig,
    Losses,
    MoE,
    Precision,
    SharedExpert,
    System,
    TopK,
    Topology,
    kernels,
    router_loss,
    routing,
)
from jax_moe_lb.balancers import Exact
from jax_moe_lb.nn import SharedMix
from jax_moe_lb.routing import ForceBalanced, NoisyTopK, Routing
from tests.layer_cases import assert_close, make_mesh
from tests.marks import parametrize
from tests.stress.dense_module import Tokens, dense
from tests.test_options import DISPATCHES, ROUTERS

pytestmark = pytest.mark.usefixtures("cpu_branches")

WIDTH, INNER, NUM_EXPERTS, NUM_TOKENS = 8, 12, 8, 24


def routers():
    made = [cls(TopK(2) if "router" in inspect.signature(cls).parameters else 2) for cls in ROUTERS]
    ones = [TopK(1, score=jax.nn.sigmoid, scale_inputs=True), TopK(1), NoisyTopK(TopK(1)), ForceBalanced(TopK(1))]
    return [*made, *ones, TopK(3, logit_bias=True, capacity_factor=1.0)]


def activations():
    values = [getattr(kernels, name) for name in kernels.__all__ if name != "Experts"]
    return [value() if inspect.isclass(value) else value for value in values]


def cases():
    """Return layers with each choice; four have each kind of routing, one expert per token, and rows in lists."""
    choices = activations(), routers(), DISPATCHES
    numbers = [len(values) for values in choices]
    made = zip(*(itertools.islice(itertools.cycle(values), max(numbers)) for values in choices), strict=True)
    made = list(made)
    return [made[at] for at in (0, 2, 3, 5)], made


def name_of(value):
    per_tok = getattr(value, "num_experts_per_tok", "")
    return f"{getattr(value, '__name__', type(value).__name__)}{per_tok if isinstance(per_tok, int) else ''}"


def make(mesh, topology, **options):
    given = {"router": TopK(2), "system": System(Exact(), replica_slots=1)} | options
    precision = Precision(param_dtype=jnp.float64)
    return MoE(WIDTH, NUM_EXPERTS, mesh=mesh, topology=topology, precision=precision, rngs=nnx.Rngs(0), **given)


def arguments():
    x = jax.random.normal(jax.random.key(1), (NUM_TOKENS, WIDTH), jnp.float64)
    mask = jnp.arange(NUM_TOKENS) % 5 != 3
    tokens = {"mask": mask, "token_ids": jnp.arange(NUM_TOKENS) * 7 % 11, "key": jax.random.key(3)}
    return jnp.where(mask[:, None], x, jnp.nan), tokens


def on_host(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(jax.device_get(leaf)), tree)


def check(layer, x, **tokens):
    """Compare outputs and gradients of tokens and parameters with the dense layer; return the gradients."""
    target = jax.random.normal(jax.random.key(2), (NUM_TOKENS, WIDTH), jnp.float64)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def ours(params, x):
        y = nnx.merge(graph, params, rest, copy=True)(x, **tokens)[0].reshape(target.shape)
        return (y * target).sum(), y

    def reference(params, x):
        given = Tokens(**{"token_ids": jnp.zeros(x.shape[:-1], int), "key": jax.random.key(0)} | tokens)
        y = dense(nnx.merge(graph, params, on_host(rest), copy=True), x, given)[0].reshape(target.shape)
        return (y * target).sum(), y

    got = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(params, x)
    assert_close(got, jax.jit(jax.value_and_grad(reference, (0, 1), has_aux=True))(*on_host((params, x))), 1e-12)
    return nnx.to_pure_dict(got[1][0])


@pytest.mark.slow
@parametrize("activation, router, dispatch", *cases(), ids=name_of)
def test_every_choice(activation, router, dispatch, x64):
    """The gradient of a router with one expert per token is not 0 either, unless routing is not learned."""
    x, tokens = arguments()
    mesh = make_mesh((2, 2), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=2, rails_per_node=2)
    experts = ExpertConfig(INNER, activation, gated=len(inspect.signature(activation).parameters) == 2)
    layer = make(
        mesh, topology, experts=experts, router=router, system=System(Exact(), dispatch=dispatch(), replica_slots=1)
    )
    gradients = check(layer, x, **tokens)
    no_gradient = {name for name, leaf in gradients.items() if not jnp.abs(leaf).max() > 0}
    assert no_gradient == ({"kernel"} if isinstance(router, routing.HashRouter) else set())


def nan_for_padding(logits, bias, info):
    """Router whose results are NaN for padding."""
    routing = TopK(2)(logits)
    floats = (jnp.where(info.mask[:, None], x, jnp.nan) for x in (routing.weights, routing.logits, routing.scores))
    return Routing(routing.experts, *floats)


@pytest.mark.slow
def test_a_router_may_return_nan_for_padding():
    """Outputs, losses and gradients equal those of a router without NaN."""
    mesh, (x, tokens) = make_mesh((2,), ("expert",)), arguments()
    losses = Losses(switch=0.5, sequence=0.5, z=0.5)

    def results(router):
        options = {"mesh": mesh, "system": "plain", "experts": ExpertConfig(INNER), "losses": losses}
        layer = MoE(WIDTH, NUM_EXPERTS, router, rngs=nnx.Rngs(0), **options)
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, x):
            y, stats = nnx.merge(graph, params, rest, copy=True)(x, tokens["mask"].reshape(4, 6))
            return jnp.square(y).sum() + router_loss(stats)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x.reshape(4, 6, WIDTH))

    got, want = results(nan_for_padding), results(TopK(2))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def inner_over(axes):
    return (("exp", "expert"), ("embed", None), ("mlp", axes))


FSDP = (("exp", "expert"), ("embed", "data"), ("mlp", "tensor"))

PLACES = [
    (AxisType.Explicit, inner_over("tensor"), PartitionSpec("data", None, "tensor"), SharedMix.SIGMOID),
    (AxisType.Explicit, FSDP, PartitionSpec("data"), SharedMix.SUM),
    (AxisType.Auto, inner_over("tensor"), PartitionSpec("data"), SharedMix.SOFTMAX),
]
"""Type of the axes, the rules, the sharding of the tokens `[4, 6, H]`, and the mix."""


def two_more(gate, up):
    """Activation whose value at 0 is not 0."""
    return gate * up + 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rules", "spec", "mix"), PLACES)
def test_every_mix(kind, rules, spec, mix, x64):
    x, tokens = arguments()
    mesh = make_mesh((2, 2, 2), ("data", "expert", "tensor"), kind)
    topology = Topology.from_mesh(mesh, tensor_axes="tensor")
    options = {"shared": SharedExpert(8, mix), "experts": ExpertConfig(INNER, two_more), "rules": rules}
    placed = jax.device_put(x.reshape(4, 6, WIDTH), NamedSharding(mesh, spec))
    check(make(mesh, topology, **options), placed, mask=tokens["mask"].reshape(4, 6))

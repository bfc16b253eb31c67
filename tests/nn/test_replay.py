"""Given experts of tokens (router replay), their record, and the sequence loss over ranks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import ExpertConfig, Losses, Precision, TokenInfo, TopK, Topology, as_linen, router_loss
from jax_moe_lb.layer.route import with_given
from jax_moe_lb.routing import ExpertChoice, ForceBalanced, HashRouter, NoisyTopK
from tests.layer_cases import assert_close, make_mesh
from tests.marks import parametrize
from tests.nn.moe_cases import INNER, NUM_EXPERTS, WIDTH, dense_layer, make

MESHES = {
    "4": ((4,), ("expert",), ()),
    "2, 2": ((2, 2), ("data", "expert"), ()),
    "2, 2, 2": ((2, 2, 2), ("data", "expert", "tensor"), ("tensor",)),
}
SIGMOID = TopK(2, score=jax.nn.sigmoid, scale=1.5)


def layer_on(sizes, names, tensor_axes, router=SIGMOID, dtype=jnp.float64, **options):
    mesh = make_mesh(sizes, names)
    topology = Topology.from_mesh(mesh, "expert", tensor_axes=tensor_axes)
    return make(mesh, "greedy", router, topology=topology, precision=Precision(param_dtype=dtype), **options)


def replayed_dense(experts, weights=None):
    """Return the dense layer with the given experts of all tokens; rows of -1 route freely."""

    def router(logits, bias, info):
        free, flat = SIGMOID(logits, bias, info), experts.reshape(-1, experts.shape[-1])
        mine = (flat >= 0).any(1, keepdims=True)
        routing = SIGMOID.with_experts(logits, jnp.where(mine, flat, free.experts))
        if weights is None:
            return routing
        given = weights.reshape(flat.shape).astype(routing.weights.dtype)
        return replace(routing, weights=jnp.where(mine, given, free.weights))

    def call(layer, x):
        layer.router = router
        return dense_layer.__wrapped__(layer, x)

    return call


def rollout(shape, dtype):
    """Return tokens, distinct experts of each, a fifth of the tokens free, and weights."""
    keys = jax.random.split(jax.random.key(5), 4)
    order = jnp.argsort(jax.random.uniform(keys[0], (*shape, NUM_EXPERTS)), -1)[..., :2].astype(jnp.int32)
    free = jax.random.bernoulli(keys[1], 0.2, shape)
    x = jax.random.normal(keys[2], (*shape, WIDTH), dtype)
    return x, jnp.where(free[..., None], -1, order), jax.random.uniform(keys[3], (*shape, 2), dtype)


@pytest.mark.slow
@parametrize("mesh, shape, has_weights", [("2, 2, 2", (3, 5), True)], [("4", (2, 6), False)])
def test_given_experts_equal_the_dense_layer(mesh, shape, has_weights, x64):
    """Values and gradients of weights, tokens and given weights, in remat."""
    layer, one = layer_on(*MESHES[mesh]), layer_on((1,), ("expert",), ())
    x, experts, weights = rollout(shape, jnp.float64)

    def run(layer, call):
        def loss(layer, x, weights):
            y = call(layer, x, weights)
            return jnp.square(y).mean(), y

        return nnx.jit(nnx.value_and_grad(nnx.remat(loss), argnums=(0, 1, 2), has_aux=True))(layer, x, weights)

    def sharded(layer, x, weights):
        return layer(x, experts=experts, weights=weights if has_weights else None)[0]

    def dense(layer, x, weights):
        return replayed_dense(experts, weights if has_weights else None)(layer, x)

    ((_, y), got), ((_, want_y), want) = run(layer, sharded), run(one, dense)
    assert_close(y, want_y, 1e-12)
    assert_close((nnx.to_pure_dict(got[0]), *got[1:]), (nnx.to_pure_dict(want[0]), *want[1:]), 1e-12)


@pytest.mark.slow
def test_the_record_of_a_call_replays_it(x64):
    """The record of free routing gives the same outputs bit by bit, in a scan and with padding."""
    layer = layer_on((2, 2), ("data", "expert"), ())
    x = jax.random.normal(jax.random.key(1), (3, 3, 5, WIDTH), jnp.float64)
    mask = jnp.arange(5)[None] < jnp.array([5, 3, 4])[:, None]

    @nnx.jit
    def record(layer, x):
        return jax.lax.scan(lambda _, x: (None, layer(x, mask, return_routing=True)), None, x)[1]

    @nnx.jit
    def replay(layer, x, experts):
        def one(_, one):
            y, stats, again = layer(one[0], mask, experts=one[1], return_routing=True)
            return None, (y, stats, again)

        return jax.lax.scan(one, None, (x, experts))[1]

    y, stats, experts = record(layer, x)
    assert experts.shape == (3, 3, 5, 2)
    assert experts.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(experts >= 0).all(-1), np.broadcast_to(mask, (3, 3, 5)))
    counts = np.stack([np.bincount(one[one >= 0], minlength=NUM_EXPERTS) for one in np.asarray(experts)])
    np.testing.assert_array_equal(counts, stats.counts.sum((1, 2)))
    again_y, _, again = replay(layer, x, experts)
    np.testing.assert_array_equal(again, experts)
    np.testing.assert_array_equal(again_y, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "router",
    [SIGMOID, TopK(2, renormalise=False), NoisyTopK(), ForceBalanced(TopK(2)), ExpertChoice(2, 2), HashRouter(2)],
    ids=lambda router: type(router).__name__,
)
def test_every_router_keeps_its_own_weights(router):
    """Replaying the choice of a router changes nothing; a row of -1 is free, and -1 beside an expert is none."""
    logits = jax.random.normal(jax.random.key(0), (6, 4))
    info = TokenInfo(ids=jnp.arange(6, dtype=jnp.int32))
    free = router(logits, None, info)
    again = with_given(router, free, logits, free.experts.at[0].set(-1), None)
    np.testing.assert_array_equal(again.experts, free.experts)
    np.testing.assert_allclose(again.weights, free.weights, rtol=1e-6)
    single = with_given(router, free, logits, free.experts.at[1].set(jnp.array([3, -1])), None)
    assert single.experts[1].tolist() == [3, -1]
    assert single.weights[1, 1] == 0
    if router is SIGMOID:
        assert single.weights[1, 0] == pytest.approx(1.5)


@pytest.mark.slow
def test_given_experts_that_do_not_fit_are_refused():
    layer = layer_on((2,), ("expert",), (), dtype=jnp.float32)
    x, ids = jnp.ones((2, 4, WIDTH)), jnp.zeros((2, 4), jnp.int32)
    experts = jnp.zeros((2, 4, 2), jnp.int32)
    for options, message in (
        ({"weights": jnp.ones((2, 4, 2))}, "experts is None; expected a value with weights"),
        ({"segments": ids}, "num_segments is None; expected a value with segments"),
        ({"num_segments": 2}, "segments is None; expected a value with num_segments"),
        ({"segments": ids, "num_segments": 0}, "num_segments is 0; expected"),
        ({"experts": experts + NUM_EXPERTS}, "expert"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, **options)
    layer.router = lambda logits, bias, info: TopK(2)(logits, bias, info)
    with pytest.raises(TypeError, match=r"weights is None; expected an array, as .* has no method with_experts"):
        layer(x, experts=experts)


@pytest.mark.slow
def test_a_linen_layer_takes_and_returns_experts():
    mesh = make_mesh((2,), ("expert",))
    layer = as_linen(WIDTH, NUM_EXPERTS, TopK(2, selection_bias=True), mesh=mesh, experts=ExpertConfig(INNER))
    x = jax.random.normal(jax.random.key(0), (2, 4, WIDTH))
    (y, _, experts), variables = layer.init_with_output(jax.random.key(1), x, return_routing=True)
    assert {"params", "RouterBias"} <= set(variables)
    replay = jax.jit(lambda experts: layer.apply(variables, x, experts=experts)[0])
    assert_close(replay(experts), y, 1e-6)
    assert jnp.abs(replay((experts + 1) % NUM_EXPERTS) - y).max() > 1e-3


def dense_sequence_loss(logits, experts, segments, mask):
    """Return the mean loss over the segments of sequences `[B, S, ...]`, one by one."""
    losses, shares = [], jax.nn.softmax(logits, -1)
    for row in range(len(segments)):
        for segment in sorted({int(one) for one in segments[row] if one >= 0}):
            here = (segments[row] == segment) & mask[row]
            number = max(int(here.sum()), 1)
            fraction = np.bincount(np.asarray(experts[row])[here].ravel(), minlength=logits.shape[-1]) / (2 * number)
            losses.append(
                logits.shape[-1] * (fraction * jnp.where(here[:, None], shares[row], 0).sum(0) / number).sum()
            )
    return sum(losses) / len(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape", "packed"), [("4", (2, 32), False), ("2, 2", (2, 12), True)])
def test_the_sequence_loss_spans_ranks_and_packed_documents(mesh, shape, packed, x64):
    """Values and gradients against a loop over documents; sequences over ranks, groups, and with padding."""
    layer = layer_on(*MESHES[mesh], router=TopK(2), losses=Losses(sequence=1.0))
    x = jax.random.normal(jax.random.key(2), (*shape, WIDTH), jnp.float64)
    x = jax.device_put(x, NamedSharding(layer.mesh, PartitionSpec()))
    mask = np.arange(np.prod(shape)).reshape(shape) % 7 != 3
    segments = np.minimum(np.arange(shape[1])[None] // 4 + np.zeros((shape[0], 1), int), 2)
    segments[:, -1] = -1
    options = {"segments": jnp.asarray(segments, jnp.int32), "num_segments": 4} if packed else {}

    def loss(layer, x):
        _, stats, experts = layer(x, jnp.asarray(mask), return_routing=True, **options)
        return router_loss(stats), experts

    (value, experts), (of_layer, of_x) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(layer, x)
    x, kernel = jnp.asarray(np.asarray(x)), jnp.asarray(np.asarray(layer.kernel[...]))
    segments = segments if packed else np.zeros(shape, int)

    def dense(kernel, x):
        return dense_sequence_loss(x @ kernel, np.asarray(experts), segments, mask)

    want, (of_kernel, of_tokens) = jax.value_and_grad(dense, argnums=(0, 1))(kernel, x)
    assert_close((value, of_layer["kernel"][...], of_x), (want, of_kernel, of_tokens), 1e-10)

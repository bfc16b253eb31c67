import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Losses, TokenInfo, TopK, router_loss
from jax_moe_lb.routing import ExpertChoice, HashRouter, NoisyTopK
from jax_moe_lb.routing.capacity import capacity, within_capacity
from jax_moe_lb.routing.routers import NO_EXPERT, tokens_per_expert
from tests.layer_cases import make_layer, make_mesh

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)), jnp.float32)
WIDTH, NUM_EXPERTS, INNER = SIZES = 16, 8, 24


@pytest.mark.slow
def test_every_expert_chooses_its_best_tokens():
    mask = jnp.arange(32) % 5 != 0
    routing = ExpertChoice(2, max_experts_per_tok=8)(LOGITS, info=TokenInfo(mask=mask))
    assert tokens_per_expert(routing.experts.reshape(1, -1), 8)[0].tolist() == [8] * 8
    scores = np.where(mask[:, None], np.asarray(jax.nn.softmax(LOGITS)), -1)
    for e in range(8):
        chosen = (np.asarray(routing.experts) == e).any(1)
        assert set(np.flatnonzero(chosen)) == set(np.argsort(-scores[:, e], kind="stable")[:8])
    served = np.asarray(routing.experts) != NO_EXPERT
    np.testing.assert_array_equal(np.asarray(routing.weights)[~served], 0)
    np.testing.assert_allclose(
        np.asarray(routing.weights)[served],
        np.take_along_axis(scores, np.maximum(np.asarray(routing.experts), 0), 1)[served],
    )


def test_a_token_without_finite_logits_takes_no_place_and_has_no_finite_weight():
    for value in (np.nan, np.inf):
        routing = ExpertChoice(2, max_experts_per_tok=8)(LOGITS.at[3, 1].set(value))
        assert tokens_per_expert(routing.experts.reshape(1, -1), 8)[0].tolist() == [8] * 8
        assert (routing.experts[3] == NO_EXPERT).all()
        assert np.isnan(routing.weights).any(1).tolist() == [token == 3 for token in range(32)]


@pytest.mark.slow
def test_a_capacity_is_relative_to_the_copies_that_experts_choose():
    router = ExpertChoice(1, max_experts_per_tok=4, capacity_factor=0.25)
    layer = make_layer(make_mesh((2,), ("expert",)), "plain", SIZES, router)
    _, stats = nnx.jit(lambda layer, x: layer(x))(layer, jax.random.normal(jax.random.key(1), (32, WIDTH)))
    # Each of 8 experts chooses 2 of the 16 tokens of a rank, and serves 1.
    assert stats.counts.max() == 1


@pytest.mark.slow
def test_the_z_loss_includes_tokens_without_an_expert():
    layer = make_layer(make_mesh((2,), ("expert",)), "plain", SIZES, ExpertChoice(1), losses=Losses(z=1.0))
    x = jax.random.normal(jax.random.key(1), (32, WIDTH))
    _, stats, experts = nnx.jit(lambda layer, x: layer(x, return_routing=True))(layer, x)
    assert (experts == NO_EXPERT).all(1).any()
    z = jnp.square(jax.nn.logsumexp(x @ layer.kernel[...], 1))
    assert router_loss(stats) == pytest.approx(float(z.mean()), rel=1e-5)


@pytest.mark.slow
def test_a_token_has_no_more_experts_than_there_is_room_for():
    equal = jnp.zeros((8, 4))  # all experts choose the same tokens
    routing = ExpertChoice(2, max_experts_per_tok=2)(equal)
    assert (routing.experts[:4] != NO_EXPERT).all()
    assert (routing.experts[4:] == NO_EXPERT).all()


@pytest.mark.slow
@pytest.mark.parametrize(("per_tok", "num_experts"), [(1, 1), (1, 8), (3, 8), (8, 8), (6, 64)])
def test_a_hash_gives_different_experts_and_uses_all(per_tok, num_experts):
    ids = jnp.arange(4096, dtype=jnp.int32)
    routing = HashRouter(per_tok)(jnp.zeros((4096, num_experts)), info=TokenInfo(ids=ids))
    assert all(len(set(experts)) == per_tok for experts in routing.experts[:64].tolist())
    load = tokens_per_expert(routing.experts.reshape(1, -1), num_experts)[0]
    assert 2 * load.min() > load.max()


def test_inputs_of_several_experts_are_not_scaled():
    mesh = make_mesh((1,), ("expert",))
    layer = make_layer(mesh, "exact", SIZES, TopK(2, scale_inputs=True))
    with pytest.raises(ValueError, match="num_experts_per_tok is 2; expected 1, as"):
        nnx.eval_shape(layer, jnp.zeros((4, WIDTH)))


@pytest.mark.slow
def test_noise_moves_the_choice_and_not_the_weights():
    router = NoisyTopK(TopK(2, renormalise=False), std=1.0)
    one, other = (router(LOGITS, info=TokenInfo(key=jax.random.key(i))) for i in range(2))
    assert (one.experts != other.experts).any()
    scores = jax.nn.softmax(LOGITS, -1)
    np.testing.assert_allclose(one.weights, jnp.take_along_axis(scores, one.experts, 1), rtol=1e-6)
    np.testing.assert_array_equal(router(LOGITS).experts, TopK(2)(LOGITS).experts)


def dropped(experts, limit):
    """Return experts with copies above their limit dropped, choice by choice."""
    kept, room = np.full(experts.shape, NO_EXPERT), {}
    for k in range(experts.shape[1]):
        for t, e in enumerate(experts[:, k]):
            room[e] = room.get(e, 0) + 1
            if e != NO_EXPERT and room[e] <= limit:
                kept[t, k] = e
    return kept


@pytest.mark.parametrize("factor", [100.0, 1e10, 1e308])
def test_a_capacity_is_at_most_all_copies(factor):
    assert capacity(factor, 128, 8) == 128


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_capacity_against_a_loop(limit):
    experts = np.random.default_rng(1).integers(-1, 5, (40, 3)).astype(np.int32)
    np.testing.assert_array_equal(within_capacity(jnp.asarray(experts), 5, limit), dropped(experts, limit))


@pytest.mark.slow
def test_constant_weights_of_hash_router_have_gradients_without_a_mask():
    """Constants vary over no mesh axis, unlike the gradients of the weights."""
    mesh = make_mesh((4,), ("expert",))
    layer = make_layer(mesh, "plain", router=HashRouter(2))
    graph, state = nnx.split(layer)
    x, ids = jnp.ones((16, 8)), jnp.arange(16)
    gradients = jax.eval_shape(jax.grad(lambda s: nnx.merge(graph, s)(x, token_ids=ids)[0].sum()), state)
    assert gradients["up"].shape == (8, 8, 4)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import TokenInfo, TopK
from jax_moe_lb.core.types import iota
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.routing import ForceBalanced, GroupLimit
from jax_moe_lb.routing.routers import NO_EXPERT, mask_tokens, tokens_per_expert, updated_bias

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)), jnp.float32)


@pytest.mark.slow
def test_softmax_top_k_renormalised():
    routing = TopK(2)(LOGITS)
    order = np.argsort(-np.asarray(LOGITS), axis=1)[:, :2]
    np.testing.assert_array_equal(routing.experts, order)
    chosen = np.take_along_axis(np.asarray(LOGITS), order, 1)
    np.testing.assert_allclose(routing.weights, jax.nn.softmax(chosen), rtol=1e-5)


def test_softmax_top_k_as_it_is():
    routing = TopK(2, renormalise=False)(LOGITS)
    everything = np.asarray(jax.nn.softmax(LOGITS))
    np.testing.assert_allclose(routing.weights, np.sort(everything, 1)[:, :-3:-1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("score", [jax.nn.softmax, jax.nn.sigmoid])
def test_the_weight_of_one_expert_is_its_score(score):
    """A weight divided by itself would be 1, and the gradient of the router 0."""
    router = TopK(1, score=score)
    np.testing.assert_array_equal(router(LOGITS).weights[:, 0], score(LOGITS).max(1))
    assert jnp.abs(jax.grad(lambda logits: router(logits).weights.sum())(LOGITS)).max() > 0.01
    with pytest.warns(UserWarning, match="renormalise is True; expected None or False"):
        renormalised = TopK(1, score=score, renormalise=True)
    assert (renormalised(LOGITS).weights == 1).all()


@pytest.mark.slow
def test_the_bias_moves_the_choice_but_not_the_weight():
    router = TopK(2, score=jax.nn.sigmoid, scale=2.5)
    bias = jnp.zeros(8).at[5].set(10.0)
    routing = router(LOGITS, bias)
    assert (routing.experts[:, 0] == 5).all()
    scores = np.take_along_axis(np.asarray(jax.nn.sigmoid(LOGITS)), np.asarray(routing.experts), 1)
    np.testing.assert_allclose(routing.weights, 2.5 * scores / scores.sum(1, keepdims=True), rtol=1e-5)
    assert jnp.abs(jax.grad(lambda b: router(LOGITS, b).weights.sum())(bias)).max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("experts_per_score", [1, 2])
def test_group_limit_against_a_loop(experts_per_score):
    routing = TopK(3, score=jax.nn.sigmoid, group_limit=GroupLimit(4, 2, experts_per_score))(LOGITS)
    for scores, experts in zip(np.asarray(jax.nn.sigmoid(LOGITS)), np.asarray(routing.experts), strict=True):
        groups = scores.reshape(4, 2)
        best = np.argsort(-np.sort(groups, 1)[:, -experts_per_score:].sum(1), kind="stable")[:2]
        allowed = np.repeat(np.isin(np.arange(4), best), 2)
        assert experts.tolist() == np.argsort(-np.where(allowed, scores, -1), kind="stable")[:3].tolist()


@pytest.mark.slow
def test_force_balanced_is_balanced_and_keeps_weights_differentiable():
    router = ForceBalanced(TopK(2))
    routing = router(LOGITS, None, TokenInfo(position=3 + iota(32)))
    assert (tokens_per_expert(routing.experts.reshape(1, -1), 8) == 8).all()
    assert routing.experts[0].tolist() == [6, 7]
    gradient = jax.grad(lambda logits: (router(logits).weights[:, 0]).sum())(LOGITS)
    assert jnp.abs(gradient).max() > 0


@pytest.mark.slow
def test_masked_tokens_go_nowhere():
    mask = jnp.arange(32) % 2 == 0
    routing = mask_tokens(TopK(2)(LOGITS), mask)
    assert (routing.experts[1::2] == NO_EXPERT).all()
    assert (routing.weights[1::2] == 0).all()
    assert int(tokens_per_expert(routing.experts.reshape(1, -1), 8).sum()) == 32


@pytest.mark.slow
def test_counting_ignores_ids_out_of_range():
    experts = jnp.asarray([[0, 3, 3, -1, 4, -7]], jnp.int32)
    assert tokens_per_expert(experts, 4).tolist() == [[1, 0, 0, 2]]


def test_bias_update_moves_against_the_load():
    bias = updated_bias(jnp.zeros(4), jnp.asarray([0, 4, 8, 4], jnp.int32), 0.5)
    assert bias.tolist() == [0.5, 0, -0.5, 0]


def test_a_rate_of_another_dtype_keeps_that_of_the_bias(x64):
    assert updated_bias(jnp.zeros(4, jnp.float32), jnp.arange(4), np.float64(0.5)).dtype == jnp.float32


@pytest.mark.slow
def test_the_bias_evens_out_the_load():
    """A thousand updates on fixed logits bring the busiest expert near the mean."""
    logits = LOGITS + jnp.linspace(0, 2, 8)[None]
    router = TopK(2, score=jax.nn.sigmoid)

    def step(bias, _):
        load = tokens_per_expert(router(logits, bias).experts.reshape(1, -1), 8)[0]
        return updated_bias(bias, load, 1e-3), load

    _, loads = jax.lax.scan(step, jnp.zeros(8), None, length=1000)
    assert loads[0].max() >= 14
    assert loads[-1].max() <= 10


@pytest.mark.parametrize("depth", [20.0, 45.0, 90.0, 400.0])
@pytest.mark.parametrize("score", [jax.nn.softmax, jax.nn.sigmoid])
def test_weights_of_experts_far_below_the_best_are_finite_and_so_are_their_gradients(score, depth, x64):
    """Chosen logits with underflowing scores have the weights of float64, in which they do not underflow."""
    logits = np.array([[0.0, -depth, -depth - 1, -depth - 3]])
    experts = jnp.array([[1, 2]], jnp.int32)

    def first_weight(logits):
        return TopK(2, score=score).with_experts(logits, experts).weights[0, 0]

    # Exponentially falling scores: those of the two experts differ by a factor e.
    weight, gradient = jax.jit(jax.value_and_grad(first_weight))(jnp.asarray(logits, jnp.float32))
    want = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(weight, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0, want * (1 - want), -want * (1 - want), 0]], rtol=1e-4, atol=1e-7)


def test_affinities_are_shares_where_all_sigmoid_scores_underflow():
    routing = TopK(2, score=jax.nn.sigmoid)(jnp.full((1, 4), -200.0))
    np.testing.assert_allclose(routing.scores, np.full((1, 4), 0.25), rtol=1e-6)
    np.testing.assert_allclose(routing.weights, np.full((1, 2), 0.5), rtol=1e-6)


def test_a_policy_that_saves_the_routing_chooses_experts_once():
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    chosen = jax.checkpoint(lambda logits: jnp.square(TopK(2)(logits).weights).sum(), policy=policy)
    assert str(jax.make_jaxpr(jax.grad(chosen))(jnp.ones((4, 8)))).count("top_k[") == 1

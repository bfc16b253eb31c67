"""Effects of training options: unchanged results, or required changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import OptimizerConfig, ParallelConfig, TrainConfig
from models.decoder.layers import KEPT
from models.mesh import batch_sharding, make_mesh
from models.settings import updated
from models.training.optimizer import make_optimizer, make_schedule
from tests.models.reference_loss import next_token_loss
from tests.models.small import CONFIG, batch, programs

LAYER = dataclasses.replace(CONFIG.model, num_layers=1)
ON_8 = ParallelConfig(4, 2, "plain")
IN_TWO = dataclasses.replace(CONFIG.batch, accumulate=2)
SMALL = dataclasses.replace(
    CONFIG,
    model=LAYER,
    parallel=ON_8,
    steps=5,
    optimizer=OptimizerConfig(CONFIG.optimizer.learning_rate, warmup_steps=0),
)


def trained(config, steps=2):
    """Return state, losses and the last statistics."""
    made = programs(config)
    state, losses = made.init(), []
    for step in range(1, steps + 1):
        state, loss, _, stats = made.step(state, batch(config, step))
        losses.append(float(loss))
    return state, losses, stats


@pytest.fixture(scope="module")
def usual():
    return trained(SMALL)


def assert_same(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(got[0][0]), jax.tree.leaves(want[0][0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.thorough
def test_microbatches_learn_what_a_batch_does(usual):
    *_, stats = accumulated = trained(dataclasses.replace(SMALL, batch=IN_TWO))
    assert_same(accumulated, usual)
    # Groups of the first microbatch, then those of the second, each with its own counts.
    assert stats.counts.shape == (1, 2 * 4, 2, 16)
    copies = SMALL.tokens_per_step * LAYER.experts_per_token // 8
    assert (np.asarray(stats.counts).sum((2, 3)) == copies).all()
    rows = np.asarray(usual[2].counts).sum((0, 1, 2))
    np.testing.assert_array_equal(np.asarray(stats.counts).sum((0, 1, 2)), rows)


@pytest.mark.thorough
def test_balancers_that_remember_see_each_microbatch():
    state, _, _ = trained(dataclasses.replace(SMALL, parallel=ParallelConfig(1, 2, "eplb"), batch=IN_TWO), steps=1)
    history = state[0]["stacks"][0][0]["moe"]["state"].get_value().history
    assert np.asarray(history.steps).tolist() == [[2]]


@pytest.mark.thorough
def test_a_mesh_of_one_device_learns_the_same(usual):
    """All parameters are split over the devices: a device has an eighth of each matrix and of both Adam moments."""
    assert_same(trained(dataclasses.replace(SMALL, parallel=ParallelConfig(1, 1, "plain"))), usual)
    matrices = [leaf for path, leaf in jax.tree.leaves_with_path(usual[0]) if leaf.size >= 256]
    assert len(matrices) == 3 * (2 + 3 + 1 + 4)
    for leaf in matrices:
        assert leaf.size == 8 * leaf.addressable_shards[0].data.size, leaf.shape


@pytest.mark.thorough
def test_what_is_computed_again_is_the_same(usual):
    assert_same(trained(dataclasses.replace(SMALL, model=dataclasses.replace(LAYER, remat="full"))), usual)


@pytest.mark.thorough
def test_remat_says_what_is_kept():
    def residuals(**changes):
        made = programs(dataclasses.replace(SMALL, model=dataclasses.replace(LAYER, **changes)))
        tokens = jax.ShapeDtypeStruct((SMALL.batch.size, SMALL.batch.sequence_length + 1), jnp.int32)
        return str(made.step.trace(made.state_shapes, tokens).jaxpr)

    none, some, full = (residuals(remat=remat) for remat in ("none", "attention", "full"))
    assert full.count("exp ") > none.count("exp ")
    assert residuals() == residuals(remat=",".join(KEPT))
    assert len({none, some, full, residuals()}) == 4


@pytest.mark.slow
def test_beginnings_of_documents_are_not_predicted():
    def model(tokens):
        return jnp.zeros((*tokens.shape, 9)).at[..., 3].set(jnp.where(tokens == 5, 100.0, 0.0)), None

    tokens = jnp.array([[1, 5, ~3, 5], [5, ~1, 3, 3]])
    loss, _ = next_token_loss(model, tokens)
    # Four tokens are predicted; none follows a 5 that predicts it, correctly or not.
    assert loss == pytest.approx(np.log(9))
    assert next_token_loss(model, tokens.at[0, 2].set(3))[0] == pytest.approx(np.log(9) * 4 / 5)
    assert next_token_loss(model, ~tokens[:, :1].repeat(4, 1))[0] == 0


@pytest.mark.slow
def test_gradients_are_clipped_by_their_norm_over_all_devices():
    """This includes a sharded parameter."""
    mesh = make_mesh(ON_8)
    gradient = {"up": jax.device_put(jnp.full((8, 4), 3.0), batch_sharding(mesh))}
    transform = make_optimizer(updated(SMALL, {"optimizer": {"clip_norm": 2.0}}))
    with jax.numpy_dtype_promotion("standard"):
        state = transform.init(gradient)
        _, state = jax.jit(transform.update)(gradient, state, gradient)
    first_moment = state.inner[1][0].mu
    np.testing.assert_allclose(first_moment["up"], 0.1 * 2.0 / np.sqrt(8 * 4), rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("cosine", {20: 1, 60: 0.55, 100: 0.1}),
        ("linear", {20: 1, 60: 0.55, 100: 0.1}),
        ("constant", {20: 1, 60: 1, 99: 1}),
        ("wsd", {20: 1, 79: 1, 80: 1, 90: 0.55, 100: 0.1}),
    ],
)
def test_schedules(schedule, shares):
    config = TrainConfig(steps=100, optimizer=OptimizerConfig(2.0, schedule, warmup_steps=20))
    rate = make_schedule(config)
    assert rate(0) == pytest.approx(2 / 21)
    assert rate(10) == pytest.approx((rate(0) + 2) / 2)
    for step, share in shares.items():
        assert rate(step) == pytest.approx(2 * share, rel=1e-5)

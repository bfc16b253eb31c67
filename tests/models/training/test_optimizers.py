"""Optimizers by name, and their state in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import OPTIMIZERS, OptimizerConfig, ParallelConfig, TrainConfig
from models.mesh import make_mesh, state_shardings
from models.training.optimizer import apply_gradients, make_optimizer, rounded

CONFIG = TrainConfig(optimizer=OptimizerConfig(1e-2, "constant", warmup_steps=0, weight_decay=0.0))

RATES = {"adamw": 0.03, "muon": 0.1, "adafactor": 0.03, "sgd": 3.0}


def learned(config, dtype=jnp.float32, steps=60):
    """Return the losses of fitting a linear map, and model and optimizer."""
    model = nnx.Linear(4, 256, use_bias=False, param_dtype=dtype, dtype=jnp.float32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (64, 4))
    target = x @ jax.random.normal(jax.random.key(2), (4, 256)) * 0.3

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x) - target).mean())(model)
        apply_gradients(model, optimizer, gradients)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)], model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_with_state_of_the_dtype(name, state_dtype):
    rate = RATES[name]
    optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=rate, name=name, state_dtype=state_dtype)
    losses, _, after = learned(dataclasses.replace(CONFIG, optimizer=optimizer))
    assert losses[-1] < 0.5 * losses[0]
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(after)) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert dtypes == {jnp.dtype(state_dtype)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_decays_weights_only(name):
    """Muon decayed the norms, biases and routers that it leaves to AdamW."""
    rule = OptimizerConfig(1.0, "constant", warmup_steps=0, weight_decay=0.1, name=name)
    expected = {"norm": {"scale": 0}, "moe": {"kernel": 0, "kernel_bias": 0, "up": -0.1}, "embed": {"embedding": -0.1}}
    ones, zeros = (jax.tree.map(lambda _, fill=fill: jnp.full((2, 4), fill), expected) for fill in (1.0, 0.0))
    optimizer = make_optimizer(dataclasses.replace(CONFIG, optimizer=rule))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    jax.tree.map(np.testing.assert_allclose, updates, expected)


@pytest.mark.slow
def test_small_updates_of_bfloat16_parameters_add_up():
    """Each is below half the distance of two bfloat16 numbers, so that rounding to nearest would lose it."""
    small = dataclasses.replace(CONFIG.optimizer, learning_rate=1e-4)
    config = dataclasses.replace(CONFIG, optimizer=small)
    wide, *_ = learned(config, steps=100)
    narrow, model, _ = learned(config, jnp.bfloat16, steps=100)
    assert model.kernel[...].dtype == jnp.bfloat16
    assert narrow[0] - narrow[-1] == pytest.approx(wide[0] - wide[-1], rel=0.1)


@pytest.mark.slow
def test_rounding_keeps_the_mean_and_special_values():
    x = jnp.full((100_000,), 1 + 1 / 512, jnp.float32)
    found = np.asarray(rounded(x, jax.random.key(0)), np.float32)
    assert set(np.unique(found)) == {1.0, 1 + 1 / 128}
    assert found.mean() == pytest.approx(1 + 1 / 512, abs=1e-4)
    special = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1.5])
    np.testing.assert_array_equal(np.asarray(rounded(special, jax.random.key(0)), np.float32), special)


def test_state_of_another_shape_is_replicated(all_devices):
    mesh = make_mesh(ParallelConfig(2, 4))
    sharded = {"out_sharding": (None, ("data", "expert")), "mesh": mesh}
    model = nnx.Linear(256, 256, use_bias=False, kernel_metadata=sharded, rngs=nnx.Rngs(0))
    config = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, name="adafactor"))
    state = nnx.state(nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param))
    placed = jax.device_put(state, state_shardings(state, mesh))
    shapes = {leaf.shape for leaf in jax.tree.leaves(placed)}
    assert (256,) in shapes
    assert (256, 256) not in shapes

"""Scanned layers equal sequential layers, and parameters keep their dtype."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_moe_lb.layer.systems import system_named
from models.config import ModelConfig, ParallelConfig
from models.decoder.layers import one_by_one, scanned
from models.decoder.model import Decoder
from models.mesh import batch_sharding, make_mesh
from models.training.source import preset_config
from models.training.step import make_programs
from tests.models.small import CONFIG

PARALLEL = ParallelConfig(data_parallel=2, expert_parallel=2)
MODEL = ModelConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=8, num_experts=4)


class Seen(nnx.Variable):
    """Variable that is not a parameter and changes in each call."""


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.q = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jax.random.uniform(rngs.params(), (4,)))
        self.seen = Seen(jnp.zeros(4))

    def __call__(self, x):
        self.seen[...] += x.sum((0, 1)).astype(jnp.float32)
        y = checkpoint_name(self.q(x), "attention")
        return x + jnp.tanh(y) * self.scale[...].astype(x.dtype)[None, None], x.mean()


def with_gradients(model, call, x):
    """Return outputs, gradients and updated variables."""

    def loss(model):
        y, stats = call(model, x)
        # Use means to keep gradients small.
        return jnp.sin(y).mean(), (y, stats)

    gradients, (y, stats) = nnx.grad(loss, has_aux=True)(model)
    return y, stats, gradients, nnx.state(model, nnx.Not(nnx.Param))


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.slow
def test_a_loop_equals_its_layers():
    sharding = batch_sharding(make_mesh(PARALLEL))
    x = jax.random.normal(jax.random.key(1), (4, 3, 4))

    def outcome(call):
        layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(3)])
        return nnx.jit(lambda layers: with_gradients(layers, call, x))(layers)

    assert_close(outcome(partial(scanned, sharding=sharding)), outcome(one_by_one))


def test_weights_of_products_are_stacked_narrow():
    sharding = batch_sharding(make_mesh(PARALLEL))
    layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(3)])
    x = jnp.ones((4, 3, 4), jnp.bfloat16)
    graph, state = nnx.split(layers)
    program = str(jax.make_jaxpr(lambda s: scanned(nnx.merge(graph, s), x, sharding)[0])(state))
    assert "bf16[3,4,4]" in program
    assert "f32[3,4,4]" not in program
    assert "f32[3,4]" in program


@pytest.mark.thorough
@pytest.mark.slow
def test_a_loop_of_experts_equals_its_blocks():
    mesh = make_mesh(PARALLEL)
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 256)

    def outcome(config):
        model = Decoder(preset_config(config), mesh=mesh, system=system_named("plain"), rngs=nnx.Rngs(0))
        return nnx.jit(lambda model: with_gradients(model, Decoder.__call__, tokens))(model)

    assert_close(outcome(dataclasses.replace(MODEL, scan_layers=True)), outcome(MODEL))


def test_parameters_and_optimizer_stay_wide():
    narrow = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, compute_dtype="bfloat16"))
    shapes = make_programs(narrow, make_mesh(narrow.parallel), system_named("plain")).state_shapes
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32", "int32", "uint32"}

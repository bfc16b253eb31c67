"""A loop over stacked layers equals sequential layers, and parameters keep their dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import ParallelConfig
from models.decoder.layers import scan_states
from models.decoder.stacked import stacked
from models.mesh import batch_sharding, make_mesh
from tests.models.small import on, programs_of

PARALLEL = ParallelConfig(data_parallel=2, expert_parallel=2)


class Seen(nnx.Variable):
    """Variable besides the parameters, which changes in each call."""


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

    def in_sequence(layers, x):
        means = []
        for layer in layers:
            x, mean = layer(x)
            means.append(mean)
        return x, jnp.stack(means)

    def looped(stacks, x):
        graphs, states = zip(*map(nnx.split, stacks), strict=True)
        x, means, after, _ = scan_states(graphs, states, x, sharding, lambda state: state, "attention", ())
        nnx.update(stacks[0], after[0])
        return x, means

    layers = [Layer(nnx.Rngs(i)) for i in range(3)]
    (got, *got_states), (want, *want_states) = (
        nnx.jit(lambda given, call=call: with_gradients(given, call, x))(given)
        for call, given in ((looped, stacked(layers)), (in_sequence, nnx.List(layers)))
    )
    assert_close(got, want)
    for stack, of_layers in zip(got_states, want_states, strict=True):
        if isinstance(stack, nnx.State):
            of_layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(of_layers[i] for i in range(3)))
            stack = stack[0]
        assert_close(jax.tree.leaves(stack), jax.tree.leaves(of_layers))


def test_parameters_and_optimizer_stay_wide():
    config = on(1, 8, "plain")
    narrow = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype="bfloat16"))
    shapes = programs_of(narrow).state_shapes
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32", "int32", "uint32"}

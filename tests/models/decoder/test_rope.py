"""Rotary positions of long sequences."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Buffers, plain
from models.config import ParallelConfig
from models.decoder.rope import LongRope, Rope
from models.mesh import make_mesh
from tests.models.small import random_decoder, tiny_decoder

FACTORS = {"short_factors": (1.0, 2.0), "long_factors": (4.0, 5.0), "short_scale": 1.5, "long_scale": 2.0}
LONG = LongRope(4, base=100.0, original_positions=3, **FACTORS)


def test_a_sequence_longer_than_the_original_ones_has_the_long_factors():
    x = np.random.default_rng(0).normal(size=(2, 4, 1, 4)).astype(np.float32)
    positions = np.asarray([[0, 1, 2, 2], [0, 1, 2, 3]])
    for line, (factors, scale) in enumerate((((1.0, 2.0), 1.5), ((4.0, 5.0), 2.0))):
        angles = positions[line, :, None] / np.asarray(factors) / np.asarray([1.0, 10.0])
        turned = (x[line, :, 0, :2] + 1j * x[line, :, 0, 2:]) * np.exp(1j * angles) * scale
        got = LONG(jnp.asarray(x), jnp.asarray(positions, jnp.int32))[line, :, 0]
        np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


LENGTHS = (5, 8), (5, 5), (8, 8)


@pytest.mark.slow
def test_padding_makes_no_sequence_long():
    """A short prompt took the long factors beside a long one."""
    config = tiny_decoder("phimoe", num_hidden_layers=1)
    half = config.head_dim // 2
    rope = LongRope(2 * half, original_positions=5, short_factors=(1.0,) * half, long_factors=(4.0,) * half)
    config = dataclasses.replace(config, rope=rope)
    model = random_decoder(config, make_mesh(ParallelConfig(expert_parallel=1)), plain(Buffers(max_rounds=1)))
    tokens, run = jnp.arange(16, dtype=jnp.int32).reshape(2, 8), nnx.jit(lambda *given: given[0](*given[1:])[0])
    both, short, long = (run(model, tokens, jnp.arange(8)[None] < jnp.array([[n], [m]])) for n, m in LENGTHS)
    np.testing.assert_allclose(both[0, :5], short[0, :5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(both[1], long[1], rtol=1e-4, atol=1e-5)
    assert np.abs(short[0, :5] - long[0, :5]).max() > 1e-3


def test_a_sequence_has_the_long_factors_of_all_channels():
    with pytest.raises(ValueError, match="long_factor has 1 numbers; expected 2 positive ones"):
        LongRope(4, short_factors=(1.0, 1.0), long_factors=(1.0,))


def test_equal_bounds_of_llama3_are_a_step():
    """Llama 4 has them: a frequency is either unchanged or divided."""
    rope = Rope(8, base=1e4, kind="llama3", factor=16.0, original_positions=60, low_frequency=1.0, high_frequency=1.0)
    plain = Rope(8, base=1e4).frequencies()
    np.testing.assert_allclose(rope.frequencies(), plain / [1, 16, 16, 16], rtol=1e-6)

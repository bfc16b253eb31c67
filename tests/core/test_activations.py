"""Activations against their formulas in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.kernels import ClampedSwiGLU, geglu, gelu_exact, relu_squared, swiglu

GATE, UP = np.random.default_rng(0).normal(size=(2, 50)) * 6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate, up):
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return (up + 1) * gate * sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (swiglu, lambda gate, up: gate * sigmoid(gate) * up),
        (geglu, lambda gate, up: gelu_tanh(gate) * up),
        (ClampedSwiGLU(), clamped),
    ],
)
def test_with_a_gate(activation, formula):
    got = activation(jnp.asarray(GATE, jnp.float32), jnp.asarray(UP, jnp.float32))
    np.testing.assert_allclose(got, formula(GATE, UP), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (gelu_exact, lambda up: 0.5 * up * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))),
        (relu_squared, lambda up: np.maximum(up, 0) ** 2),
    ],
)
def test_without_a_gate(activation, formula):
    np.testing.assert_allclose(activation(jnp.asarray(UP, jnp.float32)), formula(UP), rtol=1e-5, atol=1e-5)

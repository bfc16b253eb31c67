"""Activations in float32 against their formulas in float64."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.kernels import ClampedSwiGLU
from tests.stress.dense_module import FORMULAS

GATE_AND_UP = 6 * np.random.default_rng(0).normal(size=(2, 50))


@pytest.mark.parametrize("activation", [activation for activation in FORMULAS if activation is not None])
def test_an_activation_is_its_formula(activation, x64):
    operands = GATE_AND_UP[: len(inspect.signature(activation).parameters)]
    got = activation(*jnp.asarray(operands, jnp.float32))
    np.testing.assert_allclose(got, FORMULAS[activation](*jnp.asarray(operands)), rtol=1e-5, atol=1e-5)


def test_a_limit_of_numpy_does_not_widen_its_operands(unchecked):
    gate, up = jnp.asarray(GATE_AND_UP, jnp.bfloat16)
    got = ClampedSwiGLU(np.float32(7.0), np.float64(1.702))(gate, up)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, ClampedSwiGLU()(gate, up))

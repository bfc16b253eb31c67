"""Layers drawn from public signatures equal a dense float64 layer; an option without a layer fails a test.

`python -m tests.stress.modules 0 1000 18` runs further layers on inputs of all kinds, `... modules 7 8 18` layer 7.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import MoE
from tests.marks import parametrize
from tests.stress.dense_module import Tokens
from tests.stress.modules import compare, transformation_of
from tests.stress.patterns import PATTERNS
from tests.stress.signatures import DRAWN, NAMED, UNDRAWN, Draw, draw_layer, options_of, parameters_of
from tests.stress.sizes import with_sizes
from tests.stress.transformations import FORMS, TRANSFORMATIONS
from tests.test_options import REFUSED

DRAWS = 250


@functools.cache
def drawn():
    """Return drawn options, parts and transformations, and refusals, of layers without arrays."""
    options, parts, ways, refused = set(), set(), set(), []
    with warnings.catch_warnings(action="ignore"):
        for seed in range(DRAWS):
            draws = []

            def make(seed=seed, draws=draws):
                layer, draw = draw_layer(seed)
                draws.append((draw, transformation_of(layer, draw)))
                return layer

            try:
                nnx.eval_shape(make)
            except ValueError as error:
                refused.append(str(error))
            else:
                ((draw, way),) = draws
                options |= draw.changed
                parts |= draw.parts
                ways |= set(way)
    return options, parts, ways, refused


@pytest.mark.slow
def test_every_option_is_drawn():
    options, _, _, refused = drawn()
    assert set().union(*map(options_of, DRAWN)) - options <= set(REFUSED)
    assert len(refused) < DRAWS / 4
    assert all("; expected " in line for line in refused)


@pytest.mark.slow
def test_every_part_is_drawn():
    """Each exported activation, router, dispatch and replication, and each named system."""
    _, parts, _, _ = drawn()
    assert set(NAMED) <= parts


@pytest.mark.slow
def test_every_transformation_is_drawn():
    _, _, ways, _ = drawn()
    assert ways == {*TRANSFORMATIONS, *FORMS}


def test_consecutive_layers_have_every_value():
    rng = np.random.default_rng(0)
    assert {Draw(seed, rng).spread("name", list(range(9))) for seed in range(18, 27)} == set(range(9))


def test_every_argument_of_a_call_is_drawn():
    assert set(parameters_of(MoE.__call__)) == {"x", "return_routing", *Tokens._fields}


def test_reasons_name_existing_options():
    assert set(UNDRAWN) <= {option for function in DRAWN for option in parameters_of(function)}


def test_an_option_without_values_is_an_error():
    def function(new=object):
        pass

    draw = Draw(0, rng=type("Always", (), {"random": lambda self: 1.0})())
    with pytest.raises((AssertionError, KeyError), match="new"):
        draw.options(function, {})


def test_sizes_are_sums_of_absolute_terms():
    """Of values and gradients, also through a difference whose value cancels."""
    x, w = jnp.array([[3.0, -3.0]]), jnp.array([[1.0], [1.0]])

    def function(x, w):
        return jax.value_and_grad(lambda x, w: 2 * jnp.tanh(jnp.sum(x @ w) - 1), (0, 1))(x, w)

    (value, (by_x, by_w)), (size, sizes) = with_sizes(function)(x, w)
    assert (value, size) == pytest.approx((2 * np.tanh(-1), 2 * np.tanh(1)))
    slope = 2 * (1 - np.tanh(1) ** 2)
    np.testing.assert_allclose((by_x[0], by_w[:, 0]), slope * np.array([[1, 1], [3, -3]]), 1e-6)
    assert (np.asarray(sizes[1]) >= np.abs(by_w) - 1e-6).all()
    np.testing.assert_allclose(with_sizes(lambda x, w: x @ w)(x, w), [[[0]], [[6]]])


@pytest.mark.slow
@parametrize("seed", [1], range(2, 34))
def test_random_layers_equal_the_dense_layer(seed):
    """One compilation, inputs of all kinds."""
    result = compare(seed, len(PATTERNS))
    assert result["faults"] == []
    assert result["refused"] or result["cases"] == len(PATTERNS)

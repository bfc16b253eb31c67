"""Layers drawn from public signatures equal a dense float64 layer; an option that is never drawn fails a test.

`python -m tests.stress.modules 0 1000 10` runs further layers, on ten inputs each.
"""

import functools
import warnings

import jax
import pytest
from flax import nnx

from jax_moe_lb import MoE
from tests.stress.dense_module import Tokens
from tests.stress.modules import Compiled
from tests.stress.signatures import DRAWN, NAMED, UNDRAWN, Draw, draw_layer, options_of, parameters_of
from tests.test_options import REFUSED

DRAWS = 250


@functools.cache
def drawn():
    """Return drawn options, drawn parts and refusals; layers are made without arrays, as compilation takes seconds."""
    options, parts, refused = set(), set(), []
    with warnings.catch_warnings(action="ignore"):
        for seed in range(DRAWS):
            draws = []

            def make(seed=seed, draws=draws):
                layer, draw = draw_layer(seed)
                draws.append(draw)
                return layer

            try:
                nnx.eval_shape(make)
            except ValueError as error:
                refused.append(str(error))
            else:
                options |= draws[0].changed
                parts |= draws[0].parts
    return options, parts, refused


@pytest.mark.slow
def test_every_option_is_drawn():
    options, _, refused = drawn()
    assert set().union(*map(options_of, DRAWN)) - options <= set(REFUSED)
    assert len(refused) < DRAWS / 4
    assert all("; expected " in line for line in refused)


@pytest.mark.slow
def test_every_part_is_drawn():
    """Each exported activation, router, dispatch and replication, and each named system."""
    _, parts, _ = drawn()
    assert set(NAMED) <= parts


def test_every_argument_of_a_call_is_drawn():
    assert set(parameters_of(MoE.__call__)) == {"x", "return_routing", *Tokens._fields}


def test_reasons_name_existing_options():
    assert set(UNDRAWN) <= {option for function in DRAWN for option in parameters_of(function)}


def test_an_option_without_values_is_an_error():
    def function(new=object):
        pass

    draw = Draw(rng=type("Always", (), {"random": lambda self: 1.0})())
    with pytest.raises((AssertionError, KeyError), match="new"):
        draw.options(function, {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 12))])
def test_random_layers_equal_the_dense_layer(seed, x64):
    # Tokens of some layers are wider than their parameters.
    with warnings.catch_warnings(action="ignore"), jax.numpy_dtype_promotion("standard"):
        assert list(Compiled(seed).cases(4)) == [[]] * 4

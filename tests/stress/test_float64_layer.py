"""Checks of the reference: gradients against finite differences, and values against another dense layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Experts
from tests.oracle import dense_moe
from tests.stress.draws import draw_inputs
from tests.stress.float64_experts import Weights
from tests.stress.float64_layer import Setting, network
from tests.stress.float64_router import Rules
from tests.stress.programs import LOSSES, ROUTERS, draw_programs
from tests.stress.strategies import make_router

NUM_EXPERTS, WIDTH, INNER, NUM_TOKENS = 8, 5, 3, 16


def rules_of(name: str, losses: str) -> Rules:
    rules = vars(ROUTERS[name]) | LOSSES[losses] | {"sequence_length": 4}
    return Rules(**rules | {"per_tok": rules["per_tok"] or NUM_EXPERTS})


def draw(rules: Rules, gated: bool, layers: int) -> tuple[Setting, np.ndarray, list[Weights], np.ndarray]:
    """Return two groups of two ranks, with padding."""
    rng = np.random.default_rng(5)
    inner = (layers, NUM_EXPERTS, WIDTH, INNER)
    kernels, (up, gate) = rng.normal(size=(layers, WIDTH, NUM_EXPERTS)), rng.normal(size=(2, *inner))
    down = rng.normal(size=(layers, NUM_EXPERTS, INNER, WIDTH))
    weights = [Weights(kernels[at], up[at], gate[at] if gated else None, down[at]) for at in range(layers)]
    mask, bias = rng.random(NUM_TOKENS) < 0.8, 0.3 * rng.normal(size=NUM_EXPERTS)
    setting = Setting(rules, 2, 2, mask, bias, rng.permutation(NUM_EXPERTS), np.ones(WIDTH) if layers > 1 else None)
    return setting, rng.normal(size=(NUM_TOKENS, WIDTH)), weights, rng.normal(size=(NUM_TOKENS, WIDTH))


@pytest.mark.parametrize("router", ROUTERS)
def test_gradients_equal_central_differences(router):
    """All entries of an array at once, along a random direction."""
    rng = np.random.default_rng(2)
    for losses, gated, layers in (("none", False, 1), ("all", True, 2)):
        setting, x, weights, target = draw(rules_of(router, losses), gated, layers)
        answer = network(setting, x, weights, target)
        # A choice with a small margin would change under the differences.
        assert min(told.margin for layer in answer.layers for told in layer.routed) > 1e-4
        arrays = [x, *(array for of_layer in weights for array in of_layer if array is not None)]
        gradients = [answer.x.value, *(g for part in answer.gradients for g in part.weights if g is not None)]
        for array, gradient in zip(arrays, gradients, strict=True):
            direction, values = rng.normal(size=array.shape), []
            for step in (1e-6, -1e-6):
                array += step * direction
                values.append(network(setting, x, weights, target).value.value)
                array -= step * direction
            expected = (gradient * direction).sum()
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "router",
    [name if i % 6 == 1 else pytest.param(name, marks=pytest.mark.thorough) for i, name in enumerate(ROUTERS)],
)
def test_values_and_gradients_equal_the_dense_layer_in_jax(router, x64):
    """One group of one rank, without losses, which that layer lacks; every other router has gated experts."""
    gated = bool(list(ROUTERS).index(router) % 2)
    both, x, (weights,), target = draw(rules_of(router, "none"), gated, 1)
    setting = Setting(both.rules, 1, 1, both.mask, both.bias)
    mask, bias = jnp.asarray(setting.mask), jnp.asarray(setting.bias)

    @jax.jit
    def dense(x, weights):
        experts = Experts(weights.up, weights.down, weights.gate)
        y = dense_moe(x, weights.kernel, experts, make_router(setting.rules, has_bias=True), mask, bias)
        return (y * jnp.asarray(target)).sum(), y

    (value, y), gradients = jax.value_and_grad(dense, argnums=(0, 1), has_aux=True)(x, weights)
    answer = network(setting, x, [weights], target)
    assert answer.value.value == pytest.approx(float(value), rel=1e-12)
    wanted = (answer.y.value, (answer.x.value, answer.gradients[0].weights))
    for got, want in zip(jax.tree.leaves((y, gradients)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, 1e-10, 1e-12)


def test_ties_go_to_the_lower_expert():
    weights = Weights(np.zeros((2, 4)), np.zeros((4, 2, 1)), None, np.zeros((4, 1, 2)))
    setting = Setting(Rules(2), 1, 2, np.array([True, True, False, True]))
    answer = network(setting, np.ones((4, 2)), [weights], np.ones((4, 2)))
    assert answer.layers[0].counts.tolist() == [[[2, 2, 0, 0], [1, 1, 0, 0]]]
    assert answer.layers[0].routed[0].weights.tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0.5, 0.5]]


def test_inputs_are_the_same_every_time():
    program = draw_programs(3)[2]
    first, again = (draw_inputs(program, 4) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first[:2][1], again[:2][1])
    assert first[0] == again[0]

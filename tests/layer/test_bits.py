"""Bits of outputs and gradients: with and without a plan, on one rank and on several, and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Precision, Topology
from jax_moe_lb.layer.systems import system_named
from tests.layer_cases import Case, make_layer, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize
from tests.nn.moe_cases import WIDTH, dense_layer, make

CASE = Case(num_tokens=64, features=16, mlp_dim=32)


@functools.cache
def results(system, dtype):
    """Return the imbalances; output and gradients of tokens and router kernel; and gradients of experts."""
    mesh = make_mesh((4,), ("expert",))
    run = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system_named(system)))
    (y, stats), (of_x, of_kernel, of_experts) = jax.device_get(run(*CASE.arguments("zipf", 4, dtype)))
    return (stats.imbalance_before, stats.imbalance_after), (y, of_x, of_kernel), jax.tree.leaves(of_experts)


@pytest.mark.slow
@parametrize("dtype", [jnp.float32], [jnp.bfloat16])
@parametrize("system", ["exact"], ["greedy", "ultraep", "feplb"])
def test_a_plan_changes_no_bit_but_of_gradients_of_experts(system, dtype):
    """These are sums over the ranks of an expert, whose order depends on the plan: rounding of the sum."""
    (before, after), exact, of_experts = results(system, dtype)
    _, want, want_experts = results("plain", dtype)
    assert before > 1.5 > 1.2 > after
    for one, other in zip(exact, want, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(of_experts, want_experts, strict=True):
        one, other = (array.astype(np.float64) for array in (one, other))
        assert np.abs(one - other).max() <= 4 * float(jnp.finfo(dtype).eps) * np.abs(other).max()


@pytest.mark.slow
@parametrize("dtype, share", [(jnp.float32, 0.2)], [(jnp.bfloat16, 1e-3)])
def test_the_number_of_ranks_changes_outputs_by_rounding(dtype, share):
    """Products of one rank and of several have operands of other sizes, and with it another order of their sums."""

    def outputs(num_ranks):
        mesh = make_mesh((num_ranks,), ("expert",))
        layer = make_layer(mesh, "plain", (64, 16, 128))
        x = jax.random.normal(jax.random.key(0), (512, 64), dtype)
        return np.asarray(nnx.jit(lambda layer, x: layer(x)[0])(layer, x)).astype(np.float64)

    one, four = outputs(1), outputs(4)
    assert (one != four).mean() <= share
    assert np.abs(one - four).max() <= 2 * float(jnp.finfo(dtype).eps) * np.abs(four).max()


@pytest.mark.thorough
def test_gradients_over_data_expert_and_tensor_axes_are_those_of_float64(x64):
    """At most 6e-16 of the largest entry, three units in the last place."""

    def gradients(mesh, tensor_axes, call):
        topology = Topology.from_mesh(mesh, "expert", tensor_axes=tensor_axes)
        layer = make(mesh, "exact", topology=topology, precision=Precision(param_dtype=jnp.float64))
        x = jax.random.normal(jax.random.key(1), (8, 4, WIDTH), jnp.float64)
        run = nnx.jit(nnx.grad(lambda layer, x: jnp.square(call(layer, x)).mean(), argnums=(0, 1)))
        of_layer, of_x = run(layer, x)
        return jax.device_get({**nnx.to_pure_dict(of_layer), "x": of_x})

    mesh = make_mesh((2, 2, 2), ("data", "expert", "tensor"))
    got = gradients(mesh, "tensor", lambda layer, x: layer(x)[0])
    want = gradients(make_mesh((1,), ("expert",)), (), dense_layer)
    assert got.keys() == want.keys() == {"kernel", "up", "down", "gate", "x"}
    errors = {name: np.abs(got[name] - want[name]).max() / np.abs(want[name]).max() for name in want}
    assert max(errors.values()) <= 6e-16, errors

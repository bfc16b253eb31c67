"""Adapters equal matrices that contain their products, and frozen matrices have no gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Buffers, TopK, Topology, exact, feplb, plain
from jax_moe_lb.transport import Codec, CodecBase
from tests.adapters import RANK, merged, with_adapters
from tests.layer_cases import (
    Case,
    assert_close,
    dense_with_gradients,
    expert_domains,
    hybrid_moe,
    make_mesh,
    sharded_moe,
    with_gradients,
)
from tests.marks import parametrize

CASE, NUM_RANKS = Case(num_experts=8), 4
SYSTEMS = {"replicas in rounds": exact(1, Buffers(headroom=0.3)), "two phases": feplb(2)}
RELATIVE = {"float32": 1e-5, "bfloat16": 4e-2}


def arguments(dtype):
    *before, experts, target = CASE.arguments("lognormal", NUM_RANKS, dtype)
    return *before, with_adapters(experts), target


def layer_with_gradients(system):
    mesh = make_mesh((NUM_RANKS,), ("expert",))
    return with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))


def dense(x, mask, kernel, experts, target):
    """Return outputs and gradients of the dense layer with merged matrices, in float32."""
    x, kernel, experts = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, kernel, experts))
    (y, _), (of_x, of_kernel, of_merged) = dense_with_gradients(TopK(2))(x, mask, kernel, merged(experts), target)
    (of_experts,) = jax.vjp(merged, experts)[1](of_merged)
    return y, (of_x, of_kernel, of_experts.trained)


def assert_frozen(of_experts):
    """All matrices have a gradient of 0."""
    assert not any(np.asarray(leaf).any() for leaf in (of_experts.up, of_experts.down, of_experts.gate))


@pytest.mark.slow
@parametrize("name, dtype", [("replicas in rounds", "float32")], [("two phases", "bfloat16")])
def test_adapters_equal_merged_matrices(name, dtype):
    args = arguments(dtype)
    (y, stats), (of_x, of_kernel, of_experts) = layer_with_gradients(SYSTEMS[name])(*args)
    assert int(stats.weight_bytes_moved.sum()) > 0
    assert_frozen(of_experts)
    assert_close((y, (of_x, of_kernel, of_experts.trained)), dense(*args), RELATIVE[dtype])


def gathering(codec):
    """Return the layer whose ranks gather the experts of domains of 2 ranks before routing."""
    mesh, domains = expert_domains(make_mesh((NUM_RANKS,), ("gpu",)), {"gpu": 2}, "gpu")
    return with_gradients(hybrid_moe(mesh, domains, plain(Buffers(4.0)), codec))


@pytest.mark.slow
def test_gathered_adapters_equal_merged_matrices():
    args = arguments("float32")
    (y, _), (of_x, of_kernel, of_experts) = gathering(Codec())(*args)
    assert_frozen(of_experts)
    assert_close((y, (of_x, of_kernel, of_experts.trained)), dense(*args), 1e-5)


def test_a_codec_is_refused():
    with pytest.raises(ValueError, match="experts has adapters; expected none, as codec is Codec"):
        gathering(Codec(2.0, CodecBase.SHARED, gradient_ratio=1.0))(*arguments("float32"))


WEIGHT_GRADIENT = rf"f32\[\d+,({CASE.width},{CASE.mlp_dim}|{CASE.mlp_dim},{CASE.width})\]"
"""A float32 array of the shape of bfloat16 matrices."""


@pytest.mark.slow
@parametrize("name", ["replicas in rounds"], ["two phases"])
def test_frozen_matrices_have_no_gradient_in_the_program(name):
    """Neither the products of the gradients of matrices nor their rows on the way home are in the program."""
    *before, experts, target = arguments("bfloat16")
    of_matrix, of_adapter = CASE.width * CASE.mlp_dim, RANK * CASE.width
    for given in (experts, merged(experts)):
        program = str(layer_with_gradients(SYSTEMS[name]).run.trace(*before, given, target).jaxpr)
        assert bool(re.search(WEIGHT_GRADIENT, program)) != given.has_adapters
        home = {int(size) for size in re.findall(r"bf16\[\d+,(\d+)\]", program)}
        assert (of_matrix in home) != given.has_adapters
        assert (of_adapter in home) == given.has_adapters

"""Layers and gradients shared by the tests of `MoE`."""

import jax
from flax import nnx

from jax_moe_lb import Experts, TopK, Topology, greedy
from tests.layer_cases import make_layer
from tests.oracle import dense_moe

WIDTH, INNER, NUM_EXPERTS = 16, 24, 8


def make(mesh, system=greedy(), router=TopK(2), expert_axis="expert", topology=None, **options):
    topology = Topology.from_mesh(mesh, expert_axis) if topology is None else topology
    return make_layer(mesh, system, (WIDTH, NUM_EXPERTS, INNER), router, topology=topology, **options)


def tokens():
    return jax.random.normal(jax.random.key(1), (16, 4, WIDTH))


@nnx.jit
def dense_layer(layer, x):
    """Return the outputs of the oracle."""
    experts = Experts(layer.up[...], layer.down[...], layer.gate[...])
    return dense_moe(x.reshape(-1, WIDTH), layer.kernel[...], experts, layer.router).reshape(x.shape)

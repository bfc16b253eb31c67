"""Layers and gradients shared by the tests of `MoE`."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jax_moe_lb import ExpertConfig, Experts, MoE, TopK, Topology, greedy
from jax_moe_lb.core.experts import dense_ffn
from tests.oracle import dense_moe

WIDTH, INNER, NUM_EXPERTS = 16, 24, 8
BIASED = TopK(2, selection_bias=True)


def make(mesh, system=greedy(), router=TopK(2), expert_axis="expert", topology=None, rngs=None, **options):
    topology = Topology.from_mesh(mesh, expert_axis) if topology is None else topology
    options = {"experts": ExpertConfig(INNER), "rngs": nnx.Rngs(0) if rngs is None else rngs} | options
    return MoE(WIDTH, NUM_EXPERTS, router, mesh=mesh, topology=topology, system=system, **options)


def tokens(mesh=None, spec=None):
    x = jax.random.normal(jax.random.key(1), (16, 4, WIDTH))
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, spec))


@nnx.jit
def dense_layer(layer, x):
    """Return the outputs of the oracle, including the shared expert."""
    flat = x.reshape(-1, WIDTH)
    gate = None if layer.gate is None else layer.gate[...]
    experts = Experts(layer.up[...], layer.down[...], gate)
    bias = None if layer.bias is None else layer.bias[...]
    y = dense_moe(flat, layer.kernel[...], experts, layer.router, bias=bias)
    if layer.shared_expert is not None:
        y = y + dense_ffn(flat, Experts(layer.shared_up[...], layer.shared_down[...], layer.shared_gate[...]))
    return y.reshape(x.shape)


def forward(layer, x):
    return layer(x)[0]


@functools.cache
def gradients_of(call):
    return nnx.jit(nnx.grad(lambda layer, x: jnp.square(call(layer, x)).mean()))


def gradients(call, layer, x):
    """Return the gradients of the parameters; programs of equal functions and layers are compiled once."""
    return gradients_of(call)(layer, x)


def values_and_gradients(layer, x):
    """Return outputs, statistics and the gradients of the mean square, in one program."""

    def loss(layer):
        y, stats = layer(x)
        return jnp.square(y).mean(), (y, stats)

    gradient, (y, stats) = nnx.jit(nnx.grad(loss, has_aux=True))(layer)
    return y, stats, nnx.to_pure_dict(gradient)

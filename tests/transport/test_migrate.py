"""Gathering experts before tokens are known does not change results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Buffers, Experts, MoEParams, TopK, moe, plain
from jax_moe_lb.aot.hlo import parse_module
from jax_moe_lb.transport import GatherExpertDomain, scan_prefetched
from tests.dependencies import ancestors
from tests.layer_cases import assert_close, expert_domains, make_mesh
from tests.marks import parametrize
from tests.oracle import dense_moe

pytestmark = pytest.mark.slow

LAYERS, WIDTH, NUM_EXPERTS = 3, 8, 8


def setting():
    rng = np.random.default_rng(0)
    shapes = (32, WIDTH), (LAYERS, WIDTH, NUM_EXPERTS), (LAYERS, NUM_EXPERTS, WIDTH, 6), (LAYERS, NUM_EXPERTS, 6, WIDTH)
    x, kernels, up, down = (jnp.asarray(0.5 * rng.normal(size=shape), "float32") for shape in shapes)
    return *expert_domains(make_mesh((4,), ("gpu",)), {"gpu": 2}, "gpu"), x, kernels, Experts(up, down)


def training_step(mesh, domains, gather_again):
    def block(x, kernel, held):
        y, stats, _ = moe(jnp.tanh(x), MoEParams(kernel, held), TopK(2), plain(Buffers(4.0)), domains.between)
        return x + y, stats.load_after

    def run(x, kernels, experts):
        x, loads = scan_prefetched(block, x, kernels, experts, GatherExpertDomain(domains), gather_again=gather_again)
        return x, loads[None]

    by_rank, stacked = PartitionSpec(domains.expert_axes), PartitionSpec(None, domains.expert_axes)
    specs, out_specs = (by_rank, PartitionSpec(), stacked), (by_rank, PartitionSpec(domains.between.data_axes))
    return with_gradients(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs))


def dense(x, kernels, experts):
    for layer in range(LAYERS):
        mine = Experts(experts.up[layer], experts.down[layer])
        x = x + dense_moe(jnp.tanh(x), kernels[layer], mine, TopK(2))
    return x, None


def with_gradients(layers):
    def loss(x, kernels, experts):
        y, loads = layers(x, kernels, experts)
        return jnp.square(y).sum(), (y, loads)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@parametrize("gather_again", [True], [False])
@pytest.mark.thorough
def test_prefetched_layers_equal_dense_ones_and_gathers_do_not_wait(gather_again):
    mesh, domains, *args = setting()
    program = training_step(mesh, domains, gather_again).lower(*args).compile()
    (_, (y, loads)), gradients = program(*args)
    (_, (want, _)), want_gradients = with_gradients(dense)(*args)
    assert_close((y, gradients), (want, want_gradients), 1e-5)
    assert loads.shape == (2, LAYERS, 2)
    # In the loops over layers, forward and backward, gathers depend only on an iteration's weights, and not on
    # products, exchanges or counts.
    module = parse_module(program.as_text())
    bodies = [body for body in module.computations.values() if is_loop_over_layers(body)]
    assert len(bodies) == 1 + gather_again
    for body in bodies:
        for gather in gathers_of_experts(body):
            found = {one.opcode for one in ancestors(body, gather)}
            assert not found & {"dot", "custom-call", "all-to-all", "sort", "conditional", "while"}


def gathers_of_experts(body):
    return [one for one in body if one.opcode == "all-gather" and one.shapes[0].dtype == "f32"]


def is_loop_over_layers(body):
    opcodes = [one.opcode for one in body]
    return opcodes.count("parameter") == 1 and {"while", "all-to-all", "all-gather"} <= set(opcodes)

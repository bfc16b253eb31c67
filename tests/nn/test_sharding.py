"""Experts sharded over further axes: equality with the dense layer, and collectives of the programs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import ExpertConfig, Experts, Precision, TopK, Topology, exact, feplb
from jax_moe_lb.aot.collectives import collectives
from jax_moe_lb.aot.hlo import parse_module
from jax_moe_lb.core.experts import dense_ffn
from jax_moe_lb.transport import FsdpExperts, scan_prefetched
from tests.layer_cases import assert_close, make_layer, make_mesh
from tests.marks import parametrize
from tests.stress.dense_module import Tokens, dense

WIDTH, INNER, NUM_EXPERTS = 16, 24, 8


def make(mesh, system, topology, rules, *, fused=False):
    experts, precision = ExpertConfig(INNER, use_bias=True, fuse_gate_up=fused), Precision(param_dtype=jnp.float64)
    options = {"topology": topology, "experts": experts, "precision": precision, "rules": rules}
    return make_layer(mesh, system, (WIDTH, NUM_EXPERTS, INNER), TopK(2, logit_bias=True), **options)


def with_biases(layer):
    """Set random biases, the same on every mesh."""
    for i, name in enumerate(("up_bias", "gate_bias", "down_bias", "kernel_bias")):
        bias = getattr(layer, name)
        value = 0.1 * jax.random.normal(jax.random.key(i), bias.shape, jnp.float64)
        bias[...] = jax.device_put(value, bias[...].sharding)
    return layer


def dense_layer(layer, x):
    return dense(layer, x, Tokens(None, jnp.zeros(x.shape[:-1], int), jax.random.key(0)))[0]


def rules(**axes):
    return (("exp", axes.get("exp", "expert")), ("embed", axes.get("embed")), ("mlp", axes.get("mlp")))


ON_TENSOR = ("fsdp", "expert", "tensor")
CASES = {
    "tensor": (feplb(2), ("data", "expert", "tensor"), rules(mlp="tensor"), PartitionSpec("data")),
    "fsdp and tensor": (exact(2), ON_TENSOR, rules(embed="fsdp", mlp="tensor"), PartitionSpec()),
    "fsdp of experts": (exact(2), ON_TENSOR, rules(exp=("expert", "fsdp"), mlp="tensor"), PartitionSpec()),
    "context": (exact(2), ("data", "context", "expert"), rules(), PartitionSpec("data", "context")),
}
"""System, axes of size 2, logical axis rules, and sharding of the tokens `[B, T, H]` per case."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_experts_that_are_split_equal_whole_ones(case, x64):
    system, names, table, spec = CASES[case]
    mesh = make_mesh((2, 2, 2), names)
    topology = Topology.from_mesh(mesh, tensor_axes="tensor" if "tensor" in names else ())
    # The gather of fused shards of experts differs from that of fused experts.
    layer = with_biases(make(mesh, system, topology, table, fused="fsdp" in case))
    one = make_mesh((1,), ("expert",))
    whole = with_biases(make(one, "plain", Topology.from_mesh(one), rules()))
    x = jax.random.normal(jax.random.key(9), (4, 8, WIDTH), jnp.float64)
    placed = jax.device_put(x, NamedSharding(mesh, spec))

    def loss(layer, x, call):
        return jnp.square(call(layer, x)).mean()

    run = nnx.jit(nnx.value_and_grad(lambda layer, x: loss(layer, x, lambda layer, x: layer(x)[0]), argnums=(0, 1)))
    want = nnx.jit(nnx.value_and_grad(lambda layer, x: loss(layer, x, dense_layer), argnums=(0, 1)))(whole, x)
    value, (of_layer, of_x) = run(layer, placed)
    got = value, (nnx.to_pure_dict(of_layer), of_x)
    assert_close(got, (want[0], (nnx.to_pure_dict(want[1][0]), want[1][1])), 1e-12)
    check_collectives(run.lower(layer, placed).compile().as_text(), dict(mesh.shape))


def check_collectives(text, axes):
    found = collectives(parse_module(text), axes, lambda *_: 0)
    matrix_bytes = 8 * WIDTH * INNER

    def nbytes(kind, axis):
        return sum(one.nbytes for one in found if one.kind == kind and axis in (one.axes or ()))

    # Outputs and token gradients are all-reduced once each over tensor shards; no weights are exchanged between them.
    assert {one.kind for one in found if "tensor" in (one.axes or ())} == (
        {"all-reduce"} if "tensor" in axes else set()
    )
    assert nbytes("all-reduce", "tensor") < matrix_bytes
    # Matrices are gathered, and their gradients reduce-scattered, without an all-reduce of full gradients.
    if "fsdp" in axes:
        assert nbytes("all-gather", "fsdp") >= 3 * matrix_bytes
        assert nbytes("reduce-scatter", "fsdp") >= 3 * matrix_bytes
        assert nbytes("all-reduce", "fsdp") < matrix_bytes


@pytest.mark.slow
@parametrize("gather_again", [True], [False])
def test_split_experts_are_gathered_a_layer_ahead(gather_again):
    mesh = make_mesh((2,), ("fsdp",))
    shards = FsdpExperts(embed_axes=("fsdp",))
    up, gate = jax.random.normal(jax.random.key(0), (2, 3, 2, WIDTH, INNER)) / 4
    experts = Experts(up, jax.random.normal(jax.random.key(1), (3, 2, INNER, WIDTH)) / 4, gate)

    def block(x, scale, held):
        one = jax.tree.map(lambda w: w.mean(0), held)
        return x + scale * dense_ffn(x, one), None

    def plain(x, scales, experts):
        for i in range(3):
            x, _ = block(x, scales[i], jax.tree.map(lambda w, i=i: w[i], experts))
        return x

    def stacked(spec):
        return PartitionSpec(None, *spec)

    specs = jax.tree.map(stacked, shards.specs(experts), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    split = jax.shard_map(
        lambda x, scales, experts: scan_prefetched(block, x, scales, experts, shards, gather_again=gather_again)[0],
        mesh=mesh,
        in_specs=(PartitionSpec("fsdp"), PartitionSpec(), specs),
        out_specs=PartitionSpec("fsdp"),
    )
    args = jax.random.normal(jax.random.key(2), (8, WIDTH)), jnp.arange(1.0, 4), experts
    gradients = [jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.square(f(*a)).mean(), (0, 2))) for f in (split, plain)]
    assert_close(gradients[0](*args), gradients[1](*args), 1e-5)


def test_axes_that_cannot_split_experts_are_refused():
    mesh = make_mesh((2, 2, 2), ("data", "expert", "tensor"))
    topology = Topology.from_mesh(mesh, tensor_axes="tensor")
    with pytest.raises(ValueError, match=r"rules split mlp over \(\); expected the topology's tensor_axes"):
        make(mesh, "plain", topology, rules())
    with pytest.raises(ValueError, match=r"rules split experts over \['expert'\]; expected data axes"):
        make(mesh, "plain", topology, rules(embed="expert", mlp="tensor"))
    with pytest.raises(ValueError, match=r"rules split experts over \['tensor'\]; expected data axes"):
        make(mesh, "plain", topology, rules(exp=("expert", "tensor"), mlp="tensor"))
    with pytest.raises(ValueError, match="tensor_axes is 'expert'; expected distinct axes of"):
        Topology.from_mesh(mesh, tensor_axes="expert")


def test_experts_of_a_rank_that_cannot_be_split_are_refused():
    mesh, table = make_mesh((2, 4), ("data", "expert")), rules(exp=("expert", "data"))
    with pytest.raises(ValueError, match="num_experts is 4; expected a positive multiple of the 8 ranks"):
        make_layer(mesh, "exact", (WIDTH, 4, INNER), rules=table)


def test_the_last_of_several_rules_of_an_axis_holds():
    """As in Flax, which places the parameters."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    layer = make_layer(mesh, "plain", (7, 4, 3), rules=(("embed", "data"), *rules()))
    assert layer.up[...].sharding.spec == PartitionSpec("expert", None, None)

"""Layout of tokens on ranks: shards of sequences stay where they are, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb import Precision, TopK
from jax_moe_lb.aot.collectives import collectives
from jax_moe_lb.aot.hlo import parse_module
from jax_moe_lb.nn.tokens import GivenTokens, token_layout
from jax_moe_lb.routing import ForceBalanced
from tests.layer_cases import assert_close, make_mesh
from tests.marks import parametrize
from tests.nn.moe_cases import NUM_EXPERTS, WIDTH, dense_layer, make

FLAT, GROUPS, CONTEXT = {"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "context": 2, "expert": 2}
EXPERT, DATA = ("expert",), ("data",)
LAYOUTS = {
    "whole sequences": (FLAT, (8, 16), (), (128,), (0,), (EXPERT,)),
    "one sequence": (FLAT, (1, 16), (), (16,), (0,), (EXPERT,)),
    "parts of sequences": (FLAT, (2, 16), (), (2, 16), (0, 0), ((), EXPERT)),
    "known parts": (FLAT, (8, 16), ((), EXPERT), (8, 16), (0, 0), ((), EXPERT)),
    "known parts of odd sequences": (FLAT, (8, 9), ((), EXPERT), (72,), (0,), (EXPERT,)),
    "decode step": (FLAT, (5, 1), (), (5,), (3,), (EXPERT,)),
    "one token": (FLAT, (), (), (1,), (7,), (EXPERT,)),
    "one sequence of each group": (GROUPS, (2, 16), (), (32,), (0,), (DATA + EXPERT,)),
    "parts of each group": (GROUPS, (4, 16), (), (4, 16), (0, 0), (DATA, EXPERT)),
    "odd sequences of each group": (GROUPS, (6, 15), (), (2, 45), (0, 3), (DATA, EXPERT)),
    "odd parts": (CONTEXT, (6, 10), (DATA, ("context",)), (6, 2, 5), (0, 0, 1), (DATA, ("context",), EXPERT)),
}
"""Mesh, leading dimensions and known axes; sizes, padding and axes of the layout."""


def layout_of(case):
    axes, shape, known, *_ = LAYOUTS[case]
    return token_layout(shape, make_mesh(tuple(axes.values()), tuple(axes)), tuple(axes), known)


@pytest.mark.parametrize("case", LAYOUTS)
def test_axes_split_whole_sequences_and_then_their_parts(case):
    layout = layout_of(case)
    assert (layout.sizes, layout.padding, layout.split) == LAYOUTS[case][3:]


@pytest.mark.parametrize("case", LAYOUTS)
def test_each_token_is_on_one_rank_and_returns_to_its_place(case):
    layout = layout_of(case)
    index = jnp.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)

    def one_rank(index):
        flat = layout.flatten(index)
        return layout.unflatten(flat), layout.unflatten(layout.positions())

    run = jax.shard_map(one_rank, mesh=layout.mesh, in_specs=layout.spec, out_specs=layout.spec)
    kept, positions = jax.jit(run)(layout.enter(index, fill=-1))
    real = np.asarray(kept) >= 0
    np.testing.assert_array_equal(np.asarray(positions)[real], np.asarray(kept)[real])
    np.testing.assert_array_equal(layout.leave(kept, jax.typeof(index).sharding), index)


SHARDED = {
    "R > B": (FLAT, (2, 16), PartitionSpec(None, "expert")),
    "R = B": (FLAT, (8, 16), PartitionSpec(None, "expert")),
    "B = 1": (FLAT, (1, 64), PartitionSpec(None, "expert")),
    "groups": (GROUPS, (6, 16), PartitionSpec("data", "expert")),
    "context": (CONTEXT, (4, 16), PartitionSpec(("data", "expert"), "context")),
    "odd groups": (GROUPS, (6, 15), PartitionSpec("data")),
}
"""Mesh, leading dimensions of the tokens, and their sharding."""


def layer_of(axes, shards, kind):
    mesh = make_mesh(tuple(axes.values()), tuple(axes), kind)
    length = ("length", shards[1]) if len(shards) > 1 else ("length", None)
    rules = (("exp", "expert"), ("embed", None), ("mlp", None), length)
    return make(mesh, "greedy", precision=Precision(param_dtype=jnp.float64), rules=rules)


def compare_with_dense(layer, x):
    """Compare values and gradients of the layer and of its tokens; return the compiled program."""

    def loss(call):
        def of(layer, x):
            y = call(layer, x)
            return jnp.square(y).mean(), y

        return nnx.value_and_grad(of, argnums=(0, 1), has_aux=True)

    run = jax.jit(lambda layer, x: loss(lambda layer, x: layer(x)[0])(layer, x))
    compiled = run.lower(layer, x).compile()
    (_, y), (of_layer, of_x) = compiled(layer, x)
    one = make(make_mesh((1,), ("expert",)), precision=Precision(param_dtype=jnp.float64))
    (_, want), (of_dense, of_dense_x) = loss(dense_layer)(one, jnp.asarray(np.asarray(x)))
    assert_close((y, of_x), (want, of_dense_x), 1e-12)
    assert_close(nnx.to_pure_dict(of_layer), nnx.to_pure_dict(of_dense), 1e-12)
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    return compiled


@pytest.mark.slow
@parametrize(
    "case, kind",
    [("groups", AxisType.Auto)],
    [
        *((case, AxisType.Auto) for case in ("R > B", "R = B", "B = 1", "context", "odd groups")),
        *((case, AxisType.Explicit) for case in ("R > B", "R = B", "context", "odd groups")),
    ],
)
def test_shards_of_sequences_stay_on_their_rank(case, kind, x64):
    axes, shape, spec = SHARDED[case]
    layer = layer_of(axes, spec, kind)
    x = jax.random.normal(jax.random.key(9), (*shape, WIDTH), jnp.float64)
    compiled = compare_with_dense(layer, jax.device_put(x, NamedSharding(layer.mesh, spec)))
    found = collectives(parse_module(compiled.as_text()), axes, lambda *_: 0)
    # A block of tokens, at its narrowest, has more bytes than the counts, plans and indices of all ranks.
    sharded = {axis for part in spec for axis in axes if part is not None and axis in part}
    moved = [one for one in found if one.nbytes >= x.nbytes // 8 and sharded & set(one.axes or ())]
    assert [one for one in moved if one.kind in ("all-gather", "collective-permute", "all-to-all")] == []


@pytest.mark.slow
@parametrize("shape", [(3, 5)], [(4, 6), (8, 3)])
def test_a_router_finds_the_tokens_of_all_groups(shape, x64):
    """Routing given by a closure, on two groups of two ranks: parts of sequences, whole ones, and padding."""
    num_tokens = shape[0] * shape[1]
    experts = jax.random.randint(jax.random.key(1), (num_tokens, 2), 0, NUM_EXPERTS, jnp.int32)

    def given(logits, bias, info):
        return TopK(2).with_experts(logits, experts[info.position % num_tokens])

    mesh = make_mesh((2, 2), ("data", "expert"))
    layer = make(mesh, router=given, precision=Precision(param_dtype=jnp.float64))
    whole = make(make_mesh((1,), ("expert",)), router=given, precision=Precision(param_dtype=jnp.float64))

    def dense(logits, bias, info):
        return TopK(2).with_experts(logits, experts)

    whole.router = dense
    x = jax.random.normal(jax.random.key(9), (*shape, WIDTH), jnp.float64)
    assert_close(nnx.jit(lambda layer, x: layer(x)[0])(layer, x), dense_layer(whole, x), 1e-12)


@pytest.mark.slow
def test_forced_balance_continues_over_groups_and_ranks():
    """Each expert of each group has equally many copies if these are its multiple."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    layer = make(mesh, router=ForceBalanced(TopK(2)))
    _, stats = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((4, 8, WIDTH)))
    assert (stats.counts.sum(1) == 4).all()


@pytest.mark.parametrize(("dtype", "number"), [("uint8", 256), ("int8", 300)])
def test_there_may_be_more_documents_than_their_dtype_has_numbers(dtype, number):
    segments = jnp.array([[0, 100], [7, 127]], dtype)
    found, total = GivenTokens(None, None, segments, number, None, None)._numbered((2, 2))
    assert found.tolist() == [[0, 100], [number + 7, number + 127]]
    assert total == 2 * number

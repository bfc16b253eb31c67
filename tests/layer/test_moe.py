"""The layer on every kind of mesh, under every transformation, and with invalid input."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import (
    Buffers,
    Experts,
    MoEParams,
    MoEState,
    TokenInfo,
    TopK,
    Topology,
    exact,
    feplb,
    greedy,
    moe,
    plain,
    rails,
)
from jax_moe_lb.core.types import as_int32
from jax_moe_lb.layer.route import rank_tokens, route
from jax_moe_lb.transport import Saved
from tests.layer_cases import BY_NAME, Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

LAYOUTS = {
    "tuple of axes": ((2, 2, 2), ("dc", "node", "gpu"), ("dc", "node", "gpu"), {}),
    "data x expert": ((2, 4), ("data", "expert"), "expert", {}),
    "axes of one device": ((1, 2, 1, 4), ("stage", "data", "tensor", "expert"), "expert", {}),
    "tuple with an axis of one device": ((1, 2, 4), ("dc", "node", "gpu"), ("dc", "node", "gpu"), {}),
    "an axis of copies": ((2, 2, 2), ("data", "copy", "expert"), "expert", {"data_axes": "data"}),
}
"""Layouts; `tests.stress.places` has further ones."""


@pytest.mark.slow
@parametrize(
    "layout, check_vma",
    [("tuple of axes", True)],
    [*((layout, True) for layout in LAYOUTS), ("data x expert", False)],
)
def test_every_layout_equals_dense(layout, check_vma):
    sizes, names, axis, options = LAYOUTS[layout]
    case, mesh = Case(), make_mesh(sizes, names)
    topology = Topology.from_mesh(mesh, axis, **options)
    # Headroom below 1, so that parallel groups need different numbers of rounds.
    layer = with_gradients(sharded_moe(mesh, topology, greedy(1, Buffers(headroom=0.3)), check_vma=check_vma))
    groups = math.prod(mesh.shape[name] for name in topology.data_axes)
    for name in ("zipf", "hot_rank", "empty_rank"):
        stats = assert_equals_dense(layer, case.arguments(name, groups * topology.num_ranks), 1e-5)
        assert stats.counts.shape == (groups, topology.num_ranks, case.num_experts)


@pytest.mark.thorough
def test_exchanges_as_between_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    test_every_layout_equals_dense("an axis of copies", True)


@pytest.mark.thorough
def test_axes_of_one_device_may_be_in_no_type(one_device_axes_removed):
    test_every_layout_equals_dense("axes of one device", True)


@pytest.fixture
def one_device_axes_removed():
    """Set the JAX option used by MaxText."""
    name = "jax_remove_size_one_mesh_axis_from_type"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.slow
def test_groups_side_by_side_need_different_rounds():
    """Two data shards, one idle: each runs the rounds of its own plan."""
    case, mesh = Case(), make_mesh((2, 4), ("data", "expert"))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom=0.5))))
    x, mask, *rest = case.arguments("one_hot", 8)
    mask = mask & (jnp.arange(mask.shape[0]) < mask.shape[0] // 2)
    stats = assert_equals_dense(layer, (x, mask, *rest), 1e-5)
    assert stats.rounds[0] > 1
    assert stats.rounds[1] == 0


@pytest.mark.slow
@parametrize("headroom", [0.1], [0.5, 1.05, 8.0])
def test_rounds_are_what_the_load_needs(headroom):
    case, mesh = Case(), make_mesh((8,), ("expert",))
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom))))
    _, stats = layer(*case.arguments("one_hot", 8)[:4])
    capacity = int(np.ceil(headroom * case.num_tokens * case.per_tok))
    assert int(stats.rounds[0]) == -(-int(stats.load_after.max()) // capacity)


@pytest.mark.slow
def test_stats_say_what_happened():
    case, mesh = Case(), make_mesh((8,), ("expert",))
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), greedy(2)))
    _, stats = layer(*case.arguments("lognormal", 8)[:4])
    counts = BY_NAME["lognormal"].counts(0, 8, case.num_tokens, case.num_experts, 2)
    before = counts.sum(0).reshape(8, 2).sum(1)
    np.testing.assert_array_equal(stats.counts[0], counts)
    np.testing.assert_array_equal(stats.load_before[0], before)
    assert stats.imbalance_before[0] == pytest.approx(before.max() / before.mean())
    assert stats.straggler_before[0] == pytest.approx(before.max() - before.mean())
    after = np.asarray(stats.load_after[0])
    assert after.sum() == before.sum()
    np.testing.assert_array_equal(stats.quota[0].sum(1), counts.sum(0))
    np.testing.assert_array_equal(stats.quota[0].sum(0), after)
    assert stats.imbalance_after[0] == pytest.approx(after.max() / after.mean())
    assert stats.imbalance_after[0] < 1.05 < stats.imbalance_before[0]
    expert_bytes = 3 * case.width * case.mlp_dim * 4
    assert stats.weight_bytes_moved[0] % expert_bytes == 0
    assert 1 <= stats.weight_bytes_moved[0] // expert_bytes <= 16
    assert 0 < stats.rows_moved[0] <= before.sum()


@pytest.mark.slow
def test_memory_of_one_hot_routing_is_near_the_mean():
    """Same program with two buffers: 1.05 x the mean in rounds, or the worst case in one round."""
    case, mesh = Case(num_tokens=512, features=48), make_mesh((8,), ("expert",))
    args, temporaries = case.arguments("one_hot", 8), {}
    for headroom in (1.05, 8.0):
        layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom))))
        temporaries[headroom] = layer.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporaries[1.05] < 0.4 * temporaries[8.0]


@pytest.mark.slow
@parametrize("padding", [np.nan], (sign * np.inf for sign in (1, -1)))
def test_padding_may_hold_anything(padding):
    """Outputs and gradients equal those with zeros as padding."""
    mesh, (x, mask, *rest) = make_mesh((8,), ("expert",)), Case().arguments("empty_rank", 8)
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), greedy()))
    found, want = (layer(jnp.where(mask[:, None], x, value), mask, *rest) for value in (padding, 0.0))
    assert not mask.all()
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.slow
@parametrize("system", [feplb()], [greedy(), exact(), rails()], ids=["feplb", "greedy", "exact", "rails"])
def test_the_whole_layer_lowers_for_a_gpu(system):
    """Forward and backward, on a machine without a GPU: exact-size exchanges, no emulation, no dense expansion, and no
    host callback.
    """
    case, mesh = Case(), make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=8, rails_per_node=4)
    layer = with_gradients(sharded_moe(mesh, topology, system))
    args = case.arguments("zipf", 8, "bfloat16")
    text = layer.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text
    for absent in ("ragged_dot", "collective_permute", "python"):
        assert absent not in text


@pytest.mark.slow
@parametrize(
    "system",
    [exact(2, Buffers(chunks=2), dispatch="direct").replace(saved=Saved(rows=True, hidden=True))],
    [greedy(), feplb()],
    ids=["saved chunks", "greedy", "feplb"],
)
def test_no_tokens_at_all(system):
    case, mesh = Case(), make_mesh((8,), ("expert",))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    x = jnp.zeros((0, case.width))
    (y, stats), gradients = layer(x, jnp.zeros((0,), bool), *case.params("float32"), x)
    assert y.shape == x.shape
    assert int(stats.rounds[0]) == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_derivatives_that_are_not_there_are_refused_in_one_line():
    mesh = make_mesh((2,), ("expert",))
    run = sharded_moe(mesh, Topology.from_mesh(mesh), greedy(1))
    case = Case(num_tokens=4, num_experts=4)
    kernel, experts = case.params(jnp.float32)
    x, mask = jnp.ones((8, case.width)), jnp.ones(8, bool)

    def total(x):
        return run(x, mask, kernel, experts)[0].sum()

    with pytest.raises(NotImplementedError, match="moe has no second derivatives"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(total)(x).sum()), x)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(lambda x: jax.jvp(total, (x,), (x,))).lower(x)


@pytest.mark.parametrize(
    ("dtype", "given", "converted"),
    [("uint8", 200, 200), ("int8", -1, -1), ("uint32", 2**32 - 1, 2**31 - 1), ("int64", -(2**40), -(2**31))],
)
def test_ids_of_any_integer_dtype_become_int32(dtype, given, converted, x64):
    ids = as_int32(jnp.array([[given, 3]], dtype))
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [[converted, 3]]


@pytest.mark.slow
def test_a_router_may_return_ids_of_another_dtype():
    def router(logits, bias, info):
        routing = TopK(2)(logits, bias, info)
        return replace(routing, experts=routing.experts.astype("uint32"))

    case, mesh = Case(), make_mesh((2,), ("expert",))
    args = case.arguments("zipf", 2)[:4]
    runs = [jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), greedy(1), one)) for one in (router, TopK(2))]
    jax.tree.map(np.testing.assert_array_equal, *(run(*args) for run in runs))


def test_an_expert_may_have_more_bytes_than_int32():
    """The experts of Grok-1 in float32 have 2.4 GB each."""
    mesh, width, inner = make_mesh((2,), ("expert",)), 2**13, 2**16
    shapes = (8, width), (8,), (width, 4), (4, width, inner), (4, inner, width)
    args = [jax.ShapeDtypeStruct(shape, bool if len(shape) == 1 else jnp.float32) for shape in shapes]
    layer = sharded_moe(mesh, Topology.from_mesh(mesh), exact(1))
    _, stats = jax.eval_shape(lambda *args: layer(*args[:3], Experts(*args[3:])), *args)
    assert stats.weight_bytes_moved.dtype == jnp.float32


@pytest.mark.slow
def test_homes_may_have_another_dtype(unchecked):
    """A narrow unsigned dtype has no number for copies of padding."""
    mesh, (x, mask, kernel, experts) = make_mesh((2,), ("expert",)), Case().arguments("zipf", 2)[:4]
    topology, homes = Topology.from_mesh(mesh), jnp.arange(16)[::-1]

    def layer(x, mask, kernel, experts, homes):
        params, state = MoEParams(kernel, experts), MoEState(homes=homes)
        y, stats, after = moe(x, params, TopK(2), greedy(1), topology, state, TokenInfo(mask=mask))
        return y, stats.of_group, after.homes

    ranks, whole = PartitionSpec("expert"), PartitionSpec()
    specs = {"in_specs": (ranks, ranks, whole, ranks, whole), "out_specs": (ranks, PartitionSpec(None), whole)}
    run = jax.jit(jax.shard_map(layer, mesh=mesh, **specs))
    mask = jnp.arange(x.shape[0]) % 3 > 0
    *found, after = run(x, mask, kernel, experts, homes.astype("uint8"))
    assert after.dtype == jnp.uint8
    *want, _ = run(x, mask, kernel, experts, homes.astype("int32"))
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float64", "float32"), ("float32", "float64")])
def test_weights_and_scores_are_at_least_as_wide_as_the_logits(dtypes, x64):
    """Sums over copies and tokens have their dtypes."""
    of_tokens, of_router = dtypes

    def router(logits, bias, info):
        routing = TopK(2)(logits, bias, info)
        return replace(routing, **{name: getattr(routing, name).astype(of_router) for name in ("weights", "scores")})

    routing = route(jnp.ones((4, 8), of_tokens), jnp.ones((8, 4), of_tokens), router, TokenInfo())
    wide = "float64" if "float64" in dtypes else "float32"
    assert (routing.weights.dtype, routing.scores.dtype) == (wide, wide)


def test_positions_are_int32(unchecked):
    def position(position):
        return rank_tokens(TokenInfo(position=position), 4, Topology.from_mesh(mesh)).position

    mesh, ranks = make_mesh((2,), ("expert",)), PartitionSpec("expert")
    run = jax.shard_map(position, mesh=mesh, in_specs=ranks, out_specs=ranks)
    assert jax.eval_shape(run, jnp.arange(8, dtype=jnp.uint8)).dtype == jnp.int32

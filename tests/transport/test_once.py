"""`Once` and `Forward` in a layer: special routings, quantized tokens, `vmap`, counted rows, and refused arguments."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Buffers, System, TopK, Topology, exact, greedy, plain, rails
from jax_moe_lb.aot.hlo import parse_module
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.core import plain_plan, raise_on_fault
from jax_moe_lb.layer.moe import _for_router, _places
from jax_moe_lb.routing import GroupLimit, Routing
from jax_moe_lb.transport import Forward, Once
from tests.dependencies import ancestors
from tests.layer_cases import Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients

MESH = ("node", "gpu")
BALANCED = System(Greedy(), replica_slots=2)


def special_router(logits, bias, info) -> Routing:
    """Three experts per token: the first expert twice in every other token, and the last choice often without one."""
    routing = TopK(3)(logits, bias, info)
    # Of all ranks, so that the dense layer has the same routing.
    token = info.position
    experts = routing.experts
    experts = experts.at[:, 1].set(jnp.where(token % 2 == 0, experts[:, 0], experts[:, 1]))
    return replace(routing, experts=experts.at[:, 2].set(jnp.where(token % 3 == 0, -1, experts[:, 2])))


def one_expert(logits, bias, info) -> Routing:
    """All tokens name the same expert in both choices."""
    routing = TopK(2)(logits, bias, info)
    # Different weights: with weights of sum 1, gradients of the router would be 0.
    return replace(
        routing, experts=jnp.full_like(routing.experts, 5), weights=routing.weights * jnp.array([[1.0, 3.0]])
    )


@functools.cache
def in_dense_layer(router):
    """Return the router of the dense layer, in which unrouted choices have weight 0."""

    def weighted(logits, bias, info):
        routing = router(logits, bias, info)
        served = routing.experts >= 0
        return replace(routing, experts=jnp.maximum(routing.experts, 0), weights=jnp.where(served, routing.weights, 0))

    return weighted


SPECIAL = [
    (Forward(Buffers(0.7)), special_router, 12),
    (Once(Buffers(0.7)), special_router, 12),
    (Forward(), one_expert, 12),
    (Once(), one_expert, 12),
    (Forward(Buffers(0.3)), special_router, 1),
    (Once(Buffers(0.3)), special_router, 1),
    (Forward(Buffers(8.0, max_rounds=1)), special_router, 12),
    (Forward(Buffers(0.7, chunks=3)), special_router, 12),
    # The last chunk has one token, and with one token there is one chunk.
    (Forward(Buffers(8.0, max_rounds=1, chunks=5)), special_router, 11),
    (Forward(Buffers(0.3, chunks=2)), special_router, 1),
    (Once(Buffers(8.0, max_rounds=1)), special_router, 12),
]


@pytest.mark.parametrize(("dispatch", "router", "num_tokens"), SPECIAL)
@pytest.mark.thorough
def test_repeated_and_absent_experts_equal_the_dense_layer(dispatch, router, num_tokens, x64):
    case, mesh = Case(num_tokens, num_experts=8), make_mesh((2, 2), MESH)
    layer = sharded_moe(mesh, Topology.from_mesh(mesh, MESH), replace(BALANCED, dispatch=dispatch), router)
    layer = with_gradients(layer)
    for workload in ("balanced", "zipf"):
        args = case.arguments(workload, 4, "float64", "float64")
        stats = assert_equals_dense(layer, args, 1e-12, in_dense_layer(router))
        if dispatch.buffers.headroom < 1 < num_tokens:
            assert stats.rounds.max() > 1


@pytest.mark.thorough
def test_exchanges_between_nodes_do_not_wait_for_other_chunks():
    """In the compiled program a hop between nodes depends on no hop inside nodes of another chunk, out and back."""
    case, mesh = Case(num_experts=8), make_mesh((2, 2), MESH)
    system = replace(BALANCED, dispatch=Forward(Buffers(8.0, max_rounds=1, chunks=2)))
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh, MESH), system))
    operands = case.arguments("zipf", 4)[:4]
    module = parse_module(layer.lower(*operands).compile().as_text())
    entry = module.computations[module.entry]
    found = {"dispatch": [], "combine": []}
    for one in entry:
        if "exchange" in one.target and one.shapes[0].dims[1:] == (case.width,):
            found["dispatch" if "dispatch" in module.op_name(one) else "combine"].append(one)

    def before(one):
        return {other.name for other in ancestors(entry, one)}

    # A rail rank receives the tokens of two ranks in half of a chunk each, and has one buffer inside its node.
    forwarded = 2 * case.num_tokens // 2
    out, inside = (
        [one for one in found["dispatch"] if (one.shapes[0].dims[0] == forwarded) == is_out] for is_out in (True, False)
    )
    assert (len(out), len(inside), len(found["combine"])) == (2, 2, 4)
    for one in out:
        assert not {other.name for other in (*out, *inside)} & before(one)
    first, second = (len({other.name for other in out} & before(one)) for one in inside)
    assert sorted((first, second)) == [1, 2]
    names = {one.name for one in found["combine"]}
    assert sorted(len(names & before(one)) for one in found["combine"]) == [0, 0, 1, 1]


GROUPED = TopK(4, group_limit=GroupLimit(4, 2, 1))


def ungrouped(logits, bias, info) -> Routing:
    """The groups of `GROUPED`, unknown to the layer, but the first token of rank 2 has experts in four of them."""
    routing = GROUPED(logits, bias, info)
    token = info.position
    everywhere = jnp.arange(0, 8, 2, dtype=jnp.int32)
    is_odd = (token == 2 * logits.shape[0])[:, None]
    return replace(routing, experts=jnp.where(is_odd, everywhere[None], routing.experts))


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", [Buffers(0.7), Buffers(8.0, 1, 3)])
def test_buffers_have_room_for_the_nodes_of_the_router(buffers, x64):
    """A router with two of four groups sends at most two rows per token between nodes, with the same values."""
    case, mesh = Case(num_experts=8), make_mesh((4, 2), MESH)
    topology, args = Topology.from_mesh(mesh, MESH), case.arguments("zipf", 8, "float64", "float64")
    layers = [
        sharded_moe(mesh, topology, replace(BALANCED, dispatch=Forward(buffers)), r) for r in (GROUPED, ungrouped)
    ]
    assert_equals_dense(with_gradients(layers[0]), args, 1e-12, in_dense_layer(GROUPED))
    limited, unlimited = (str(jax.make_jaxpr(layer)(*args[:4])) for layer in layers)
    few, many = (f"f64[{nodes * case.num_tokens // buffers.chunks},{case.width}]" for nodes in (2, 4))
    assert few in limited
    assert few not in unlimited
    assert many in unlimited


@pytest.mark.slow
def test_a_token_with_too_many_nodes_is_a_fault():
    case, mesh = Case(num_experts=8), make_mesh((4, 2), MESH)
    system = replace(BALANCED, dispatch=Forward(max_nodes=2))
    layer = sharded_moe(mesh, Topology.from_mesh(mesh, MESH), system, ungrouped)
    x, mask, kernel, experts, _ = case.arguments("zipf", 8)
    y, stats = jax.jit(layer)(x, jnp.ones_like(mask), kernel, experts)
    with pytest.raises(ValueError, match="a token of rank 2 has experts on 4 nodes; expected at most max_nodes"):
        raise_on_fault(stats)
    is_lost = jnp.isnan(y).any(1)
    assert is_lost[2 * case.num_tokens]
    assert is_lost.sum() == 1


def test_the_limit_of_a_router_holds_for_experts_at_home_in_order_alone():
    mesh, system = make_mesh((4, 2), MESH), System(dispatch=Forward())
    topology = Topology.from_mesh(mesh, MESH)
    at_home = jnp.arange(8, dtype=jnp.int32)
    routers = (GROUPED, None), (GROUPED, at_home), (ungrouped, None)
    found = [_for_router(system, router, homes, 8, topology).dispatch for router, homes in routers]
    assert found == [Forward(max_nodes=2), Forward(), Forward()]
    # Places decide: experts 0 and 1 are in one node unless they moved.
    experts = jnp.array([[0, 1, 2], [0, 2, 4], [-1, 8, 7]], jnp.int32)
    for homes, visits in ((None, [0, 3, 0]), (at_home.at[1].set(7).at[7].set(1), [3, 3, 0])):
        assert Forward(max_nodes=2).excess_nodes(_places(experts, homes), 8, topology).tolist() == visits
    assert Forward(max_nodes=3).excess_nodes(experts, 8, topology) is None
    rows = [Forward(max_nodes=limit).cost().row_arrays(24, 4, topology) for limit in (2, None)]
    assert [(one.sent_first, one.forwarded) for one in rows] == [(48, 96), (96, 96)]


def addressed(dispatch, system, shape, experts, counts):
    """Return the receipts of all ranks, stacked."""
    mesh = make_mesh(shape, MESH)
    topology = Topology.from_mesh(mesh, MESH)

    def one_rank(experts):
        plan = plain_plan(jnp.asarray(counts), topology, counts.shape[1] // topology.num_ranks + system.replica_slots)
        plan, _ = system.balancer.rebalance(jnp.asarray(counts), plan, topology, ())
        return jax.tree.map(lambda leaf: leaf[None], dispatch.address(experts, jnp.asarray(counts), plan, topology))

    spec = PartitionSpec(MESH)
    run = jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run)(experts)


@pytest.mark.slow
def test_rows_between_nodes_are_distinct_pairs_of_token_and_node():
    """The table of `Forward` counts each pair of token and node once, also after balancing."""
    rng, (ranks, tokens, num_experts) = np.random.default_rng(0), (8, 16, 16)
    experts = rng.integers(-1, num_experts, (ranks, tokens, 3)).astype(np.int32)
    experts[0, :, 1] = experts[0, :, 0]
    counts = np.stack([np.bincount(e[e >= 0], minlength=num_experts) for e in experts]).astype(np.int32)
    receipt = addressed(Forward(), greedy(2), (2, 4), experts.reshape(-1, 3), counts)
    node = np.where(experts >= 0, experts // 8, -1)
    visits = np.array([[(of_rank == n).any(1).sum() for n in range(2)] for of_rank in node])
    # Rank (n, o) has the table of the ranks of offset o.
    for rank in range(ranks):
        np.testing.assert_array_equal(receipt.between.tables[rank, 0], visits[rank % 4 :: 4])
    rank_of_row, entry = np.asarray(receipt.lists.rank), np.asarray(receipt.lists.entry)
    for rank in range(ranks):
        used = rank_of_row[rank] < 4
        pairs = list(zip(rank_of_row[rank][used], entry[rank][used], strict=True))
        assert len(set(pairs)) == len(pairs) == used.sum()
        assert receipt.lists.copies[rank].sum() == counts.reshape(2, 4, 2, 8)[:, rank % 4, rank // 4].sum()


@pytest.mark.parametrize(
    ("system", "shape", "axes", "domain", "message"),
    [
        (rails(), (2, 2), MESH, None, "plan.rails is set; expected None, as Once does not spray"),
        (rails(), (2, 2), MESH, None, "plan.rails is set; expected None, as Forward does not spray"),
        (exact(1), (2, 2), MESH, 4, "plan.domain is 4; expected at most 2, the ranks of a node"),
        (plain(), (4,), ("gpu",), None, "expert_axes is .*; expected axes of nodes and of the ranks of a node"),
    ],
)
@pytest.mark.slow
def test_unsupported_plans_are_refused(system, shape, axes, domain, message):
    case, mesh = Case(num_experts=8), make_mesh(shape, axes)
    topology = Topology.from_mesh(mesh, axes, ranks_per_domain=domain)
    dispatch = Once() if "Once" in message else Forward()
    layer = sharded_moe(mesh, topology, replace(system, dispatch=dispatch))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layer, *case.arguments("balanced", 4)[:4])

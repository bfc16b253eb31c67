"""Invalid values: no program stops, no data are lost silently, and the host gets one error."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import (
    Balancer,
    Buffers,
    MoEParams,
    MoEState,
    System,
    TopK,
    Topology,
    feplb,
    greedy,
    moe,
    plain,
    raise_on_fault,
)
from jax_moe_lb.core import needs_more_rounds
from jax_moe_lb.core.stats import HOMES, NO_FAULT, PLAN, ROUNDS, ROUTING
from jax_moe_lb.transport import Direct, MultiRailDispatch, PeerCopy, TwoPhase
from tests.layer_cases import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

CASE = Case()


def arguments(name="zipf"):
    return CASE.arguments(name, 8)


def flat():
    mesh = make_mesh((8,), ("expert",))
    return mesh, Topology.from_mesh(mesh)


@dataclass(frozen=True)
class Spoilt(Balancer):
    """Balancer editing a plan with one of the functions below."""

    spoil: object

    def rebalance(self, counts, plan, topology, state):
        return self.spoil(plan), state


def loses_a_token(plan):
    return replace(plan, quota=plan.quota.at[0, 0].add(-1))


def holds_what_is_not_there(plan):
    return replace(plan, placement=plan.placement.at[2, -1].set(99))


def relays_from_nowhere(plan):
    held = plan.placement.at[2, -1].set(0)
    return replace(plan, placement=held, relay=jnp.where(held < 0, -1, held // 2).at[2, -1].set(5))


def sprays_rows_that_are_not_there(plan):
    return replace(plan, rails=jnp.zeros((8, 8, 4), jnp.int32).at[0, 5, 0].set(1))


# One fault per array; test_plan.py breaks every rule of a plan, without compiling a layer.
BROKEN = (loses_a_token, holds_what_is_not_there)


@pytest.mark.slow
@parametrize(
    "spoil, replicate, dispatch",
    [],
    [
        *((spoil, None, Direct()) for spoil in BROKEN),
        (loses_a_token, PeerCopy(), TwoPhase()),
        (relays_from_nowhere, PeerCopy(), Direct()),
        (sprays_rows_that_are_not_there, None, MultiRailDispatch()),
    ],
)
def test_an_illegal_plan_gives_way_to_plain_expert_parallelism(spoil, replicate, dispatch):
    mesh = make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=8, rails_per_node=4)
    system = System(Spoilt(spoil), dispatch=dispatch, replica_slots=2)
    system = system if replicate is None else replace(system, replicate=replicate)
    args = arguments()
    (y, stats), gradients = with_gradients(sharded_moe(mesh, topology, system), checked=False)(*args)
    (want, _), want_gradients = dense_with_gradients(TopK(2))(*args)
    assert_close((y, gradients), (want, want_gradients), 1e-5)
    assert stats.fault.code.tolist() == [PLAN]
    np.testing.assert_array_equal(stats.load_after, stats.load_before)
    with pytest.raises(ValueError, match=r"^plan\.\w+ .*; expected"):
        raise_on_fault(stats)


@functools.cache
def recording_layer(router):
    return jax.jit(sharded_moe(*flat(), greedy(2), router))


@dataclass(frozen=True)
class OutOfRange:
    """Router that chooses an expert that does not exist for one token."""

    expert: int

    def __call__(self, logits, bias, info):
        routing = TopK(2)(logits, bias, info)
        bad = (info.position == 30)[:, None]
        return replace(routing, experts=jnp.where(bad, self.expert, routing.experts))


NOT_FINITE = "router logits of rank 1 give weights that are not finite; expected finite logits"


@pytest.mark.slow
@parametrize(
    "router, value, says",
    [
        (TopK(2), np.inf, NOT_FINITE),
        (OutOfRange(99), 0.0, r"expert ids of rank 1 include 99 \(2 bad ones\); expected 0 to 15, or -1 for no expert"),
    ],
    [(TopK(2), np.nan, NOT_FINITE), (OutOfRange(-5), 0.0, r"expert ids of rank 1 include -5 \(2 bad ones\)")],
    ids=["infinite", "too high", "nan", "too low"],
)
def test_bad_routing_gets_no_expert_and_is_told(router, value, says):
    x, mask, kernel, experts, _ = arguments()
    spoilt = x.at[30, 0].set(value)
    good, _ = recording_layer(TopK(2))(x, mask, kernel, experts)
    y, stats = recording_layer(router)(spoilt, mask, kernel, experts)
    others = np.delete(np.arange(x.shape[0]), 30)
    np.testing.assert_allclose(np.asarray(y)[others], np.asarray(good)[others], atol=1e-6)
    # An output of 0 would hide the loss of the token.
    assert np.isnan(np.asarray(y)[30]).all()
    assert stats.fault.code.tolist() == [ROUTING]
    assert int(stats.counts.sum()) == 2 * int(mask.sum()) - 2
    with pytest.raises(ValueError, match=says):
        raise_on_fault(stats)


@pytest.mark.slow
@parametrize("system", [plain()], [feplb(2)], ids=["plain", "feplb"])
def test_layers_behind_one_that_was_not_served_do_not_hide_it(system):
    layer = jax.jit(sharded_moe(*flat(), system.replace(buffers=Buffers(0.5, max_rounds=1))))
    x, mask, kernel, experts, _ = arguments("one_hot")
    y, stats = layer(x, mask, kernel, experts)
    _, behind = layer(y, mask, kernel, experts)
    assert np.isnan(np.asarray(y)).all()
    both = jax.tree.map(lambda *leaves: np.stack(leaves), stats, behind)
    assert both.fault.code.tolist() == [[ROUNDS], [ROUTING]]
    assert needs_more_rounds(both)
    with pytest.raises(ValueError, match=r"^entry 0: max_rounds is 1; expected at least "):
        raise_on_fault(both)
    # An earlier fault occurs in any program.
    assert not needs_more_rounds(jax.tree.map(lambda leaf: leaf[::-1], both))
    assert not needs_more_rounds(behind)


@pytest.mark.slow
def test_places_that_are_no_permutation_make_outputs_nan():
    mesh, topology = flat()
    x, _, kernel, experts, _ = arguments()

    def one_rank(x, kernel, experts, homes):
        y, stats, _ = moe(x, MoEParams(kernel, experts), TopK(2), greedy(2), topology, MoEState(homes=homes))
        return y, stats.of_group

    ranks, whole = PartitionSpec("expert"), PartitionSpec()
    specs = {"in_specs": (ranks, whole, ranks, whole), "out_specs": (ranks, PartitionSpec(None))}
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, **specs))
    homes = jnp.arange(16, dtype=jnp.int32)
    y, stats = run(x, kernel, experts, homes)
    assert stats.fault.code.tolist() == [NO_FAULT]
    y, stats = run(x, kernel, experts, homes.at[3].set(4))
    assert np.isnan(np.asarray(y)).all()
    assert stats.fault.code.tolist() == [HOMES]
    with pytest.raises(ValueError, match="homes of layer 0 has 4 2 times; expected a permutation of 0 to 15"):
        raise_on_fault(stats)


@pytest.mark.slow
def test_a_fault_in_one_group_is_told_of_that_group():
    """Additional dimensions, such as layers, give the index of the entry."""
    mesh = make_mesh((2, 4), ("data", "expert"))
    x, mask, kernel, experts, _ = arguments()
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), greedy()))
    _, good = layer(x, mask, kernel, experts)
    y, bad = layer(x.at[6 * CASE.num_tokens, 0].set(jnp.nan), mask, kernel, experts)
    assert np.isfinite(np.asarray(y)[: 4 * CASE.num_tokens]).all()
    raise_on_fault(good)
    with pytest.raises(ValueError, match=r"^group 1 of 2: router logits of rank 2 give"):
        raise_on_fault(bad)
    with pytest.raises(ValueError, match=r"^entry 2, group 1 of 2: router logits of rank 2 give"):
        raise_on_fault(jax.tree.map(lambda *leaves: np.stack(leaves), good, good, bad))

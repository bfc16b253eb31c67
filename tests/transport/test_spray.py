"""Spraying over rails puts the same rows in the same places as direct dispatch, for any rails of the plan."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jax_moe_lb import Buffers, Plan, System, Topology
from jax_moe_lb.balancers import RailS
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.plan import rows_between
from jax_moe_lb.transport import Direct, MultiRailDispatch
from jax_moe_lb.transport.exchange import to_sending_order
from jax_moe_lb.transport.spray import by_own_rail, by_rail_rank
from tests.layer_cases import Case, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize
from tests.oracle import random_plan

RANKS, TOKENS, PER_TOK, EXPERTS, SLOTS = 8, 12, 2, 16, 4
DOMAIN = 4  # domain of the plan; the nodes of the rails may differ
MAX_ROUNDS = 40
HEADROOM = 0.4  # several rounds, some with several steps
# mesh sizes, ranks per node, rails
LAYOUTS = {
    "two ranks at each rail": ((2, 4), 4, 2),
    "four nodes, on two axes": ((2, 2, 2), 2, 2),
    "one node": ((8,), 8, 8),
}


def layout(name):
    sizes, members, num_rails = LAYOUTS[name]
    axes = ("dc", "node", "gpu")[-len(sizes) :]
    mesh = make_mesh(sizes, axes)
    return mesh, Topology.from_mesh(mesh, axes, ranks_per_domain=members, rails_per_node=num_rails)


def exchange(dispatch, mesh, topology):
    """Return the jitted `(x, experts, counts, plan) -> (rows of every round, their group sizes, returned rows,
    steps)`.
    """

    def one_rank(x, experts, counts, plan):
        receipt = dispatch.address(experts, counts, plan, topology)
        copies = to_sending_order(x, receipt, PER_TOK)
        capacity = dispatch.buffers.rows(copies.shape[0])

        def one_round(i, carry):
            all_rows, all_sizes, out = carry
            rows, sizes = dispatch.send(copies, receipt, i, topology)
            slot = jnp.repeat(jnp.arange(SLOTS), sizes, total_repeat_length=capacity)
            served = rows * (slot[:, None] + 2).astype(rows.dtype)
            out = dispatch.send_back(served, receipt, i, out, topology)
            return all_rows.at[i].set(rows), all_sizes.at[i].set(sizes), out

        rows = jnp.zeros_like(copies, shape=(MAX_ROUNDS, capacity, copies.shape[1]))
        sizes = jnp.zeros_like(receipt.order, shape=(MAX_ROUNDS, SLOTS))
        carry = jax.lax.fori_loop(0, receipt.rounds, one_round, (rows, sizes, jnp.zeros_like(copies)))
        steps = getattr(receipt, "steps", receipt.rounds * 0 + 1)
        return jax.tree.map(lambda a: a[None], (*carry, receipt.rounds, steps))

    ranks, whole = PartitionSpec(topology.expert_axes), PartitionSpec()
    specs = (ranks, ranks, whole, whole)
    outs = (ranks, ranks, ranks, whole, whole)
    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=outs))


@functools.cache
def direct():
    mesh = make_mesh((RANKS,), ("expert",))
    return exchange(Direct(Buffers(HEADROOM)), mesh, Topology.from_mesh(mesh))


@functools.cache
def spray(name):
    return exchange(MultiRailDispatch(Buffers(HEADROOM)), *layout(name))


def draw(rng, skew):
    """Return tokens, their experts, counts, and a legal plan."""
    share = np.exp(skew * rng.normal(size=(RANKS, 1, EXPERTS)) + rng.gumbel(size=(RANKS, TOKENS, EXPERTS)))
    experts = np.argsort(-share, -1)[..., :PER_TOK].astype(np.int32)
    experts[rng.random(experts.shape) < 0.1] = -1
    counts = np.stack([np.bincount(e[e >= 0], minlength=EXPERTS) for e in experts.reshape(RANKS, -1)]).astype(np.int32)
    placement, quota = random_plan(rng, counts, SLOTS, DOMAIN)
    x = rng.normal(size=(RANKS * TOKENS, 3)).astype(np.float32)
    return x, experts.reshape(-1, PER_TOK), counts, Plan(placement, quota, domain=DOMAIN)


def any_rails(rng, rows, num_rails, how):
    """Return rows on rails: random, or all on one."""
    if how == "random":
        return (
            rng.multinomial(rows.ravel(), rng.dirichlet(np.ones(num_rails))).reshape(*rows.shape, -1).astype(np.int32)
        )
    return (rows[..., None] * (np.arange(num_rails) == num_rails - 1)).astype(np.int32)


@pytest.mark.slow
@parametrize("name", ["four nodes, on two axes"], LAYOUTS)
@settings(max_examples=15, deadline=None)
@example(seed=0, skew=10.0, how="one rail")
@given(
    seed=st.integers(0, 2**32 - 1),
    skew=st.sampled_from([0.0, 1.0, 10.0]),
    how=st.sampled_from(["random", "one rail", "balanced"]),
)
def test_every_row_is_where_direct_dispatch_puts_it(name, seed, skew, how):
    run, (_, topology) = spray(name), layout(name)
    rng = np.random.default_rng(seed)
    x, experts, counts, plan = draw(rng, skew)
    want = direct()(x, experts, counts, plan)
    if how == "balanced":
        sprayed = RailS().rebalance(counts, plan, topology, ())[0]
    else:
        sprayed = replace(plan, rails=any_rails(rng, rows_between(counts, plan), topology.rails_per_node, how))
    got = run(x, experts, counts, sprayed)
    # A stream of `MultiRailDispatch` is ordered by source, one of `Direct` by slot, so single rounds serve different
    # rows.
    for a, b in zip(by_slot(got), by_slot(want), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(got[2:4], want[2:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(got[3][0]) <= MAX_ROUNDS
    assert (np.asarray(got[2]) != 0).sum() == 3 * counts.sum()
    assert run._cache_size() == 1


def by_slot(exchanged):
    """Return the rows of each slot of each rank, over all rounds, in sorted order."""
    rows, sizes = np.asarray(exchanged[0]), np.asarray(exchanged[1])
    served = []
    for of_rank, counts in zip(rows, sizes, strict=True):
        slots = [np.repeat(np.arange(SLOTS), count) for count in counts]
        held = np.concatenate([round_rows[: len(slot)] for round_rows, slot in zip(of_rank, slots, strict=True)])
        slot = np.concatenate(slots)
        served += [np.sort(held[slot == s].view("f4,f4,f4"), axis=0) for s in range(SLOTS)]
    return served


def all_to_the_other_node():
    """Return tokens that all go to the ranks of the other node, evenly."""
    rng = np.random.default_rng(0)
    experts = np.arange(RANKS * TOKENS * PER_TOK).reshape(RANKS, -1) % 8 + 8 * (np.arange(RANKS)[:, None] < 4)
    counts = np.stack([np.bincount(e, minlength=EXPERTS) for e in experts]).astype(np.int32)
    x = rng.normal(size=(RANKS * TOKENS, 3)).astype(np.float32)
    plan = plain_plan(counts, Topology.flat(RANKS, 4), SLOTS)
    return x, experts.reshape(-1, PER_TOK).astype(np.int32), counts, plan


@pytest.mark.slow
def test_a_balanced_plan_takes_one_step_and_a_single_rail_more():
    """Buffers of rail ranks hold `A` rows; a single rail needs four times as many, so parts of an eighth fit."""
    mesh = make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), rails_per_node=4)
    whole = PartitionSpec()

    def one_rank(experts, counts, plan):
        receipt = MultiRailDispatch(Buffers(1.05)).address(experts, counts, plan, topology)
        return receipt.rounds, receipt.steps

    specs = (PartitionSpec(("node", "gpu")), whole, whole)
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=whole))
    _, experts, counts, plan = all_to_the_other_node()
    balanced = RailS().rebalance(counts, plan, topology, ())[0]
    assert tuple(map(int, run(experts, counts, balanced))) == (1, 1)
    one_rail = any_rails(None, rows_between(counts, plan), 4, "one rail")
    assert tuple(map(int, run(experts, counts, replace(plan, rails=one_rail)))) == (1, 7)


@pytest.mark.slow
def test_without_rails_rows_travel_along_the_receivers_rail():
    topology = Topology(Topology.flat(RANKS).levels, 4, rails_per_node=2)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 9, (RANKS, RANKS)), jnp.int32)
    rails = np.asarray(rows)[:, :, None] * (np.arange(RANKS)[:, None] % 4 // 2 == np.arange(2))
    np.testing.assert_array_equal(by_own_rail(rows, topology), by_rail_rank(jnp.asarray(rails, jnp.int32), topology))


def numbers(text):
    return [int(number) for number in text.split(",")]


def kind(groups, members):
    """Return whether the groups are nodes, or ranks of equal offset."""
    inside = all(len({r // members for r in group}) == 1 for group in groups)
    along = all(len({r % members for r in group}) == 1 for group in groups)
    return "inside a node" if inside else "along a rail" if along else "anywhere"


@pytest.mark.slow
def test_no_row_leaves_its_rail_between_nodes_on_a_gpu():
    """A whole layer, forward and backward, lowered for a GPU, with exact-size exchanges."""
    mesh, topology = layout("two ranks at each rail")
    system = System(RailS(), dispatch=MultiRailDispatch(Buffers(max_rounds=1)))
    layer = with_gradients(sharded_moe(mesh, topology, system))
    text = layer.trace(*Case().arguments("zipf", 8)).lower(lowering_platforms=("cuda",)).as_text()
    groups = re.findall(r"ragged_all_to_all.*?replica_groups = dense<\[(.*?)\]> :", text)
    found = [kind([numbers(group) for group in re.findall(r"\[([\d, ]+)\]", each)], 4) for each in groups]
    # Dispatch and combine; backward, dispatch of copies, gradients and weights, and combine of gradients of copies and
    # weights.
    assert sorted(found) == ["along a rail"] * 7 + ["inside a node"] * 21


def test_axes_that_make_up_no_node_are_refused():
    mesh = make_mesh((8,), ("expert",))
    topology = Topology.from_mesh(mesh, ranks_per_domain=4, rails_per_node=4)
    with pytest.raises(ValueError, match=r"ranks_per_node is 4 on mesh axes \('expert',\) of sizes \(8,\); expected"):
        exchange(MultiRailDispatch(), mesh, topology)(*all_to_the_other_node())
    mesh, topology = layout("two ranks at each rail")
    with pytest.raises(ValueError, match=r"ranks_per_node is 1 on mesh axes .* of at least 2 ranks"):
        exchange(MultiRailDispatch(), mesh, replace(topology, ranks_per_domain=1, rails_per_node=1))(
            *all_to_the_other_node()
        )


def test_rails_that_do_not_fit_are_refused():
    mesh, topology = layout("two ranks at each rail")
    x, experts, counts, plan = all_to_the_other_node()
    with pytest.raises(ValueError, match=r"plan.rails has 4 rails; expected the 2 of Topology.rails_per_node"):
        exchange(MultiRailDispatch(), mesh, topology)(
            x, experts, counts, replace(plan, rails=np.zeros((8, 8, 4), np.int32))
        )
    with pytest.raises(
        ValueError, match=r"MultiRailDispatch on a slice of TPU v5e with over 16 chips; expected another"
    ):
        exchange(MultiRailDispatch(), mesh, replace(topology, limited_routing=True))(x, experts, counts, plan)
    with pytest.raises(ValueError, match=r"rails_per_node is 3; expected a divisor of the 4 ranks of a node"):
        exchange(MultiRailDispatch(), mesh, replace(topology, rails_per_node=3))(x, experts, counts, plan)


@pytest.mark.slow
def test_rails_that_lose_a_row_are_not_followed():
    """All rows then take the receiver's own rail, with the same results as without rails; the layer reports the
    fault.
    """
    x, experts, counts, plan = all_to_the_other_node()
    plan = RailS().rebalance(counts, plan, layout("two ranks at each rail")[1], ())[0]
    rails = plan.rails.copy()
    rails[1, 6, 0] += 1
    run = spray("two ranks at each rail")
    for a, b in zip(
        run(x, experts, counts, replace(plan, rails=rails))[:4], run(x, experts, counts, plan)[:4], strict=True
    ):
        np.testing.assert_array_equal(a, b)

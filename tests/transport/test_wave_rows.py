"""Tokens sent once, estimated from counts: against synthetic tokens, and by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, Topology, exact
from jax_moe_lb.aot import LayerSizes
from jax_moe_lb.aot.load import zipf_counts
from jax_moe_lb.core import Level, plain_plan
from jax_moe_lb.core.plan import load
from jax_moe_lb.core.split import Split, copies_of_all
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.layer.systems import ultraep
from jax_moe_lb.transport import Direct, Forward
from jax_moe_lb.transport.wave_rows import EvenRouting, WaveRows, rows_of_groups, share_in_member, spread_evenly


def test_tokens_with_uneven_chances_are_estimated_within_five_percent():
    rng = np.random.default_rng(0)
    tokens, experts, per_token = 20000, 32, 4
    chosen = np.argsort(-(1.2 * rng.normal(size=experts) + rng.gumbel(size=(tokens, experts))), 1)[:, :per_token]
    has = np.zeros((tokens, experts), int)
    np.put_along_axis(has, chosen, 1, 1)
    counts = np.tile(has.sum(0), (4, 1)).astype(np.int32)
    wave = WaveRows(counts, plain_plan(counts, Topology.flat(4)), per_token)
    np.testing.assert_array_equal(wave.copies[0], has.sum(0).reshape(4, 8).sum(1))
    for members in (4, 2):
        visits = has.reshape(tokens, members, -1).any(2).sum(0)
        np.testing.assert_allclose(wave.tokens(members)[0], visits, rtol=0.05)


def symmetric(odds, degree):
    """Return the elementary symmetric polynomial, by its recurrence."""
    found = np.eye(1, degree + 1)[0]
    for one in odds:
        found[1:] += one * found[:-1]
    return found[degree]


@pytest.mark.parametrize("per_token", [1, 2, 5])
def test_tokens_of_members_equal_the_recurrence(per_token):
    rng, tokens = np.random.default_rng(per_token), 1000
    # All tokens choose expert 3, so that one factor has almost certain odds.
    counts = np.minimum(rng.multinomial(tokens * per_token, rng.dirichlet(np.full(16, 0.5)), 4), tokens)
    counts = counts.astype(np.int32)
    counts[0, 3] = tokens
    plan = plan_on_host(exact(2), counts, Topology.flat(4)).plan
    wave = WaveRows(counts, plan, per_token)
    there = copies_of_all(counts, plan.quota, plan.domain, plan.split)
    found = wave.tokens(4)
    for rank, member in np.ndindex(4, 4):
        copies = there[rank, :, member]
        number = counts[rank].sum() / per_token
        chance = np.minimum(counts[rank] / number, 1 - 1e-6)
        odds, there_part = chance / (1 - chance), copies / np.maximum(counts[rank], 1)
        share = 1 - symmetric(odds * (1 - there_part), per_token) / symmetric(odds, per_token)
        wanted = np.clip(share * number, copies.sum() / per_token, copies.sum())
        assert found[rank, member] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("system", [exact(2), ultraep(2)])
def test_rows_of_several_groups_equal_those_of_each(system):
    topology, rng = Topology((Level("node", 2), Level("gpu", 2)), ranks_per_domain=2), np.random.default_rng(0)
    loads = [rng.multinomial(4096, rng.dirichlet(np.full(16, 0.5)), 4).astype(np.int32) for _ in range(3)]
    waves = [(counts, plan_on_host(system, counts, topology).plan) for counts in loads]
    # The last group has another split rule, so it is in another batch.
    waves.append((loads[0], replace(waves[0][1], split=Split("proportional", locality=False))))
    for wave, rows in zip(waves, rows_of_groups(waves, 4), strict=True):
        alone = WaveRows(*wave, per_token=4)
        np.testing.assert_array_equal(rows.copies, alone.copies)
        np.testing.assert_array_equal(rows.by_expert, alone.by_expert)
        for members in (2, 4):
            np.testing.assert_array_equal(rows.tokens(members), alone.tokens(members))


def test_ranks_without_tokens_send_none():
    counts = np.array([[4, 4, 4, 4], [0, 0, 0, 0]], np.int32)
    tokens = WaveRows(counts, plain_plan(counts, Topology.flat(2)), 2).tokens(2)
    np.testing.assert_allclose(tokens[1], 0)
    np.testing.assert_allclose(tokens[0], 8 * EvenRouting(4, 2, 1).tokens(2))


def test_share_of_tokens_in_a_member():
    assert share_in_member(4, 2, 2) == pytest.approx(5 / 6)
    # Of DeepSeek-V3's 256 experts 16 are on a node: of 8 choices half a copy goes there, in 0.41 tokens.
    assert share_in_member(256, 8, 16) == pytest.approx(0.408, abs=1e-3)


def test_rows_spread_evenly_stay_in_their_member_or_leave_it():
    assert spread_evenly(12.0, (2, 3)) == (6.0, 4.0)
    assert spread_evenly(12.0, (2, 1)) == (6.0, 0.0)


def test_forward_needs_the_rounds_of_direct_unless_an_offset_prefers_a_node():
    sizes = LayerSizes(experts=64, tokens=4096, per_token=8)
    topology = Topology((Level("node", 2), Level("gpu", 8)), ranks_per_domain=8)
    uneven = np.full((16, 64), 512, np.int32)
    # Tokens of offset 0 prefer the first node in both nodes, those of offset 1 the second.
    for offset, node in ((0, 0), (1, 1)):
        uneven[[offset, offset + 8]] = np.repeat(np.where(np.arange(2) == node, 1024, 0), 32)
    alike = [zipf_counts(sizes, 16, exponent) for exponent in (0.0, 0.3)]
    for counts, rounds in ((alike[0], 1), (alike[1], 1), (uneven, 2)):
        plan = plan_on_host(exact(2), counts, topology).plan
        buffers = Buffers(1.01 * load(plan).max() / (4096 * 8))
        direct, forward = (
            one.cost().rounds(WaveRows(counts, plan, 8), topology, 4096 * 8)
            for one in (Direct(buffers), Forward(buffers))
        )
        assert (direct, forward) == (1, rounds)

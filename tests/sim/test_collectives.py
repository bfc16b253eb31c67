"""Bytes and hops of collectives match manual calculation."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Collective, Communication, Links, Migration, ModelShape, simulate
from jax_moe_lb.sim.network import all_gather, all_reduce, latency_s, level_bytes, pair_hops, reduce_scatter, seconds
from jax_moe_lb.transport import Codec, CodecBase

FAR = Cluster((Links("dc", 32, 1e9, latency_s=5e-3),))
NODES = Cluster((Links("node", 4, 50e9, links=8, latency_s=10e-6), Links("gpu", 8, 400e9, latency_s=3e-6)))
"""4 nodes of 8 GPUs."""


def by(cluster, way):
    return replace(cluster, communication=Communication(way))


def took(flows, cluster):
    return sum(seconds(flow, cluster) for flow in flows)


def bytes_of(flows, cluster):
    return tuple(np.sum([level_bytes(flow, cluster) for flow in flows], 0))


@pytest.mark.parametrize(
    ("way", "gather_s", "reduce_s"),
    [("ring", 31 * 5e-3, 62 * 5e-3), ("tree", 5 * 5e-3, 10 * 5e-3), ("direct", 5e-3, 10e-3)],
)
def test_thirty_two_ranks_at_five_milliseconds_pay_for_every_hop(way, gather_s, reduce_s):
    cluster = by(FAR, Collective(way))
    # One megabyte per rank, of which each rank forwards 31; of a sum of 32 MB it forwards 62 of 32 parts.
    assert took(all_gather(1e6, (32,), cluster), cluster) == pytest.approx(gather_s + 31e-3)
    assert took(reduce_scatter(1e6, (32,), cluster), cluster) == pytest.approx(gather_s + 31e-3)
    assert took(all_reduce(32e6, (32,), cluster), cluster) == pytest.approx(reduce_s + 62e-3)


@pytest.mark.parametrize(
    ("way", "gather_hops", "reduce_hops"),
    [
        # On a ring of 32, a piece crosses nodes 3 times and stays inside for 28 hops.
        ("ring", (3, 28), (6, 56)),
        ("tree", (2, 3), (4, 6)),
        ("hierarchical", (3, 7), (6, 14)),
    ],
)
def test_hops_of_two_levels_pay_the_latency_of_their_level(way, gather_hops, reduce_hops):
    cluster = by(NODES, Collective(way))
    for flows, hops in (
        (all_gather(8.0, (4, 8), cluster), gather_hops),
        (reduce_scatter(8.0, (4, 8), cluster), gather_hops),
        (all_reduce(8.0, (4, 8), cluster), reduce_hops),
    ):
        paid_s = sum(latency_s(flow, cluster) for flow in flows)
        assert paid_s == pytest.approx(hops[0] * 10e-6 + hops[1] * 3e-6)


@pytest.mark.parametrize(
    ("way", "gathered", "reduced"),
    [
        # 4 of the ring's 32 edges leave a node, and every edge carries 31 pieces, or 62 of 32 parts of the sum.
        ("ring", (4 * 31, 28 * 31), (4 * 62, 28 * 62)),
        # 3 edges of a tree connect nodes, and 28 connect ranks inside; both directions of each carry the whole sum of
        # 32.
        ("tree", (32 * 3, 4 * 8 * 4 * 7), (2 * 3 * 32, 2 * 28 * 32)),
        # Each rank sends its piece to 3 other nodes, then inside the 4 that it has; twice as much for a sum.
        ("hierarchical", (32 * 3, 32 * 4 * 7), (2 * 32 * 3, 2 * 32 * 4 * 7)),
        # A separate copy to each of 24 ranks elsewhere.
        ("direct", (32 * 24, 32 * 7), (2 * 32 * 24, 2 * 32 * 7)),
    ],
)
def test_bytes_on_the_links_of_two_levels(way, gathered, reduced):
    cluster = by(NODES, Collective(way))
    assert bytes_of(all_gather(1.0, (4, 8), cluster), cluster) == pytest.approx(gathered)
    assert bytes_of(reduce_scatter(1.0, (4, 8), cluster), cluster) == pytest.approx(gathered)
    assert bytes_of(all_reduce(32.0, (4, 8), cluster), cluster) == pytest.approx(reduced)


def test_groups_of_one_rank_send_nothing():
    for way in Collective:
        assert all_gather(1.0, (1, 1), by(NODES, way)) == all_reduce(1.0, (1, 1), by(NODES, way)) == ()


def test_steps_of_an_exchange_by_pairs():
    # Seven partners inside the node, and 24 outside.
    assert pair_hops((4, 8)) == (24, 7)
    model = ModelShape(1, 64, 32, 32, 2, 128, pre_expert_s=0.0)
    even = np.full((32, 32), 8, np.int32)
    at_once, paired = (
        simulate(systems.plain(), model, replace(NODES, communication=one), even)
        for one in (Communication(), Communication(by_pairs=True))
    )
    more_s = paired.stages["combine"].busy_s - at_once.stages["combine"].busy_s
    assert more_s == pytest.approx(24 * 10e-6 + 7 * 3e-6 - 10e-6)


def test_what_a_step_gathers_and_sums_goes_by_the_algorithm():
    model = ModelShape(1, 64, 32, 32, 2, 128, pre_expert_s=0.0)
    far = replace(FAR, levels=(replace(FAR.levels[0], bytes_per_s=1e15),))
    even = np.full((32, 32), 8, np.int32)
    migration = Migration((32,), Codec(4.0, CodecBase.SHARED, gradient_ratio=1.0))
    for way, hops in ((Collective.RING, 62 + 31), (Collective.TREE, 10 + 5), (Collective.DIRECT, 2 + 1)):
        report = simulate(systems.plain(), model, by(far, way), even, migration=migration)
        # The shared expert is summed, then experts are gathered; gradients are summed at home.
        assert report.stages["gather"].busy_s == pytest.approx(hops * 5e-3, rel=1e-4)
        gradients_s = {Collective.RING: 31, Collective.TREE: 5, Collective.DIRECT: 1}[way] * 5e-3
        assert report.stages["gradients (backward)"].busy_s == pytest.approx(gradients_s, rel=1e-4)

"""Overlapping transfers share links, and ranks with jitter wait for the slowest: compared with manual calculation."""

import zlib
from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Communication, Links, Migration, ModelShape, Step, simulate, simulate_uniform
from jax_moe_lb.sim.events import Task, Timeline, Transfer

SHARED = Communication(shares_links=True)


def ends(*transfers, starts=None):
    """Return the ends of transfers, each starting after a task of `starts` seconds."""
    timeline = Timeline(1)
    sent = []
    for at, transfer in enumerate(transfers):
        after = timeline.add(Task("before", (f"stream {at}",), (starts or [0.0] * len(transfers))[at]))
        sent.append(timeline.add(Task("sent", (), 0.0, together=True, transfer=transfer), (after,), ("links",)))
    timeline.solve()
    return [float(task.end[0]) for task in sent]


def test_two_transfers_at_once_take_twice_as_long_and_a_later_one_halves_what_is_left():
    one, two = Transfer(0.0, 1.0, (1.0,)), Transfer(0.0, 2.0, (2.0,))
    assert ends(one, one) == [2.0, 2.0]
    # Alone for a second, then both have a second left.
    assert ends(two, one, starts=[0.0, 1.0]) == [3.0, 3.0]
    # Half speed until the short one is done at 2, then full speed for the other.
    assert ends(two, one) == [3.0, 2.0]


def test_a_transfer_takes_nothing_of_links_while_its_latency_lasts():
    assert ends(Transfer(1.0, 1.0, (1.0,)), Transfer(0.0, 1.0, (1.0,))) == [2.0, 1.0]


def test_levels_are_shared_apart():
    outer, inner = Transfer(0.0, 1.0, (1.0, 0.0)), Transfer(0.0, 1.0, (0.0, 1.0))
    assert ends(outer, inner) == [1.0, 1.0]
    # Two halve the outer level; the third has the inner one alone.
    assert ends(outer, outer, inner) == [2.0, 2.0, 1.0]
    # One needs a quarter of the inner level, on which both run at four fifths of their speed.
    assert ends(Transfer(0.0, 1.0, (1.0, 0.25)), inner) == pytest.approx([1.25, 1.25])
    # Two that need half of a level each are not slowed down.
    assert ends(Transfer(0.0, 1.0, (0.5,)), Transfer(0.0, 1.0, (0.5,))) == [1.0, 1.0]


def test_a_gather_beside_a_dispatch_shares_the_link():
    # 2 experts to one other rank, of 24,576 bytes each; half of 256 copies of 128 bytes: 49 and 16 us.
    model = ModelShape(1, 64, 64, 8, 4, 64, pre_expert_s=0.0)
    cluster = Cluster((Links("gpu", 4, 1e9),))
    even, step = np.full((4, 8), 32, np.int32), Step(backward=False, exchange_counts=False)
    clusters = (replace(cluster, communication=one) for one in (Communication(), SHARED))
    options = {"migration": Migration((2,)), "step": step}
    queued, shared = (simulate(systems.plain(), model, one, even, **options) for one in clusters)
    gather_s, dispatch_s = 2 * 24576 / 1e9, 256 / 2 * 128 / 1e9
    assert queued.stages["gather"].busy_s == pytest.approx(gather_s)
    assert queued.stages["dispatch"].busy_s == pytest.approx(dispatch_s)
    assert shared.stages["dispatch"].busy_s == pytest.approx(2 * dispatch_s)
    assert shared.stages["gather"].busy_s == pytest.approx(gather_s + dispatch_s)
    # The experts wait for both, and the link carries the same bytes.
    assert shared.step_s == pytest.approx(queued.step_s)


@pytest.mark.parametrize("system", [systems.ultraep(1), systems.exact(1)])
def test_no_link_carries_more_than_it_can_where_transfers_share(system):
    model = ModelShape(3, 64, 64, 16, 4, 64, pre_expert_s=1e-5)
    levels = (Links("node", 2, 1e9, links=4, latency_s=1e-6), Links("gpu", 4, 4e9, latency_s=1e-6))
    cluster = Cluster(levels, copy_bytes_per_s=2e9, planner_s=1e-5, communication=SHARED)
    counts = np.random.default_rng(0).multinomial(256, np.arange(1, 17) / 136, (3, 8)).astype(np.int32)
    report = simulate(system, model, cluster, counts, migration=Migration((2, 1)))
    assert report.step_s == pytest.approx(sum(stage.exposed_s for stage in report.stages.values()))
    for at, level in enumerate(levels):
        sent = sum(task.flow.sent[at] for task in report.timeline.tasks if task.flow is not None)
        assert report.step_s * level.bytes_per_s >= np.max(sent) * (1 - 1e-9)
    assert all((task.start >= before.end - 1e-12).all() for task in report.timeline.tasks for before in task.before)


def test_jitter_makes_exchanges_wait_for_the_slowest_rank():
    model = ModelShape(1, 64, 64, 8, 4, 64, pre_expert_s=1e-3)
    cluster, even = Cluster((Links("gpu", 4, 1e12),), jitter=0.1, jitter_seed=3), np.full((4, 8), 32, np.int32)
    step = Step(backward=False, exchange_counts=False)
    report = simulate(systems.plain(), model, cluster, even, step=step)
    draws = np.random.default_rng([3, 0, zlib.crc32(b"attention")]).lognormal(-0.005, 0.1, 4)
    assert report.stages["attention"].exposed_s == pytest.approx(1e-3 * draws.max())
    clusters = (replace(cluster, jitter_seed=seed) for seed in (3, 4))
    again, other = (simulate(systems.plain(), model, one, even, step=step) for one in clusters)
    assert again.step_s == report.step_s != other.step_s
    with pytest.raises(ValueError, match=r"Cluster.jitter is 0\.1; expected 0, as one rank stands for all"):
        simulate_uniform(model, cluster)
    with pytest.raises(ValueError, match=r"Cluster.jitter is 2\.0; expected 0 to 1\.0"):
        replace(cluster, jitter=2.0, jitter_seed=0)

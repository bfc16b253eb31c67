"""`advise` finds the fastest system, and says why others cannot run."""

import numpy as np
import pytest

from jax_moe_lb import systems
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Step, skewed_counts
from jax_moe_lb.sim.advise import SWEPT_TOKENS, Candidate, chosen_migration, outcomes, pays_from, verdict
from jax_moe_lb.transport.codec import Codec

PLAIN, GREEDY = Candidate("plain", systems.plain()), Candidate("greedy", systems.greedy())
MODEL = ModelShape(2, 256, 512, 16, 2, 4096)


def machine(**change):
    return Cluster((Links("gpu", 4, 50e9),), AnalyticGemm(1e12, 8.0, 0.0), planner_s=1e-5, **change)


def routed(imbalance):
    return skewed_counts(MODEL, 4, imbalance, 2)[None]


def advice(cluster, trace, candidates=(PLAIN, GREEDY)):
    found = list(outcomes(candidates, MODEL, cluster, trace, Step()))
    return found, verdict(found, PLAIN, MODEL, cluster, trace, Step())


@pytest.mark.slow
def test_balancing_pays_where_routing_is_skewed():
    found, answer = advice(machine(), routed(2.0))
    assert answer.best == GREEDY
    assert not answer.leave_off
    assert answer.gain == pytest.approx(1 - found[1].report.step_s / found[0].report.step_s)
    assert SWEPT_TOKENS[0] < answer.pays_from <= MODEL.tokens


def test_balancing_is_left_off_where_there_is_nothing_to_balance():
    _, answer = advice(machine(), routed(1.0))
    assert answer.leave_off
    assert answer.best == PLAIN
    assert answer.pays_from is None


@pytest.mark.slow
def test_it_pays_from_fewer_tokens_on_where_links_are_faster():
    slow = Cluster((Links("gpu", 4, 1e9),), AnalyticGemm(1e12, 8.0, 0.0))
    fast = Cluster((Links("gpu", 4, 100e9),), AnalyticGemm(1e12, 8.0, 0.0))
    counts = routed(2.0)
    assert pays_from(GREEDY, PLAIN, MODEL, fast, counts, Step()) < pays_from(GREEDY, PLAIN, MODEL, slow, counts, Step())


@pytest.mark.slow
def test_what_cannot_run_says_why():
    wrong = Candidate("wrong", systems.rails())
    cluster = Cluster((Links("node", 2, 1e9, links=2), Links("gpu", 2, 50e9)), AnalyticGemm(1e12, 8.0, 0.0))
    narrow = Candidate("narrow", systems.exact(), chosen_migration(MODEL, cluster, Codec(), Step()))
    found, _ = advice(machine(memory_bytes=1e9), routed(2.0), (PLAIN, wrong, narrow))
    assert found[0].report is not None
    assert "expected a divisor of each of the levels' sizes" in found[2].refused
    found = list(outcomes([PLAIN], MODEL, machine(memory_bytes=1e6), routed(2.0), Step()))
    assert "GB of 0.0 GB" in found[0].refused
    with pytest.raises(ValueError, match="needs"):
        verdict(found, PLAIN, MODEL, machine(memory_bytes=1e6), routed(2.0), Step())


@pytest.mark.slow
def test_history_is_carried_from_step_to_step():
    trace = np.repeat(routed(2.0), 5, 0)
    found = list(outcomes([PLAIN, Candidate("eplb", systems.eplb())], MODEL, machine(), trace, Step()))
    assert found[1].report.imbalance_after < found[0].report.imbalance_after

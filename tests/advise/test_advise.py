"""`advise` finds the fastest choice, and reports indistinguishable and refused choices."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb.advise.advise import (
    SWEPT_TOKENS,
    UNIFORM,
    WORTH_IT,
    Advice,
    Candidate,
    advise,
    chosen_migration,
    pays_from,
)
from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, Workload, drawn_workloads, permute_to_homes
from jax_moe_lb.advise.search import SearchResult, SearchResults, Space, judged
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Step
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.transport import Codec

PLAIN, GREEDY = Candidate("plain", systems.plain()), Candidate("greedy", systems.greedy())
MODEL = ModelShape(2, 256, 512, 8, 2, 4096)


def machine(rate=50e9, **change):
    return Cluster((Links("gpu", 4, rate),), AnalyticGemm(1e12, 8.0, 0.0), planner_s=1e-5, **change)


def drawn(imbalance, draws=1):
    return drawn_workloads(MODEL, 4, imbalance, 1, [LoadShape.RANKS], draws, 0)


def advice(cluster, loads, step=Step(), ratio=1.0, planned=True):
    judge = Evaluator(MODEL, cluster, step)
    # Greedy represents systems with a planner: a small space, as every choice is simulated with runtime type checks.
    space = Space(cluster, 1, planned, with_exact=False, with_relocation=False)
    return judge, advise(judge, space, loads[:1], loads, ratio)


@pytest.mark.parametrize(("recompute", "sizes"), [(True, (2,)), (False, (1,))])
def test_expert_domains_save_the_exchanges_of_a_backward_pass(recompute, sizes):
    # Experts and gradients take 2.25 times the bytes of one exchange of all copies, half of which leave a rank.
    model = ModelShape(1, 64, 6, 2, 1, 16, pre_expert_s=0.0)
    cluster = Cluster((Links("gpu", 2, 1e9),))
    assert chosen_migration(model, cluster, Codec(), Step(recompute=recompute)).domain_sizes == sizes


@pytest.mark.thorough
def test_balancing_pays_where_routing_is_skewed():
    # Too little memory to gather all experts, which balances any load.
    judge, answer = advice(machine(memory_bytes=130e6), drawn(2.0, 2))
    assert answer.best.choice.replica_slots == 1
    assert not answer.leave_off
    assert answer.gain == pytest.approx(1 - np.median(answer.best.ratios(answer.plain)))
    assert SWEPT_TOKENS[0] < answer.pays_from <= MODEL.tokens
    # Whole steps, equal to the simulator's times.
    alone = judged(answer.best.choice, judge, drawn(2.0, 2))
    assert alone.times_s == answer.best.times_s
    assert len(alone.times_s) == 2


@pytest.mark.slow
def test_balancing_is_left_off_where_there_is_nothing_to_balance():
    _, answer = advice(machine(), drawn(1.0))
    assert answer.leave_off
    # Links between levels may still gain a little from expert domains, below the threshold.
    assert answer.best.choice.system == "plain"
    assert answer.gain < WORTH_IT


def test_ranges_that_include_one_cannot_be_told_apart():
    report = judged(Choice(), Evaluator(MODEL, machine(), Step()), drawn(1.0)).report

    def outcome(*times):
        return SearchResult(Choice(), report, times)

    assert outcome(1.0, 3.0).is_like(outcome(2.0, 2.0))
    assert not outcome(2.1, 2.2).is_like(outcome(2.0, 2.0))
    # Compare the times of both on the same load; slow loads alone do not matter.
    assert not outcome(1.1, 9.1).is_like(outcome(1.0, 9.0))


@pytest.mark.parametrize(
    ("times", "is_off"), [((0.5, 1.005), False), ((0.5, 1.02), True), ((0.995, 0.995), True), ((0.98, 0.98), False)]
)
def test_plain_suffices_without_a_gain_or_where_it_is_faster(times, is_off):
    report = judged(Choice(), Evaluator(MODEL, machine(), Step()), drawn(1.0)).report
    outcomes = SearchResult(Choice("greedy", 1), report, times), SearchResult(Choice(), report, (1.0, 1.0))
    assert Advice(SearchResults(outcomes, {}, {}, True), (), None).leave_off == is_off
    # Where plain does not fit, it suffices for nothing.
    alone = Advice(SearchResults(outcomes, {}, {Choice(): "needs more"}, False), (), None)
    assert (alone.leave_off, alone.alike) == (False, ())


@pytest.mark.slow
def test_it_pays_from_fewer_tokens_on_where_links_are_faster():
    load = drawn(2.0)[0]
    found = [pays_from(GREEDY, PLAIN, MODEL, machine(rate), load, Step()) for rate in (100e9, 1e9)]
    assert found[0] < found[1]


@pytest.mark.thorough
def test_what_does_not_fit_says_why_by_name():
    judge, answer = advice(machine(), drawn(2.0))
    least = judge.memory(Choice()).total
    _, short = advice(machine(memory_bytes=least + 1), drawn(2.0))
    assert short.best.choice == Choice()
    assert short.found.fits
    # Larger buffers are tried for choices that fit.
    best = replace(answer.best.choice, headroom=None)
    why = short.found.refused[best]
    assert f"needs {judge.memory(best).total / 1e9:.1f} GB of {least / 1e9:.1f}: weights 0.0" in why
    assert "optimizer" in why
    assert "sums of gradients" in why


def test_inference_keeps_nothing_for_gradients():
    judges = (Evaluator(MODEL, machine(), Step(backward=backward)) for backward in (True, False))
    training, inference = (judge.memory(Choice("greedy", 1)) for judge in judges)
    assert (inference.gradients, inference.optimizer, inference.kept) == (0, 0, 0)
    parameters = MODEL.layers * 2 * MODEL.expert_bytes / MODEL.itemsize
    assert training.weights == inference.weights == 2 * parameters
    assert training.gradients == 4 * parameters
    assert training.optimizer == (8 + 4) * parameters
    # One expert's copies, and no gradients during products, as they are among the sums.
    assert training.replicas == inference.replicas == MODEL.expert_bytes
    assert inference.sums == inference.arriving == 0
    whole = replace(MODEL, itemsize=4)
    assert Evaluator(whole, machine(), Step()).memory(Choice()).optimizer == 8 * parameters
    assert Evaluator(MODEL, machine(), Step(optimizer_bytes=1.5)).memory(Choice()).optimizer == 1.5 * parameters


@pytest.mark.thorough
def test_uniform_routing_compares_expert_domains_alone():
    cluster = Cluster((Links("dc", 100, 1e9), Links("gpu", 8, 1e11)), AnalyticGemm(1e12))
    model = replace(MODEL, experts=800)
    judge = Evaluator(model, cluster, Step())
    answer = advise(judge, Space(cluster, 792, planned=False, with_relocation=False), [UNIFORM], [UNIFORM], 50.0)
    assert all(one.choice.system == "plain" and not one.choice.sprayed for one in answer.found.outcomes)
    times = [judge.glance(Choice(domain_sizes=sizes), UNIFORM) for sizes in Space(cluster, 0).domain_sizes()]
    assert judge.glance(answer.best.choice, UNIFORM) == min(*times, judge.glance(Choice(), UNIFORM))
    # Compressed choices are listed separately, regardless of speed.
    assert {one.choice.ratio for one in answer.compressed} == {50.0}
    assert all(one.choice.ratio == 1 for one in answer.found.outcomes)


def test_new_homes_come_from_what_was_before():
    counts = np.array([[[8, 8, 1, 1]] * 4], np.int32)
    cluster = Cluster((Links("node", 2, 1e9), Links("gpu", 2, 1e10)))
    judge = Evaluator(replace(MODEL, experts=4, tokens=9), cluster, Step())
    loads = Workload("first", counts), Workload("later", counts, counts[:, 0])
    stays, moves = (judge.report(Choice(relocated=True), load) for load in loads)
    assert stays.imbalance_after == pytest.approx(8 / 4.5)
    placed = permute_to_homes(loads[1], judge.candidate(Choice(relocated=True)), cluster)
    # Each node gets a hot expert, and the multiset of loads is unchanged.
    assert sorted(placed[0, 0, :2]) == sorted(placed[0, 0, 2:]) == [1, 8]
    assert (permute_to_homes(loads[1], judge.candidate(Choice()), cluster) == counts).all()
    assert moves.rounds == stays.rounds

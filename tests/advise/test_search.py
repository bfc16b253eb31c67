"""A search is exhaustive on a small machine, and its results can be run as printed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import jax_moe_lb
from jax_moe_lb.advise import choice as choice_module
from jax_moe_lb.advise import search as space_module
from jax_moe_lb.advise.choice import Choice, simulate_flags, system_code, train_flags
from jax_moe_lb.advise.evaluate import ALIKE, Evaluator, drawn_workloads
from jax_moe_lb.advise.search import Space, search
from jax_moe_lb.cli.compile import compose
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Step
from jax_moe_lb.sim.loads import LoadShape
from models.config import ParallelConfig
from models.mesh import make_system
from models.settings import combined, read_assignments, read_mesh, read_system

MODEL = ModelShape(1, 256, 512, 8, 2, 2048)
LEVELS = Links("node", 2, 5e9, links=2, latency_s=1e-5), Links("gpu", 2, 50e9)
CLUSTER = Cluster(LEVELS, AnalyticGemm(1e12, 8.0, 0.0), planner_s=1e-5)
SLOW = replace(CLUSTER, planner_s=5e-3, levels=(replace(LEVELS[0], bytes_per_s=1e8), LEVELS[1]))


def everything(most_slots):
    space = Space(CLUSTER, most_slots)
    return space, list(space.every())


@pytest.mark.thorough
def test_the_winner_is_not_slower_than_any_of_all(monkeypatch):
    # Use fewer choices, as each is simulated with runtime type checks.
    monkeypatch.setattr(choice_module, "HEADROOMS", (None, 2.0))
    judge, (space, choices) = Evaluator(MODEL, CLUSTER, Step()), everything(1)
    loads = drawn_workloads(MODEL, 4, 1.8, 1, [LoadShape.LOGNORMAL], 1, 0)
    found = search(space, judge, loads, loads)
    of_all = {c: float(np.median([judge.glance(c, load) for load in loads])) for c in choices}
    assert found.outcomes[0].median_s == min(of_all.values())
    assert found.outcomes[0].median_s < of_all[Choice()]
    assert len(found.glances) < len(choices)


class GivenTimes(Evaluator):
    """Evaluator of choices whose rounds and times are given by the headroom."""

    def __init__(self, plain_rounds, seconds):
        super().__init__(MODEL, CLUSTER, Step())
        self.plain_rounds, self.seconds = plain_rounds, seconds

    def rounds(self, choice, workload):
        return self.plain_rounds if choice.system == "plain" else 1 + (choice.headroom is None)

    def glance(self, choice, workload):
        return self.seconds[choice.headroom]


@pytest.mark.parametrize(
    ("plain_rounds", "seconds", "number", "headroom"),
    [
        # One more round takes 0.4 of a layer. After two workloads the next one overflows with a probability of 1/4.
        (2, {None: 1.4, 1.25: 1.0, 2.0: 1.09}, 2, 2.0),
        (2, {None: 1.4, 1.25: 1.0, 2.0: 1.11}, 2, 1.25),
        (2, {None: 1.4, 1.25: 1.0, 2.0: 1.09}, 6, 1.25),
        # Loads without balancing fit.
        (1, {None: 1.4, 1.25: 1.0, 2.0: 1.0}, 2, 1.25),
    ],
    ids=["worth it", "too slow", "many workloads", "even loads"],
)
def test_a_larger_buffer_insures_against_rounds_of_unseen_loads(plain_rounds, seconds, number, headroom, monkeypatch):
    space, _ = everything(2)
    loads = drawn_workloads(MODEL, 4, 1.5, 1, [LoadShape.RANKS], number, 0)
    of_plain = space_module.judged(Choice(), Evaluator(MODEL, CLUSTER, Step()), loads[:1])

    def judged(choice, judge, workloads):
        return replace(of_plain, choice=choice, times_s=(seconds[choice.headroom],) * len(workloads))

    monkeypatch.setattr(space_module, "judged", judged)
    monkeypatch.setattr(space_module, "fits_in_memory", lambda judge, choice: True)
    judge, best = GivenTimes(plain_rounds, seconds), judged(Choice("exact", 1, headroom=1.25), None, loads)
    found = space_module._with_room(best, space, judge, loads) or best
    assert found.choice == Choice("exact", 1, headroom=headroom)


@pytest.mark.slow
def test_a_choice_of_several_rounds_is_tried_with_more_room():
    judge, (space, _) = Evaluator(MODEL, replace(CLUSTER, round_s=1.0), Step()), everything(0)
    load = drawn_workloads(MODEL, 4, 1.2, 1, [LoadShape.RANKS], 1, 0)[0]
    found = search(space, judge, [load], [load])
    assert judge.rounds(Choice(), load) == 2
    # One round suffices with the first of them.
    assert {one.headroom for one in found.glances if one.family == Choice()} == {None, 1.25}
    of_plain = {one: seconds for one, seconds in found.glances.items() if one.family == Choice()}
    assert min(of_plain, key=of_plain.__getitem__).headroom == 1.25


@pytest.mark.parametrize("recompute", [False, True])
def test_the_floor_takes_the_backward_pass_of_the_cluster(recompute):
    """A measured backward pass may take less than the operations say."""
    gemm = AnalyticGemm(1e9, 0.0, 0.0)
    load = drawn_workloads(MODEL, 4, 1.0, 1, [LoadShape.ZIPF], 1, 0)[0]
    judge = Evaluator(MODEL, replace(CLUSTER, gemm=gemm, backward_factor=1.5), Step(recompute=recompute))
    assert 0.9 < judge.floor_s(Choice(), load) / judge.glance(Choice(), load) <= 1


def test_the_floor_is_below_what_is_simulated_of_a_rank_with_few_tokens_and_a_slow_planner():
    load = drawn_workloads(MODEL, 4, 1.8, 1, [LoadShape.ZIPF], 1, 0)[0]
    choices = Choice(), Choice("feplb", 1), Choice("greedy", 1, domain_sizes=(2, 1))
    for counts, cluster in itertools.product((load.counts, load.counts // 8), (CLUSTER, SLOW)):
        judge, recorded = Evaluator(MODEL, cluster, Step()), replace(load, counts=counts)
        assert all(judge.floor_s(choice, recorded) <= judge.glance(choice, recorded) for choice in choices)


@pytest.mark.thorough
def test_floors_are_below_what_is_simulated(monkeypatch):
    monkeypatch.setattr(choice_module, "HEADROOMS", (None,))
    judge, (_, choices) = Evaluator(MODEL, CLUSTER, Step()), everything(1)
    load = drawn_workloads(MODEL, 4, 1.8, 1, [LoadShape.ZIPF], 1, 0)[0]
    floors = [judge.floor_s(choice, load) / judge.glance(choice, load) for choice in choices]
    assert 0.1 < max(floors) <= 1


def test_what_is_beside_a_choice_is_in_the_space():
    space, choices = everything(2)
    assert len(set(choices)) == len(choices)
    assert set(space.first()) <= set(choices)
    assert {other for choice in choices for other in space.near(choice)} <= set(choices)


@pytest.mark.slow
def test_code_makes_the_system_that_was_simulated():
    names = vars(jax_moe_lb) | {name: getattr(jax_moe_lb, name) for name in dir(jax_moe_lb)} | {"replace": replace}
    for choice in everything(1)[1]:
        assert eval(system_code(choice), dict(names)) == choice.build_system(), choice.name


@pytest.mark.slow
def test_flags_of_simulate_make_the_same_candidate():
    named = [choice for choice in everything(2)[1] if simulate_flags(choice)]
    assert {choice.system for choice in named} >= {"plain", "exact", "feplb"}
    for choice in named:
        flags = dict(zip(*[iter(simulate_flags(choice).split())] * 2, strict=True))
        slots = flags.get("--replica-slots")
        built = choice.build(MODEL, CLUSTER, Step())
        made = compose(flags["--system"], MODEL, CLUSTER, Step(), int(slots) if slots else None, built.migration)
        assert (made.system, made.migration) == (built.system, built.migration), choice.name


ONE_SLOT = "--system greedy:replica_slots=1"


@pytest.mark.parametrize(
    ("choice", "train"),
    [
        (Choice(), "--system plain"),
        (Choice(sprayed=True), None),
        (Choice("exact", 2, relayed=True, relocated=True), "--system two_tier:replica_slots=2 --mesh domain=2"),
        (Choice("exact", 2, headroom=1.25), "--system exact:replica_slots=2,headroom=1.25 --mesh domain=2"),
        (Choice("greedy", 1, relocated=True), f"{ONE_SLOT} --mesh domain=2 --set relocation.interval=50"),
        (Choice("exact", 2, eps=0.05), None),
        (Choice("exact", 2, domain_sizes=(2, 1)), None),
    ],
)
def test_flags_of_training(choice, train):
    assert train_flags(choice, CLUSTER) == train
    if train is None:
        return
    flags = dict(zip(*[iter(train.split())] * 2, strict=True))
    readers = {"--system": read_system, "--mesh": read_mesh, "--set": lambda text: read_assignments([text])}
    given = combined(*(readers[flag](text) for flag, text in flags.items()))
    made = make_system(ParallelConfig(expert_parallel=4, **given["parallel"]))
    assert replace(made, relocates=choice.relocated) == choice.build_system()


def test_load_shapes_with_equal_counts_are_one_workload():
    model = replace(MODEL, experts=4)
    alike = [drawn_workloads(model, 4, 1.5, 1, [shape], 1, 0)[0].counts for shape in ALIKE]
    assert all((one == alike[0]).all() for one in alike)
    names = [one.name for one in drawn_workloads(model, 4, 1.5, 1, list(LoadShape), 2, 0)]
    assert names == ["popular ranks, draw 1", "lognormal, draw 1", "popular ranks, draw 2", "lognormal, draw 2"]
    # Two experts per rank tell them apart.
    assert len(drawn_workloads(MODEL, 4, 1.5, 1, list(LoadShape), 1, 0)) == 4


def test_headroom_beyond_one_round_saves_no_time():
    judge = Evaluator(MODEL, replace(CLUSTER, levels=(Links("gpu", 4, 50e9),)), Step())
    load = drawn_workloads(MODEL, 4, 1.8, 1, [LoadShape.RANKS], 1, 0)[0]
    balanced, plain = Choice("exact", 2), Choice()
    roomy = [replace(choice, headroom=2.0) for choice in (balanced, plain)]
    assert [judge.least_headroom(choice, load) for choice in roomy] == roomy
    times = [judge.glance(choice, load) for choice in (balanced, plain)]
    # A balanced load has one round, that of plain two.
    assert [judge.least_headroom(choice, load) for choice in roomy] == [balanced, roomy[1]]
    assert judge.glance(roomy[0], load) >= times[0]
    assert judge.glance(roomy[1], load) <= times[1]


@pytest.mark.slow
def test_far_choices_are_not_simulated_further():
    judge = Evaluator(MODEL, CLUSTER, Step())
    loads = drawn_workloads(MODEL, 4, 1.8, 1, [LoadShape.RANKS, LoadShape.LOGNORMAL], 1, 0)
    found = search(Space(CLUSTER, 1, with_relocation=False), judge, loads, loads)
    limit = space_module.FAR * min(found.glances.values())
    explored = [replace(one.choice, headroom=None) for one in found.outcomes if one.choice != Choice()]
    assert all(found.glances[choice] <= limit for choice in explored)

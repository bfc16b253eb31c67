"""`advise` recommends choices that fit into memory, and names what makes a model fit if none does."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_moe_lb.advise.advise import advise
from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, drawn_workloads
from jax_moe_lb.advise.fit import expert_group, fits_in_memory, remedies
from jax_moe_lb.advise.search import Space
from jax_moe_lb.cli.advise import misfit_json
from jax_moe_lb.cli.app import app
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Peers, Step
from jax_moe_lb.sim.config import load_config, preset_names
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.model import Parallel

MODEL = ModelShape(layers=8, hidden=256, inner=512, experts=16, per_token=2, tokens=4096)
CLUSTER = Cluster((Links("node", 2, 1e9, 2, 1e-5), Links("gpu", 2, 50e9)), AnalyticGemm(1e12))
ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"jax-moe-lb advise ([a-z][a-z0-9_]+) ([a-z][a-z0-9_]+)")
PAIRS = list(itertools.product(preset_names("model"), preset_names("cluster")))


def judge_of(model, cluster):
    """Return the evaluator of two presets, as `advise` makes it."""
    shape = load_config("MODEL", model, "model").model.build()
    config = load_config("CLUSTER", cluster, "cluster")
    machine, step = expert_group(shape, config.cluster.build(), config.step.build())
    return Evaluator(step.parallel.share(shape, machine), machine, step)


def test_the_group_is_the_largest_that_divides_the_experts():
    group, step = expert_group(MODEL, CLUSTER, Step())
    assert (group, step) == (CLUSTER, Step())
    group, step = expert_group(replace(MODEL, experts=2), CLUSTER, Step())
    assert [level.size for level in group.levels] == [1, 2]
    # Each rank has a link of its own between nodes.
    assert step.parallel.data == Peers(2, 1e9, 1e-5)
    group, step = expert_group(replace(MODEL, experts=5, per_token=1), CLUSTER, Step())
    assert [level.size for level in group.levels] == [1, 1]
    given = Step(parallel=Parallel(data=Peers(3, 7e9)))
    assert expert_group(replace(MODEL, experts=2), CLUSTER, given)[1] == given
    odd = replace(CLUSTER, levels=(Links("gpu", 3, 50e9),))
    assert expert_group(MODEL, odd, Step()) == (odd, Step())


@pytest.mark.slow
def test_each_remedy_is_the_smallest_of_its_kind():
    # Parameters and their optimizer take most of the memory.
    model = replace(MODEL, layers=40, tokens=512)
    total = Evaluator(model, CLUSTER, Step()).memory(Choice()).total
    judge = Evaluator(model, replace(CLUSTER, memory_bytes=0.7 * total), Step())
    assert not fits_in_memory(judge, Choice())
    found = remedies(judge)
    assert all(fits_in_memory(one.judge, Choice()) for one in found)
    words = [one.what.split(":")[0] for one in found]
    assert words[0] == "4 members of level node in place of 2 (8 ranks)"
    assert words[1] == "2 pipeline stages, each such a cluster (8 ranks)"
    assert words[2] == "an optimizer state sharded over 2 groups"
    # Fewer tokens leave the parameters as they are.
    assert len(words) == 3
    # Three nodes would not divide the experts.
    assert found[0].judge.cluster.levels[0].size == 4
    assert remedies(replace(judge, cluster=replace(CLUSTER, memory_bytes=1.0))) == []


@pytest.mark.slow
def test_only_choices_that_fit_are_recommended():
    loads = drawn_workloads(MODEL, 4, 2.0, 1, [LoadShape.RANKS], 1, 0)
    judge = Evaluator(MODEL, replace(CLUSTER, memory_bytes=1e6), Step())
    space = Space(CLUSTER, 1, with_exact=False, with_relocation=False)
    with pytest.raises(ValueError, match=r"^no choice fits into memory: plain needs 0\.\d GB of 0\.0: weights"):
        advise(judge, space, loads, loads)


@pytest.mark.parametrize(("model", "cluster"), PAIRS)
@pytest.mark.slow
def test_all_presets_meet(model, cluster):
    """Every model runs on every cluster, or the smallest changes with which it would are known."""
    judge = judge_of(model, cluster)
    assert judge.model.experts % judge.cluster.num_ranks == 0
    if not fits_in_memory(judge, Choice()):
        assert remedies(judge), (model, cluster)


@pytest.mark.parametrize("cluster", preset_names("cluster"))
def test_the_model_of_a_preset_fits_its_cluster(cluster):
    assert fits_in_memory(judge_of(cluster, cluster), Choice())


def test_deepseek_v3_fits_one_preset_with_replicas_at_most_memory():
    judge = judge_of("deepseek_v3", "h200_16_nodes")
    for choice in (Choice(), Choice("exact", replica_slots=2)):
        assert 0.5 * judge.cluster.memory_bytes < judge.memory(choice).total
        assert fits_in_memory(judge, choice)


def test_every_pair_named_on_a_page_fits():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pairs = {pair for page in pages for pair in COMMAND.findall(page.read_text())}
    assert ("qwen3_235b", "h100_16_nodes") in pairs
    for pair in pairs:
        assert fits_in_memory(judge_of(*pair), Choice("exact", replica_slots=1)), pair


@pytest.mark.slow
def test_what_does_not_fit_is_said_first_and_exits_with_one():
    found = CliRunner().invoke(app, ["advise", "deepseek_v3", "h100_16_nodes"])
    assert found.exit_code == 1
    lines = found.stdout.splitlines()
    assert lines[0].startswith("Nothing fits: plain, the smallest choice, needs ")
    assert "It fits with 32 members of level node in place of 16 (256 ranks)." in lines
    assert not any(line.startswith("Use ") for line in lines)
    found = misfit_json(judge_of("deepseek_v3", "h100_16_nodes"))
    assert found["fits"] is False
    assert len(found["fits_with"]) >= 2


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "cluster"), PAIRS)
def test_advise_of_all_presets_fits_or_says_what_would(model, cluster):
    found = CliRunner().invoke(app, ["advise", model, cluster, "--imbalance", "1", "--replica-slots", "1", "--json"])
    said, judge = json.loads(found.stdout), judge_of(model, cluster)
    if found.exit_code:
        assert found.exit_code == 1
        assert said["fits_with"]
        return
    best = said["systems"][0]
    memory = judge.cluster.memory_bytes
    assert memory is None or best["memory_bytes"]["total"] <= memory
    assert said["best"] == best["system"]

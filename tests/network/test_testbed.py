"""Programs of the training testbed run and learn, without its links and quotas."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.network.testbed import CONFIG, DOMAIN_CASES, NUM_RANKS, Case, Program, domain_mesh
from benchmarks.network.training_runs import RUNS
from jax_moe_lb import Topology
from jax_moe_lb.planners import plan_relocation
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch

MODEL = dataclasses.replace(CONFIG.model, num_layers=1, embed_dim=32, mlp_dim=16)
SMALL = dataclasses.replace(CONFIG, model=MODEL, batch=BatchConfig(size=8, sequence_length=32))


def tokens_of(program: Program) -> jax.Array:
    return place_batch(default_corpus(100_000).batch(0, 1, 8, 32), program.mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*(pytest.param(RUNS[name], marks=pytest.mark.thorough) for name in ("exact", "plain + bias")), Case(None)],
    ids=["exact", "plain + bias", "without experts"],
)
def test_a_program_learns(case):
    none = np.zeros((1, NUM_RANKS, MODEL.num_experts), np.int32)
    program = Program(case, SMALL, make_mesh(SMALL.parallel), none)
    tokens = tokens_of(program)
    losses = [float(program.step(tokens)[0]) for _ in range(4)]
    assert losses[-1] < losses[0]
    program.states["own"] = program.initial(1 + SMALL.seed)
    assert float(program.step(tokens)[0]) != losses[0]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["two_tier", "hybridep"])
def test_a_program_on_two_domains_replays_counts(name):
    # Each of the 4 ranks has 64 tokens with 2 experts, most of them in the first domain.
    counts = np.broadcast_to(np.array([40, 40, 20, 12, 8, 4, 2, 2], np.int32), (1, NUM_RANKS, MODEL.num_experts))
    program = Program(DOMAIN_CASES[name], SMALL, domain_mesh(), counts)
    loads = counts[0].sum(0)
    at_home, size = loads, 2
    if name == "two_tier":
        places = plan_relocation(loads[None].astype(float), Topology.flat(NUM_RANKS, 2))
        program.relocate(places)
        at_home = loads[places[0]]
    else:
        # A rank of either domain serves the gathered experts for the tokens of its own domain.
        size = 4
    home = at_home.reshape(-1, size).sum(1)
    _, stats = program.step(tokens_of(program), [0.0])
    assert np.mean(stats.imbalance_before) == pytest.approx(home.max() / home.mean(), rel=1e-5)
    assert int(np.sum(stats.dropped)) == 0

"""Programs of the training testbed run and learn, without its links and quotas."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.network.testbed import CONFIG, NUM_RANKS, Case, Program
from benchmarks.network.training_runs import CASES, GATHERED, RUNS
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch
from tests.marks import parametrize

MODEL = dataclasses.replace(CONFIG.model, num_layers=1, embed_dim=32, mlp_dim=16)
SMALL = dataclasses.replace(CONFIG, model=MODEL, batch=BatchConfig(size=8, sequence_length=32))


def tokens_of(program: Program) -> jax.Array:
    return place_batch(default_corpus(100_000).batch(0, 1, 8, 32), program.mesh)


@pytest.mark.slow
@parametrize("case", [Case(None)], [RUNS["exact"], RUNS["plain + bias"]])
def test_a_program_learns(case):
    none = np.zeros((1, NUM_RANKS, MODEL.num_experts), np.int32)
    program = Program(case, SMALL, make_mesh(SMALL.parallel), none)
    tokens = tokens_of(program)
    losses = [float(program.step(tokens)[0]) for _ in range(4)]
    assert losses[-1] < losses[0]
    program.states["own"] = program.initial(1 + SMALL.seed)
    assert float(program.step(tokens)[0]) != losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["exact", GATHERED])
def test_a_program_replays_counts(name):
    # Each of the 4 ranks has 64 tokens with 2 experts, most of them on the first rank.
    counts = np.broadcast_to(np.array([40, 40, 20, 12, 8, 4, 2, 2], np.int32), (1, NUM_RANKS, MODEL.num_experts))
    program = Program(CASES[name], SMALL, make_mesh(SMALL.parallel), counts)
    # Every rank serves all experts of one domain for its own tokens, which are as many on each.
    before = 1.0 if name == GATHERED else 80 / 32
    _, stats = program.step(tokens_of(program), [0.0])
    assert np.mean(stats.imbalance_before) == pytest.approx(before, rel=1e-5)
    assert int(np.sum(stats.dropped)) == 0

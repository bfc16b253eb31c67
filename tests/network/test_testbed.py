"""Programs of the training testbed run and learn, without its links and quotas."""

import dataclasses

import numpy as np
import pytest

from benchmarks.network.testbed import CASES, CONFIG, NUM_RANKS, Case, Program
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*(pytest.param(CASES[name], marks=pytest.mark.thorough) for name in ("exact", "router bias")), Case(None)],
    ids=["exact", "router bias", "without experts"],
)
def test_a_program_learns(case):
    model = dataclasses.replace(CONFIG.model, num_layers=1, embed_dim=32, mlp_dim=16)
    config = dataclasses.replace(CONFIG, model=model, batch=BatchConfig(size=8, sequence_length=32))
    mesh, corpus = make_mesh(config.parallel), default_corpus(100_000)
    program = Program(case, config, mesh, np.zeros((1, NUM_RANKS, model.num_experts), np.int32))
    tokens = place_batch(corpus.batch(0, 1, 8, 32), mesh)
    losses = [float(program.step(tokens)[0]) for _ in range(4)]
    assert losses[-1] < losses[0]

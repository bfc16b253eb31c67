"""Relocation of experts between steps does not change training."""

import dataclasses
import shutil

import numpy as np
import pytest
from rich.console import Console

from models.config import RelocationConfig
from models.run_folder.metrics import RunFolder
from models.training.loop import execute, prepare
from tests.models.small import CONFIG, CORPUS, losses, run

pytestmark = pytest.mark.slow

MOVING = dataclasses.replace(
    CONFIG,
    parallel=dataclasses.replace(CONFIG.parallel, ranks_per_domain=4),
    relocation=RelocationConfig(interval=2, min_gain=0.0),
)


def by_expert(folder):
    """Return the loads of each step and layer, by expert."""
    with np.load(folder.counts) as arrays:
        loads = arrays["counts"].sum(2)
    for row in folder.rows("relocation"):
        later = slice(row["step"], None)
        homes = np.asarray(row["homes"])
        with np.load(folder.counts) as arrays:
            loads[later] = np.take_along_axis(arrays["counts"].sum(2)[later], homes[None], 2)
    return loads


@pytest.mark.thorough
def test_losses_do_not_change_and_a_resumed_run_finds_its_homes(trained_run, tmp_path):
    moving = RunFolder(tmp_path / "moving")
    run(MOVING, moving.path)
    stayed = RunFolder(trained_run)
    rows = moving.rows("relocation")
    assert rows[0]["step"] == 2
    assert all(row["experts_moved"] > 0 and row["bytes_moved"] % row["experts_moved"] == 0 for row in rows)
    np.testing.assert_allclose(losses(moving), losses(stayed), rtol=2e-5)
    # Equal up to a few tokens with nearly tied experts.
    assert np.abs(by_expert(moving) - by_expert(stayed)).sum() < 0.01 * by_expert(stayed).sum()

    killed = RunFolder(tmp_path / "killed")
    shutil.copytree(moving.path, killed.path)
    shutil.rmtree(killed.checkpoints / str(MOVING.steps))
    execute(prepare(MOVING, CORPUS, killed.path, resume=True), Console(quiet=True))
    assert losses(killed) == losses(moving)
    assert killed.rows("relocation") == rows
    with np.load(killed.counts) as resumed, np.load(moving.counts) as straight:
        np.testing.assert_array_equal(resumed["counts"], straight["counts"])

"""Every example runs in its own process and prints the expected output."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models import train
from tests.marks import parametrize
from tests.test_pages import refused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
BALANCED = r"1\.0\d"

PRINTED = {
    "quickstart": (r"plain +\d\.\d+ -> \d\.\d+ +[2-9] +0 KiB", rf"greedy +\d\.\d+ -> {BALANCED} +1 +[1-9]\d* KiB"),
    "own_balancer": (
        r"imbalance 1\.\d+ -> 1\.\d+",
        r"refused: plan\.quota of expert 3 sums to \d+ tokens; expected the \d+ of counts",
    ),
    "three_levels": (
        r"loss: plain (\d\.\d{5})\d -> (\d\.\d{5})\d, three levels \1\d -> \2\d",
        r"HybridEP: 48 KiB of experts",
        rf"Exact in dc 0: imbalance 1\.[4-9]\d -> {BALANCED}\n.*\nExact in dc 1: imbalance 1\.[4-9]\d -> {BALANCED}",
    ),
    "one_round": (r"skew 0\.0: one round, 1 needed, finite: True", r"skew 8\.0: a loop, [3-6] needed, finite: True"),
    "checkpoints": (r"8 ranks -> 1 x 16, difference (0e\+00|\de-0[6-9])", "exact: 8 ranks -> 2 x 4, difference "),
    "pipeline": (r"outputs differ by \de[-+]0\d of the largest, gradients by \de[-+]0\d",),
    "tune_chat": (
        r"validation loss 0\.\d+ nats/token",
        r'spider\? -> {"animal": "spider", "legs": 8}',
        r'owl\. -> {"animal": "owl", "legs": 2}',
    ),
    "replay_trace": (rf"mean +1\.[4-9]\d+ +{BALANCED}",),
}


@functools.cache
def run(example):
    # Use the checkout, whether or not the package is installed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@parametrize("example", ["own_balancer"], EXAMPLES)
def test_prints_what_it_promises(example):
    done = run(example)
    assert (done.returncode, done.stderr) == (0, "")
    for pattern in PRINTED[example]:
        assert re.search(pattern, done.stdout), done.stdout


@pytest.mark.thorough
def test_quickstart_systems_learn_the_same():
    losses = [float(loss) for loss in re.findall(r"\d\.\d{6}", run("quickstart").stdout)]
    before, after, before_balanced, after_balanced = losses
    assert after < before
    assert (before_balanced, after_balanced) == pytest.approx((before, after), abs=2e-5)


@pytest.mark.thorough
def test_three_levels_relieve_the_busiest_interface():
    rows = re.findall(r"busiest interface (\d+) -> (\d+) rows", run("three_levels").stdout)
    assert len(rows) == 2
    assert all(int(after) < int(before) for before, after in rows)


def launched(name, folder):
    """Return the options of `models.train` in a launch example of several machines."""
    path = ROOT / "examples" / "cluster" / name
    if path.suffix == ".yaml":
        [words] = re.findall(r"exec python -m models\.train (.*?)\n +resources:", path.read_text(), re.DOTALL)
        return words.split()
    # A stand-in for Slurm prints the arguments.
    (folder / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "srun").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RUN_DIR": str(folder / "run")}
    done = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    return words[words.index("models.train") + 1 :]


@pytest.mark.parametrize("name", ["slurm.sbatch", "jobset.yaml"])
def test_one_command_starts_and_continues_a_job(name, tmp_path):
    """An incomplete checkpoint is none, so the command does not depend on the files of the folder."""
    fresh = launched(name, tmp_path)
    (tmp_path / "run" / "checkpoint" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    assert launched(name, tmp_path) == fresh
    assert "--resume=auto" in fresh
    assert refused(train.app, fresh) is None


@pytest.mark.parametrize("example", EXAMPLES)
def test_is_short(example):
    assert len((ROOT / "examples" / f"{example}.py").read_text().splitlines()) < 60

"""Checks of claims about GPUs: outcomes are honest, kept, and continued; `ci/gpu.sh` runs the checks themselves."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.gpu import runner as gpu
from benchmarks.gpu import worker
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.findings import DRY_RUN_FAILED, FALSE, NOT_REACHED, TRUE, Claim, Finding, Row, read_rows, write_row
from benchmarks.render.results import Table, load

ROOT = Path(__file__).parents[2]


def row(claim, outcome=TRUE, run="before"):
    return Row(claim, outcome, "found", 1.0, "1 x H100", "", run)


def test_every_claim_is_listed_once_with_an_existing_source():
    claims = [claim for part in PARTS.values() for claim in part]
    assert len({claim.name for claim in claims}) == len({claim.text for claim in claims}) == len(claims)
    assert not {claim.source for claim in claims if not (ROOT / claim.source).is_file()}
    assert not set(PARTS) & {claim.name for claim in claims}


@pytest.mark.parametrize(("holds", "outcome"), [(True, TRUE), (False, FALSE), (None, NOT_REACHED)])
def test_a_claim_is_reached_on_a_gpu_alone(holds, outcome):
    assert worker.outcome_of(Finding(holds, "12 us"), "cpu") == (NOT_REACHED, "on cpu: 12 us")
    assert worker.outcome_of(Finding(holds, "12 us"), "gpu")[0] == outcome


def test_a_second_run_checks_unreached_claims_and_those_asked_for(tmp_path):
    path = tmp_path / "copies.json"
    names = [claim.name for claim in PARTS["copies"]]
    write_row(path, row(names[0]))
    write_row(path, row(names[1], FALSE))
    write_row(path, row(names[2], NOT_REACHED))
    assert gpu.remaining("copies", path, []) == names[2:]
    assert gpu.remaining("copies", path, [names[1]]) == names[1:]
    assert gpu.remaining("copies", path, ["copies"]) == names


def test_a_claim_keeps_the_outcomes_and_tables_of_others(tmp_path):
    path = tmp_path / "gpu" / "kernels.json"
    write_row(path, row("rates"), Table({"us": ".0f"}, [[12.0]]))
    write_row(path, row("planner-time", FALSE))
    assert [one.outcome for one in read_rows(path).values()] == [TRUE, FALSE]
    assert load(path)["rates"].rows == [[12.0]]


def fake_start(path, script):
    """Return a `start` whose workers do what the script says for each of their claims."""

    def start(arguments, limit_s):
        names, run = arguments[2 : arguments.index("--run")], arguments[arguments.index("--run") + 1]
        for name in names:
            write_row(path, Row(name, NOT_REACHED, worker.RUNNING, 0.0, "", "", run))
            match script[name]:
                case "dies":
                    return -11
                case "hangs":
                    return None
            write_row(path, row(name, FALSE if script[name] == "raises" else TRUE, run))
            if script[name] == "raises":
                return 0
        return 0

    return start


@pytest.mark.parametrize(
    ("script", "outcomes", "found"),
    [
        (("ends", "dies", "raises", "ends"), [TRUE, FALSE, FALSE, TRUE], "the check ended its process with status -11"),
        (("ends", "hangs", "ends"), [TRUE, NOT_REACHED, NOT_REACHED], "limit of 480 s"),
    ],
    ids=["after a crash the next one runs", "after the limit they keep their turn"],
)
def test_every_claim_of_a_part_has_an_outcome(tmp_path, monkeypatch, script, outcomes, found):
    path, script = tmp_path / "copies.json", dict(zip("abcd", script, strict=False))
    monkeypatch.setattr(gpu, "start", fake_start(path, script))
    gpu.run_part("copies", list(script), path, dry_run=False)
    rows = read_rows(path)
    assert [one.outcome for one in rows.values()] == outcomes
    assert found in rows["b"].found


def test_a_check_is_tried_again_without_the_work_that_ended_it(tmp_path, monkeypatch):
    path, script, marks = tmp_path / "products.json", {"a": "ends", "b": "dies", "c": "ends"}, []

    def start(arguments, limit_s, fake=fake_start(path, script)):
        status = fake(arguments, limit_s)
        if status == -11:
            script["b"] = "ends"
            marks.append("a kernel")
        return status

    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr(gpu.once, "marks", lambda: frozenset(marks))
    gpu.run_part("products", list(script), path, dry_run=False)
    assert [one.outcome for one in read_rows(path).values()] == [TRUE, TRUE, TRUE]


def test_work_at_the_limit_is_not_marked(tmp_path, monkeypatch):
    folder = tmp_path / "running"
    monkeypatch.setattr(gpu.once, "FOLDER", folder)

    def start(arguments, limit_s):
        for name in ("product-Triton-kernel", "load-a"):
            (folder / name).touch()

    folder.mkdir()
    (folder / "outer-Hopper-kernel").touch()
    monkeypatch.setattr(gpu, "start", start)
    gpu.run_part("products", ["a"], tmp_path / "products.json", dry_run=False)
    assert gpu.once.marks() == {"outer-Hopper-kernel", "load-a"}


def test_a_part_that_cannot_start_ends(tmp_path, monkeypatch):
    path = tmp_path / "copies.json"
    monkeypatch.setattr(gpu, "start", lambda arguments, limit_s: 1)
    gpu.run_part("copies", ["a", "b"], path, dry_run=True)
    assert all(one.found.startswith(DRY_RUN_FAILED) for one in read_rows(path).values())


def test_a_worker_and_its_processes_are_stopped_at_the_limit(tmp_path, monkeypatch):
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child\nwait\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    assert gpu.start([], 2.0) is None
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    # A killed process ends when it is next scheduled, and its new parent need not collect it.
    deadline = time.monotonic() + 10.0
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(child)


def test_a_killed_worker_that_does_not_end_is_left(monkeypatch):
    worker = Mock(pid=12, wait=Mock(side_effect=subprocess.TimeoutExpired("worker", 1.0)))
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda *_, **__: worker)
    monkeypatch.setattr(gpu.os, "killpg", Mock(side_effect=ProcessLookupError))
    assert gpu.start([], 2.0) is None


def has_ended(stat: Path) -> bool:
    """True if the process of a `/proc/PID/stat` was killed, and collected or not."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_raising_check_is_false_on_a_gpu_and_fails_a_dry_run(tmp_path, monkeypatch):
    def raises(scale):
        raise AssertionError("values differ")

    claim = Claim("copies", "Copies are exact", "README.md", raises)
    for backend, outcome, found in (
        ("gpu", FALSE, "AssertionError: values differ"),
        ("cpu", NOT_REACHED, f"{DRY_RUN_FAILED}AssertionError: values differ"),
    ):
        monkeypatch.setattr(worker.jax, "default_backend", lambda backend=backend: backend)
        assert not worker.check(claim, tmp_path / "copies.json", "now", worker.Scale(True))
        (stored,) = read_rows(tmp_path / "copies.json").values()
        assert (stored.outcome, stored.found) == (outcome, found)


@pytest.mark.thorough
def test_a_dry_run_ends_with_a_table_and_leaves_no_file():
    before = sorted(ROOT.glob("benchmarks/results/**/*.json"))
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--parts", "training"]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=True)
    claims = sum(map(len, PARTS.values()))
    assert ended.stdout.endswith(f"0 true, 0 false, {claims} not reached\n")
    assert sorted(ROOT.glob("benchmarks/results/**/*.json")) == before

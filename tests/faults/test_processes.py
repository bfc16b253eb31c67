"""Processes name a killed or stopped one; `python -m tests.faults.processes` makes more tries."""

import json
import subprocess
import sys

import pytest

from tests.faults.workers import ROOT

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("kind", "number", "tries"), [("kills", 2, 2), ("kills", 4, 2), ("stalls", 2, 3)])
def test_a_killed_or_stopped_process_is_named_by_all_others(kind, number, tries):
    """A stopped one continues; the third stop is of a training run, whose losses stay the same."""
    # In a process of its own, which forks without threads.
    command = [sys.executable, "-m", "tests.faults.processes", kind, str(number), str(tries)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in output.splitlines()]
    assert [one["faults"] for one in found] == [[]] * tries
    assert {one["processes"] for one in found} == {number}

"""Processes name one of them that is killed; `python -m tests.faults.processes` makes more tries."""

import json
import subprocess
import sys

import pytest

from tests.faults.workers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("number", [2, 4])
def test_a_killed_process_is_named_by_all_others(number):
    # In a process of its own, which forks without threads.
    command = [sys.executable, "-m", "tests.faults.processes", "kills", str(number), "2"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tries = [json.loads(line) for line in output.splitlines()]
    assert [one["faults"] for one in tries] == [[], []]
    assert {one["processes"] for one in tries} == {number}

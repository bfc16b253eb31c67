"""Runner of test programs in a sandbox."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import sandbox

ROOT = Path(__file__).parents[2]


def needs_sandbox():
    """Skip if no sandbox is possible, with the failed step."""
    if sandbox.missing():
        pytest.skip(sandbox.missing())


def command(name, *arguments):
    return [sys.executable, "-m", "tests.network.programs", name, *arguments]


def run(name, timeout_s=60):
    """Return the result of the program."""
    needs_sandbox()
    program = sandbox.bound_to_parent(command(name))
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])

"""The program of docs/networks.md runs unchanged."""

import re
import subprocess
import sys

import pytest

from benchmarks.network import sandbox
from tests.network.sandboxed import ROOT, needs_sandbox


@pytest.mark.thorough
@pytest.mark.netns
def test_the_program_of_the_page_runs():
    needs_sandbox()
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/networks.md").read_text(), re.DOTALL).group(1)
    command = sandbox.bound_to_parent([sys.executable, "-c", program])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'10.99.") == 2 * 4  # the addresses of all ranks of two nodes

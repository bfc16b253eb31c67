"""The README's example runs unchanged, and its links and paths exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_example_runs_and_balances():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    before, after = map(float, re.search(r"imbalance ([\d.]+) -> ([\d.]+), rounds 1", run.stdout).groups())
    assert after < 1.05 < before
    assert code.count("\n") <= 20


def test_every_link_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_place_in_the_tree_exists():
    tree = README.split("## The tree")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "jax_moe_lb" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name

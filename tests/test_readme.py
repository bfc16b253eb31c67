"""The README's example and commands run as shown; it has at most 90 lines."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jax_moe_lb import systems
from tests.marks import parametrize
from tests.page_blocks import blocks, run_alone, same_output

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.slow
def test_the_example_runs_and_balances(tmp_path):
    (block,) = blocks(README)
    printed = run_alone(block, tmp_path)
    assert same_output(printed, block.output), printed
    before, after = map(float, re.search(r"\[([\d.]+)\] -> \[([\d.]+)\] \[1\]", printed).groups())
    assert after < 1.05 < before
    lines = [line for line in block.code.splitlines() if line]
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80


def test_a_reader_finishes_it_in_two_minutes():
    assert len(README.read_text().splitlines()) <= 90


def test_the_table_names_systems():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| [`")]
    named = {name for row in rows for name in re.findall(r"\[`(\w+)`\]", row.split("|")[1])}
    assert len(rows) == len(named) == 5
    assert named < set(systems.__all__) - {"System", "system_named", "system_names"}


def test_the_pictures_exist():
    pictures = re.findall(r'(?:src|srcset)="(.+?)"', README.read_text())
    assert len(pictures) == 2
    assert all((ROOT / picture).exists() for picture in pictures)


COMMANDS = re.findall(r"^(jax-moe-lb .*?)(?: +#.*)?$", README.read_text(), re.MULTILINE)


@pytest.mark.slow
@parametrize("command", [one for one in COMMANDS if " plan " in one], COMMANDS)
def test_a_command_line_runs_in_a_checkout(command):
    program = [sys.executable, "-m", "jax_moe_lb.cli", *shlex.split(command)[1:]]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_there_are_three_command_lines():
    assert len(COMMANDS) == 3


def test_every_link_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_place_in_the_tree_exists():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("```")[1]
    for line in tree.strip().splitlines():
        folder = ROOT / "jax_moe_lb" if line.startswith("  ") else ROOT
        assert (folder / line.split()[0]).exists(), line

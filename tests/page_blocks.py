"""Blocks of Python in pages, run as a reader runs them: alone, in an empty folder, in a fresh process."""

import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```output\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

IN_A_CHECKOUT = {"models"}
"""Pages whose blocks import `models`, which is not installed: they run with the checkout on the path."""


@dataclass(frozen=True)
class Block:
    """A block of Python of a page.

    Args:
        page: the file.
        number: 0 for the first block of the page.
        code: the program.
        output: the text of the `output` fence after the block; `None` without one.
    """

    page: Path
    number: int
    code: str
    output: str | None

    @property
    def name(self) -> str:
        """Name of the page and number of the block."""
        return f"{self.page.stem}-{self.number}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of Python of a page, in order."""
    found = BLOCK.findall(page.read_text())
    return [Block(page, number, code, output or None) for number, (code, output) in enumerate(found)]


def run_alone(block: Block, folder: Path) -> str:
    """Run a block in an empty folder and a process with one CPU device; return the printed text.

    The process shares the cache of compiled programs with the tests.
    """
    assert not list(folder.iterdir())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if block.page.stem in IN_A_CHECKOUT:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-"],
        input=block.code,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block.page}, block {block.number}:\n{done.stderr}"
    return done.stdout


def same_output(printed: str, shown: str) -> bool:
    """Return whether two texts differ at most by spaces and, in their numbers, by rounding.

    Results differ in the last digits between versions of JAX: numbers may differ by 3 % or 0.015.
    """
    if NUMBER.sub("0", printed).split() != NUMBER.sub("0", shown).split():
        return False
    numbers = [[float(one) for one in NUMBER.findall(text)] for text in (printed, shown)]
    return all(math.isclose(a, b, rel_tol=0.03, abs_tol=0.015) for a, b in zip(*numbers, strict=True))

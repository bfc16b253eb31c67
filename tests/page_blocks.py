"""Blocks of Python in pages, run as a reader runs them: alone, in an empty folder, in a fresh process.

`python tests/page_blocks.py NEEDS PAGE...` runs the blocks with exactly these needs, such as "a checkout", in the
environment of this Python. Empty needs select the blocks that run after `pip install .`, and `--first` the first such
block of a page.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^(?:Needs ([^\n]+)\.\n\n)?```python\n(.*?)^```$(?:\n\n```output\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

CHECKOUT = "a checkout"
ELSEWHERE = {
    "`pip install '.[cuda]'`": "ci/accelerators.sh",
    "network namespaces": "tests/network/test_page.py",
    "Tunix": "ci/adoption.sh",
    "MaxText": "ci/adoption.sh",
    "EasyDeL": "ci/adoption.sh",
    "the files of the recipe": "tests/parity/recipe.py",
}
"""Needs beyond the environment of these tests, and the files that run their blocks."""


@dataclass(frozen=True)
class Block:
    """A block of Python of a page.

    Args:
        page: the file.
        number: 0 for the first block of the page.
        needs: the sentence `Needs ... and ....` directly before the block: requirements beyond `pip install .`.
        code: the program.
        output: the text of the `output` fence after the block; `None` without one.
    """

    page: Path
    number: int
    needs: tuple[str, ...]
    code: str
    output: str | None

    @property
    def name(self) -> str:
        """Name of the page and number of the block."""
        return f"{self.page.stem}-{self.number}"

    @property
    def requirements(self) -> set[str]:
        """Installed packages of the reader."""
        commands = [need for need in self.needs if need.startswith("`pip install ")]
        words = {word.strip("'") for command in commands for word in command.strip("`").split()[2:]}
        return {"jax_moe_lb"} | {re.sub(r"^\.", "jax_moe_lb", word) for word in words}


def blocks(page: Path) -> list[Block]:
    """Return the blocks of Python of a page, in order."""
    return [
        Block(page, number, tuple(filter(None, needs.split(" and "))), code, output or None)
        for number, (needs, code, output) in enumerate(BLOCK.findall(page.read_text()))
    ]


def run_alone(block: Block, folder: Path, *path: Path) -> str:
    """Run a block in an empty folder and a process with one CPU device; return the printed text.

    The process shares the cache of compiled programs with the tests. `path` has further folders of modules.
    """
    assert not list(folder.iterdir())
    places = (*map(str, path), *([str(ROOT)] if CHECKOUT in block.needs else []), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [sys.executable, "-"],
        input=block.code,
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, places))},
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


def main(needs: str, pages: list[Path], only_first: bool) -> int:
    """Run the blocks with these needs; return the number of failures."""
    failed = 0
    chosen = [block for page in pages for block in blocks(page) if " and ".join(block.needs).replace("`", "") == needs]
    if only_first:
        chosen = list({block.page: block for block in reversed(chosen)}.values())[::-1]
    assert chosen, f"no block of {pages} needs {needs!r}"
    for block in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                printed = run_alone(block, Path(folder))
                assert block.output is None or same_output(printed, block.output), f"unexpected output:\n{printed}"
                print(f"{block.name}: {' '.join(printed.split())}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{block.name} failed: {error}", flush=True)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("needs")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--first", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.needs, given.pages, given.first) > 0)

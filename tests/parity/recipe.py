"""Run the page `docs/how-to/recipe.md` in an empty folder: `python -m tests.parity.recipe .venv/bin/python`.

The argument is the Python for all but `transformers`: planners are slow in an environment without binaries.
The answers of `models.generate` and `transformers` are equal, with the reasoning and the tool call that were learned.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "recipe.md"
LEARNED = re.compile(
    r'<think>Look it up\.</think>\{"name": "legs", "arguments": \{"animal": "(\w+)"\}\}\nIt has \d\.\n?'
)


def run(command: list[str], folder: Path) -> str:
    """Run a command in the folder, and return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main(folder: Path, trainer: str) -> None:
    """Run the blocks of the page in order, and compare the answers."""
    printed = {"": "", "python": ""}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        lines = [["python", "-c", block]] if language else map(shlex.split, block.splitlines())
        for line in lines:
            python = sys.executable if "from transformers" in block else trainer
            output = run([python, *line[1:]], folder)
            printed[language] += "" if "models.train" in line else output
    print(printed[""])
    assert printed[""] == printed["python"], printed
    assert LEARNED.fullmatch(printed[""]), printed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), str(Path(sys.argv[1]).absolute()))

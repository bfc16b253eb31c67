"""Interrupt training at random times, and let two runs write into one folder.

`python -m tests.faults.stops interrupts 200` and `python -m tests.faults.stops writers 200` print one JSON object per
try.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.run import Faults, result

PER_RUN = 5
"""Interrupts of a run before it may end."""


def interrupts(number: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Interrupt runs and resume them; yield the faults of each interrupt, one line each."""
    generator = random.Random(seed)
    with Faults(folder) as faults:
        expected, seconds = straight(faults)
        for at in range(number):
            if at % PER_RUN == 0:
                faults.clear()
            ((code, lines),) = faults.commands("train", 1, generator.uniform(0, seconds))
            found = [] if code in (0, 130) and len(lines) <= 1 else [f"exit code {code}: {' '.join(lines)[-300:]}"]
            if at % PER_RUN == PER_RUN - 1:
                found += wrong_end(faults, expected)
            yield found


def writers(number: int, folder: Path) -> Iterator[list[str]]:
    """Start two runs in one folder; yield the faults of each try, one line each."""
    with Faults(folder) as faults:
        expected, _ = straight(faults)
        for _ in range(number):
            faults.clear()
            both = sorted(faults.commands("train", 2))
            codes, lines = [code for code, _ in both], both[1][1]
            # The second run may start after the end of the first, and then has nothing left to do.
            refused = len(lines) == 1 and "another training run uses" in lines[0]
            found = [] if codes == [0, 0] or (codes == [0, 2] and refused) else [f"exit codes {codes}: {lines}"]
            if result("train", faults.files) != expected:
                found.append("the result differs")
            yield found


def straight(faults: Faults) -> tuple[object, float]:
    """Train without a fault; return the losses, and the seconds of a run with compiled programs."""
    for _ in range(2):
        faults.clear()
        began = time.monotonic()
        code, lines = faults.run("train")
        assert code == 0, lines
    return result("train", faults.files), time.monotonic() - began


def wrong_end(faults: Faults, expected: object) -> list[str]:
    """Finish a run; return one line if its losses differ."""
    code, lines = faults.run("train")
    if code:
        return [f"the last command ends with exit code {code}: {' '.join(lines)[-300:]}"]
    return [] if result("train", faults.files) == expected else ["the losses differ"]


def main(kind: str, number: int, seed: int = 0) -> None:
    """Print the results."""
    with tempfile.TemporaryDirectory() as folder:
        # Two writers need no seed.
        tries = interrupts(number, seed, Path(folder)) if kind == "interrupts" else writers(number, Path(folder))
        for found in tries:
            print(json.dumps({"path": kind, "faults": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

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

from tests.faults.run import result
from tests.faults.workers import Faults

PER_RUN = 5
"""Maximum number of interrupts of a run."""


def interrupts(number: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Interrupt runs and resume them; yield the faults of each interrupt, one line each."""
    generator = random.Random(seed)
    with Faults(folder) as faults:
        expected, seconds = straight(faults)
        faults.clear()
        for at in range(1, number + 1):
            code, lines = faults.interrupted("train", generator.uniform(0, seconds))
            found = [] if code in (0, 130) and len(lines) <= 1 else [f"exit code {code}: {' '.join(lines)[-300:]}"]
            if code == 0 or at % PER_RUN == 0:
                found += wrong_end(faults, expected)
                faults.clear()
            yield found


def writers(number: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Start two runs in one folder, at once or one after the other; yield the faults of each try, one line each."""
    generator = random.Random(seed)
    with Faults(folder) as faults:
        expected, seconds = straight(faults)
        faults.run_two("train")
        for _ in range(number):
            faults.clear()
            both = sorted(faults.run_two("train", max(0.0, generator.uniform(-seconds, seconds))))
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
        tries = {"interrupts": interrupts, "writers": writers}[kind](number, seed, Path(folder))
        for found in tries:
            print(json.dumps({"path": kind, "faults": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

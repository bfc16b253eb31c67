"""Read mutated files in one process under a limit of its address space.

`python -m tests.fuzz.worker SEED FIRST LAST FOLDER` reads the files from index FIRST to LAST in an empty folder. It
prints one JSON object per file: its index, kind, outcome and detail.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

from models.console import UserError
from tests.fuzz.kinds import KINDS, Kind, digest
from tests.fuzz.mutations import mutated

MOST_S, MOST_BYTES, MOST_CHARACTERS = 5.0, 2**30, 1000
"""CPU seconds and bytes for reading one file, and characters of a message."""

SAME, LEGAL, REFUSED = "same data", "other legal data", "refused in one line"
HELD = (SAME, LEGAL, REFUSED)


class Sample:
    """Folder with a valid input of one kind.

    Args:
        kind: the kind.
        folder: an absent folder.
    """

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        folder.mkdir()
        kind.write(folder)
        self.paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.contents = [path.read_bytes() for path in self.paths]
        self.valid = digest(kind.read(folder))

    def outcome(self, number: int, content: bytes) -> tuple[str, str]:
        """Read the folder with another content of one file, and return outcome and detail."""
        path = self.paths[number]
        path.write_bytes(content)
        began = time.process_time()
        try:
            outcome, detail = self._read()
        finally:
            seconds = time.process_time() - began
            path.write_bytes(self.contents[number])
        return ("slow", f"{seconds:.1f} s") if seconds > MOST_S else (outcome, detail)

    def _read(self) -> tuple[str, str]:
        try:
            value = self.kind.read(self.folder)
            found = digest(value)
        except (ValueError, UserError) as error:
            message = str(error)
            names = [self.folder.name, *(path.name for path in self.paths)]
            bad = "\n" in message or len(message) > MOST_CHARACTERS or not any(name in message for name in names)
            kind = f"{type(error).__name__}: {message[:300]}" if bad else message
            return ("message" if bad else REFUSED), kind
        except BaseException as error:  # Rust raises panics as BaseException
            return type(error).__name__, str(error)[:300]
        if found == self.valid:
            return SAME, ""
        return (LEGAL, "") if self.kind.legal(value) else ("illegal value", repr(value)[:300])


def kind_of(seed: int, index: int) -> str:
    return random.Random(f"{seed}-{index}").choice(list(KINDS))


def case(seed: int, index: int, samples: dict[str, Sample]) -> tuple[str, int, bytes]:
    """Return kind, number of the file and content of one case."""
    rng = random.Random(f"{seed}-{index}")
    kind = rng.choice(list(samples))
    other = rng.choice(list(samples))
    number = rng.randrange(len(samples[kind].paths))
    return kind, number, mutated(rng, samples[kind].contents[number], rng.choice(samples[other].contents))


def limit_memory() -> None:
    """Limit the address space to its present size and `MOST_BYTES`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES,) * 2)


def main(seed: int, first: int, last: int, folder: Path) -> None:
    samples = {name: Sample(kind, folder / f"sample{i}") for i, (name, kind) in enumerate(KINDS.items())}
    limit_memory()
    for index in range(first, last):
        kind, number, content = case(seed, index, samples)
        outcome, detail = samples[kind].outcome(number, content)
        print(json.dumps({"index": index, "kind": kind, "outcome": outcome, "detail": detail}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))

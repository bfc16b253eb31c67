"""Supervisor of the workers: restarts a worker ended by a file, and records the file as a failure."""

import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.worker import HELD, kind_of

ROOT = Path(__file__).parents[2]

HANG_S = 120.0
"""Seconds without a result after which a worker is killed; the limit per file is in CPU seconds."""


class Result(NamedTuple):
    """Result of reading one mutated file.

    Args:
        index: index of the file; with the seed, it determines the mutation.
        kind: kind of the file.
        outcome: one of `HELD`, or the name of a failure.
        detail: message of the reader, or the last line of a worker that ended.
    """

    index: int
    kind: str
    outcome: str
    detail: str


def fuzzed(seed: int, number: int, num_workers: int = 1) -> list[Result]:
    """Mutate and read `number` files in worker processes, and return the results in order."""
    bounds = [number * i // num_workers for i in range(num_workers + 1)]
    with ThreadPoolExecutor(num_workers) as pool:
        parts = pool.map(lambda ends: list(_read(seed, *ends)), itertools.pairwise(bounds))
        return [result for part in parts for result in part]


def failures(results: list[Result]) -> list[Result]:
    return [result for result in results if result.outcome not in HELD]


def by_kind(results: list[Result]) -> dict[str, Counter[str]]:
    """Return the number of each outcome by kind of file."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.kind, Counter())[result.outcome] += 1
    return counts


def _read(seed: int, first: int, last: int) -> Iterator[Result]:
    while first < last:
        begun = first
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, tempfile.TemporaryFile() as errors:
            command = [sys.executable, "-m", "tests.fuzz.worker", str(seed), str(first), str(last), folder]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
            for line in _lines(process):
                yield (result := Result(**json.loads(line)))
                first = result.index + 1
            errors.seek(0)
            last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        if first < last:
            if first == begun and process.returncode == 1:
                raise RuntimeError(f"a worker did not start: {last_line}")
            yield Result(first, kind_of(seed, first), f"exit code {process.returncode}", last_line)
            first += 1


def _lines(process: subprocess.Popen) -> Iterator[str]:
    """Yield the lines of a worker, and kill it if it prints none for `HANG_S`."""
    assert process.stdout is not None
    with process.stdout as lines:
        while True:
            timer = threading.Timer(HANG_S, process.kill)
            timer.start()
            line = lines.readline()
            timer.cancel()
            if not line:
                break
            yield line
    process.wait()

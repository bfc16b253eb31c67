"""Mutate the C++ of transports and of kernels, and list the mutants that no test detects.

    python ci/mutants.py BUILD_FOLDER [--files GLOB ...] [--sample N] [--seed S] [--out FILE]

BUILD_FOLDER is a CMake build of this checkout with tests. Each mutant changes one line of a file in place, builds the
tests that see the file, and runs them until one fails. The file is then restored. A second run continues the list in
`--out`. Run no other build of the checkout meanwhile.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

STAND_IN = ("stand_in_faults_test", "stand_in_runs_test", "processes_test", "left_out_between_test")
TESTS = {
    "ffi/planning/device/*.h": ("edit_block_test", "exact_block_test"),
    "ffi/transport/*_cuda.cc": STAND_IN,
    "ffi/common/*_cuda.cc": STAND_IN,
    "ffi/transport/exchange*.cc": ("exchange_test", "fuzz_exchange_test"),
    "ffi/transport/rendezvous.*": ("rendezvous_test",),
    "ffi/transport/peer_*.cc": (
        "peer_copies_test",
        "peer_rows_test",
        "peer_runner_test",
        "peer_tickets_test",
        "fuzz_peers_test",
    ),
}
"""Tests that see the files of a pattern, the fastest first. The first pattern of a file holds."""

TEST_S, BUILD_S = 300, 900
"""Time limits of a test and of a build, in seconds. A test that exceeds its limit detects the mutant: it hangs."""

SURVIVED, NOT_BUILT = "survived", "does not build"

Operator = tuple[re.Pattern[str], str]
OPERATORS: dict[str, Operator] = {
    "drop a wait": (re.compile(r"^\s*(MOE_LB_CUDA\(cuda\w*(Wait|Synchronize)\w*\(.*\)\);|wait\(.*\);)$"), ""),
    "drop a record": (re.compile(r"^\s*MOE_LB_CUDA\(cudaEventRecord\(.*\)\);$"), ""),
    "drop a barrier": (re.compile(r"\bt_?\.Sync(Warp|Block)\(\);"), ";"),
    "drop a device switch": (re.compile(r"^.*\bcudaSetDevice\(.*\);$"), ""),
    "drop a close": (
        re.compile(r"^\s*(static_cast<void>\((driver\.(release|unmap|free_address)|cudaIpcClose).*|close\(.*)$"),
        "",
    ),
    "drop a store": (re.compile(r"^\s*[\w.>-]+\.store\(.*\);$"), ""),
    "drop a refusal": (re.compile(r"^\s*if \(.*\) (return (Refuse|Problem)\(.*|continue;|break;)$"), ""),
    "< to <=": (re.compile(r" < "), " <= "),
    "<= to <": (re.compile(r" <= "), " < "),
    "> to >=": (re.compile(r" > "), " >= "),
    ">= to >": (re.compile(r" >= "), " > "),
    "+ 1 to nothing": (re.compile(r" \+ 1\b(?!\.)"), ""),
    "task to task + 1": (re.compile(r"\btask\b(?=[),;])"), "task + 1"),
}
"""Pattern of the mutated text, and the text that replaces it."""


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Args:
        file: path in the checkout.
        line: number of the line, from 1.
        operator: key of `OPERATORS`.
        before: the line.
        after: the changed line.
        outcome: the test that detects it, `SURVIVED` or `NOT_BUILT`; empty before it has run.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    outcome: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Identity, also after other lines were added to the file."""
        return self.file, self.operator, self.before, self.after


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a file; comments and directives are left alone."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        if not code.strip() or code.lstrip().startswith(("#", "template", "static_assert")):
            continue
        for operator, (pattern, replacement) in OPERATORS.items():
            for match in pattern.finditer(code):
                changed = code[: match.start()] + replacement + code[match.end() :]
                found.append(Mutant(file, number, operator, line, changed))
    return found


def tests_of(file: str) -> tuple[str, ...]:
    """Return the tests that see a file; none for files of no pattern."""
    return next((tests for pattern, tests in TESTS.items() if Path(file).match(pattern)), ())


def _run(command: list[str], limit_s: float) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=limit_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def outcome_of(mutant: Mutant, build: Path) -> str:
    """Build and run the tests of a mutant in place."""
    path, tests = Path(mutant.file), tests_of(mutant.file)
    original = path.read_text()
    lines = original.splitlines()
    lines[mutant.line - 1] = mutant.after
    try:
        path.write_text("\n".join(lines) + "\n")
        if not _run(["cmake", "--build", str(build), "--target", *tests], BUILD_S):
            return NOT_BUILT
        return next((test for test in tests if not _run([str(build / test)], TEST_S)), SURVIVED)
    finally:
        path.write_text(original)


def main() -> int:
    """Run the mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--files", nargs="+", default=list(TESTS), metavar="GLOB", help="files to mutate")
    parser.add_argument("--sample", type=int, help="number of mutants; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--out", type=Path, default=Path("build/mutants_cpp.json"))
    parser.add_argument("--list", action="store_true", help="print the mutants without running them")
    given = parser.parse_args()
    files = sorted({str(path) for pattern in given.files for path in Path().glob(pattern) if "_test." not in path.name})
    mutants = [one for file in files if tests_of(file) for one in mutants_of(file, Path(file).read_text())]
    if given.sample is not None:
        mutants = random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    if given.list:
        print(*(f"{one.file}:{one.line}: {one.operator}: {one.before.strip()}" for one in mutants), sep="\n")
        return 0
    done = [Mutant(**one) for one in json.loads(given.out.read_text())] if given.out.exists() else []
    known = {one.key for one in done}
    for one in mutants:
        if one.key in known:
            continue
        done.append(Mutant(**(asdict(one) | {"outcome": outcome_of(one, given.build)})))
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps([asdict(each) for each in done], indent=1))
        print(f"{one.file}:{one.line}: {one.operator}: {done[-1].outcome}", flush=True)
    built = [one for one in done if one.outcome != NOT_BUILT]
    survivors = [one for one in built if one.outcome == SURVIVED]
    print(f"{len(built) - len(survivors)} of {len(built)} killed, {len(done) - len(built)} do not build")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())

"""Mutate the C++ of transports and of kernels, and list the undetected mutants.

    python ci/mutants.py [--files GLOB ...] [--operators GLOB ...] [--sample N --seed S] [--again] [--record FILE]
        [--list]

All chosen mutants are compiled at once, in copies of the sources in `--build`: each mutated place tests a number from
the environment of a test (ci/mutants.h). A mutant without such a form is compiled alone. A first run of each part of
each test records its time and the places it reaches. Each mutant then runs the parts reaching it, the fastest first,
until one fails. A second run continues the first; `--again` repeats the survivors.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

FILES = (
    "ffi/common/*",
    "ffi/planning/*_cuda.cc",
    "ffi/planning/slot_ring.*",
    "ffi/planning/device/*.h",
    "ffi/transport/*",
)
NOT_MUTATED = ("*_test.cc", "*testing*", "*fibers*", "ffi/common/module.h")
"""Tests and their support, and a header of Python modules, which no C++ test includes."""

PARTED = (
    "edit_block_test",
    "exact_block_test",
    "left_out_between_test",
    "processes_test",
    "shared_memory_test",
    "sockets_test",
    "stand_in_driver_test",
    "stand_in_faults_test",
    "stand_in_resources_test",
    "stand_in_runs_test",
    "stand_in_waits_test",
)
"""Tests listing their parts for the argument `--parts` and run one for its words."""

NOT_RUN = ("stand_in_resources_test overlap",)
"""Parts that expect short durations, and so fail beside other work on the machine."""

CHECKS = "-D_GLIBCXX_ASSERTIONS -fsanitize=bounds-strict -fsanitize-undefined-trap-on-error"
"""Options to end a test at an index out of bounds, as the sanitizers of ci/sanitizers.sh do, at little cost."""

SURVIVED, NOT_REACHED, NOT_BUILT = "survived", "not reached", "does not build"


@dataclass(frozen=True)
class Operator:
    """One kind of change."""

    pattern: re.Pattern[str]  # its first group is the replaced text, empty for an insertion
    selected: str  # the replacement in sources with all mutants; `{}` is the number of the mutant, `{name}` a group
    alone: str  # the replacement in sources with this mutant alone; empty if the mutant must compile with all others


def _skip(statement: str) -> Operator:
    """Skip a statement, which starts a line or follows another one."""
    return Operator(re.compile(rf"(?:^\s*|[;{{}}] )()(?={statement})"), "if (mutants::Keep({})) ", "if (false) ")


def _instead(value: str, expression: str) -> Operator:
    """Use a value instead of an expression."""
    return Operator(re.compile(rf"()\b(?={expression})"), f"mutants::Is({{}}) ? {value} : ", f"true ? {value} : ")


def _compare(text: str, other: str) -> Operator:
    return Operator(re.compile(rf"( {text} )"), f" {text} mutants::Swap{{{{{{}}}}}} {text} ", f" {other} ")


def _operand(pattern: str, other: str) -> Operator:
    """Use another operand in place of the matched text."""
    return Operator(re.compile(f"(?P<text>{pattern})"), f"(mutants::Is({{}}) ? {other} : {{text}})", "")


GPU = r"(?P<gpu>(?:\w+(?:->|\.))*gpu(?:->|\.))"
"""Expression of a GPU with its streams."""

SIZE = r"(?:[a-z]\w*(?:\.|->))*(?:offset|size|bytes|words_?|first|begin)\b"
VALUE = r"[a-z]\w*(?:(?:\.|->)[a-z]\w*)*"

OPERATORS: dict[str, Operator] = {
    "drop a wait": _instead("cudaSuccess", r"cuda(?:StreamWaitEvent|StreamSynchronize)\("),
    "drop a wait for a word": _instead("CUDA_SUCCESS", r"driver\.wait_value\("),
    "drop a wait of the host": _instead("Outcome{{}}", r"(?<== )(?:group_?->)?WaitFor\w+\("),
    "drop a wait for a change": _skip(r"changed_\.wait\("),
    "drop a notification": _skip(r"\w+\.notify_(?:one|all)\(\);"),
    "drop a record": _instead("cudaSuccess", r"cudaEventRecord\("),
    "drop a written word": _instead("CUDA_SUCCESS", r"driver\.write_value\("),
    "drop a barrier": _skip(r"t_?\.Sync(?:Warp|Block)\(\);"),
    "drop a device switch": _instead("cudaSuccess", r"cudaSetDevice\("),
    "drop a close": _skip(
        r"(?:if \(.*\) )?(?:close\(|static_cast<void>\((?:driver\.(?:release|unmap|free_address)"
        r"|cuda(?:IpcCloseMemHandle|EventDestroy|FreeHost))\()"
    ),
    "drop a store": _skip(r"[\w.>()-]+\.store\("),
    "drop a refusal": _skip(r"if \(.*\) (?:return (?:Refuse|Problem)\(|continue;|break;)"),
    "< to <=": _compare("<", "<="),
    "<= to <": _compare("<=", "<"),
    "> to >=": _compare(">", ">="),
    ">= to >": _compare(">=", ">"),
    "+ 1 to nothing": Operator(re.compile(r"( \+ 1)\b(?!\.)"), " + mutants::One({})", ""),
    "another stream": _operand(rf"{GPU}copies\(\)", "{gpu}fetches()"),
    "the other stream": _operand(rf"{GPU}fetches\(\)", "{gpu}copies()"),
    "another event": _operand(r"(?P<owner>(?:\w+(?:->|\.))+)copied\.get\(\)", "{owner}ready.get()"),
    "another device": _operand(rf"{GPU}device\(\)", "1 - {gpu}device()"),
    "arguments exchanged": Operator(
        # The types must be equal: otherwise the mutant does not compile.
        re.compile(rf"(?<=[(, ])((?P<a>{VALUE}), (?P<b>{VALUE}))(?=[,)])"),
        "mutants::Either<{0}>({a}, {b}), mutants::Either<{0}>({b}, {a})",
        "",
    ),
    "off by one element": Operator(
        re.compile(rf"((?:(?<=[*+] )|(?<![\w.>]))(?P<text>{SIZE})(?= [*+] )|(?<=[*+] )(?P<last>{SIZE})(?=[\]),;]))"),
        "({text}{last} - mutants::None({}))",
        "",
    ),
    "task to task + 1": Operator(
        re.compile(r"(?<![\w&*] )\b(task)\b(?=[),;])"), "task + mutants::None({})", "task + 1"
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one line: `start` to `end` of its characters are replaced."""

    file: str
    line: int  # from 1
    start: int
    end: int
    operator: str  # key of `OPERATORS`
    code: str  # the line without indentation
    groups: tuple[tuple[str, str], ...]  # named groups of the pattern
    nth: int  # of the equal changes of equal lines, from 0

    @property
    def key(self) -> str:
        """Identity, also after other lines were added to the file."""
        return f"{self.file}: {self.operator}: {self.code}" + (f" [{self.nth}]" if self.nth else "")


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a file; comments, strings and directives are left alone."""
    found: list[Mutant] = []
    counts: Counter[tuple[str, str]] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        if code.lstrip().startswith(("#", "template", "static_assert")):
            continue
        for operator, change in OPERATORS.items():
            for match in change.pattern.finditer(code):
                start, end = match.span(1)
                if code[:start].count('"') % 2 == 1:
                    continue
                same = (operator, code.strip())
                groups = tuple(match.groupdict("").items())
                found.append(Mutant(file, number, start, end, operator, code.strip(), groups, counts[same]))
                counts[same] += 1
    return found


def mutated(text: str, changes: list[tuple[Mutant, str]]) -> str:
    """Return the text of a file with replacements, which keep its lines."""
    lines = text.splitlines()
    # From the end of each line; of two insertions at one place, the first comes first.
    for one, replacement in sorted(changes, key=lambda change: (change[0].start, change[0].end), reverse=True):
        line = lines[one.line - 1]
        lines[one.line - 1] = line[: one.start] + replacement + line[one.end :]
    return "\n".join(lines) + "\n"


# ---- generated sources ---------------------------------------------------------------


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


class Build:
    """A build of copies of the sources, with all mutants compiling together.

    Args:
        folder: of the build.
        mutants: all mutants; the n-th has number n + 1.
    """

    def __init__(self, folder: Path, mutants: list[Mutant]):
        self.folder, self.mutants = folder, mutants
        self.source, self.binaries = folder / "source", folder / "build"
        self.alone: set[Mutant] = set()
        # Read once: the checkout may change during a run.
        files = [Path("CMakeLists.txt"), Path("ci/mutants.h"), *Path("ffi").rglob("*.*")]
        self.texts = {str(path): path.read_text() for path in files}

    def make(self) -> None:
        """Build; mutants named by errors are left out, and `alone` then contains them."""
        memory = self.folder / "alone.json"
        known = set(json.loads(memory.read_text())) if memory.exists() else set()
        self.alone = {one for one in self.mutants if one.key in known}
        self._copy()
        while True:
            self._write(self._together())
            failed, errors = self._build()
            if not failed:
                break
            culprits = self._named_by(errors) - self.alone
            if not culprits:
                raise SystemExit("the sources do not build:\n" + errors[-3000:])
            self.alone |= culprits
        memory.write_text(json.dumps(sorted(known | {one.key for one in self.alone}), indent=1))

    def make_alone(self, mutant: Mutant) -> bool:
        """Build with one mutant and no other; return whether it builds."""
        self._write({mutant.file: [(mutant, OPERATORS[mutant.operator].alone)]})
        return not self._build()[0]

    def tests(self) -> list[list[str]]:
        """Return the command of each part of each test."""
        listed = json.loads(_output("ctest", "--test-dir", str(self.binaries), "--show-only=json-v1"))
        parts = []
        for command in (test["command"] for test in listed["tests"]):
            name = Path(command[0]).name
            names = ["1000" if name.startswith("fuzz") else ""]  # of the random calls
            if name in PARTED:
                names = _output(*command, "--parts").splitlines()
            parts += [[*command, *words.split()] for words in names]
        return parts

    def _named_by(self, errors: str) -> set[Mutant]:
        """Return the mutants named by compiler errors: exchanges by their numbers, or else all of a line."""
        if numbers := {int(number) for number in re.findall(r"(?<!mutants::)Either<(\d+)>", errors)}:
            return {self.mutants[number - 1] for number in numbers}
        places = {(file, int(line)) for file, line in re.findall(r"source/(ffi/[\w/.]+):(\d+):", errors)}
        culprits = {one for one in self.mutants if (one.file, one.line) in places}
        # Mutants of equal types only, before others of the same line.
        return {one for one in culprits if not OPERATORS[one.operator].alone} - self.alone or culprits

    def _together(self) -> dict[str, list[tuple[Mutant, str]]]:
        changes: dict[str, list[tuple[Mutant, str]]] = {}
        for number, one in enumerate(self.mutants, 1):
            if one not in self.alone:
                text = OPERATORS[one.operator].selected.format(number, **dict(one.groups))
                changes.setdefault(one.file, []).append((one, text))
        return changes

    def _copy(self) -> None:
        if (self.binaries / "build.ninja").exists():
            return
        self._write(self._together())
        flags = f"-O1 -DNDEBUG -w {CHECKS} -DMOE_LB_FEW_RUNS -include {(self.source / 'ci/mutants.h').resolve()}"
        options = [f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={sys.executable}"]
        for name, option in (("nanobind", "--cmake_dir"), ("pybind11", "--cmakedir")):
            options.append(f"-D{name}_DIR={_output(sys.executable, '-m', name, option).strip()}")
        toolkit = shutil.which("nvcc") or Path("/usr/local/cuda").is_dir()
        options.append(f"-DJAX_MOE_LB_CUDA={'ON' if toolkit else 'OFF'}")
        _output("cmake", "-S", str(self.source), "-B", str(self.binaries), "-G", "Ninja", *options)

    def _write(self, changes: dict[str, list[tuple[Mutant, str]]]) -> None:
        for file, original in self.texts.items():
            text, copy = mutated(original, changes.get(file, [])), self.source / file
            # Compile only changed files.
            if not copy.exists() or copy.read_text() != text:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)

    def _build(self) -> tuple[bool, str]:
        command = f"cmake --build {self.binaries} --target cpp_tests -- -k 0 -j 1"
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        return done.returncode != 0, done.stdout + done.stderr


# ---- runs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A test or a part of it, passing without a mutant."""

    command: tuple[str, ...]
    wall_s: float
    cpu_s: float
    reached: frozenset[int]  # numbers of the mutants whose places it executes

    @property
    def name(self) -> str:
        """Return the name of the test and its arguments."""
        return " ".join([Path(self.command[0]).name, *self.command[1:]])

    def fails(self, mutant: int) -> str:
        """Run it with a mutant active; return how it failed, empty if it passed."""
        return _fault(self.command, {"MUTANT": str(mutant)}, 5 * self.wall_s + 5, int(2 * self.cpu_s + 5))


def _fault(command: tuple[str, ...], environment: dict[str, str], wall_s: float, cpu_s: int) -> str:
    """Run a command; return its failure. Processor time does not depend on other work on the machine."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limit,
    )
    try:
        code = process.wait(wall_s)
    except subprocess.TimeoutExpired:
        return "time-out"
    finally:
        # Also its child processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "" if code == 0 else "time-out" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "failure"


def run_unmutated(command: list[str], build: Build) -> Part:
    """Run a part of a test without a mutant."""
    path = build.folder / "reached"
    path.write_bytes(bytes(len(build.mutants) + 1))
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if fault := _fault(tuple(command), {"REACHED": str(path)}, 900, 900):
        raise SystemExit(f"{' '.join(command)} fails without a mutant: {fault}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    reached = frozenset(number for number, byte in enumerate(path.read_bytes()) if byte)
    return Part(tuple(command), round(time.monotonic() - begin, 2), round(cpu_s, 2), reached)


def parts_of(build: Build) -> list[Part]:
    """Return all parts of tests, the fastest first; those of an earlier run of the same program are read."""
    memory = build.folder / "parts.json"
    stored = json.loads(memory.read_text()) if memory.exists() else {}
    parts = []
    for command in build.tests():
        if " ".join([Path(command[0]).name, *command[1:]]) in NOT_RUN:
            continue
        key = hashlib.sha256(Path(command[0]).read_bytes()).hexdigest() + " ".join(command[1:])
        if key not in stored:
            one = run_unmutated(command, build)
            stored[key] = asdict(one) | {"reached": sorted(one.reached)}
            memory.write_text(json.dumps(stored))
        row = stored[key]
        parts.append(Part(tuple(row["command"]), row["wall_s"], row["cpu_s"], frozenset(row["reached"])))
    return sorted(parts, key=lambda one: one.wall_s)


def outcome_of(mutant: Mutant, build: Build, parts: list[Part]) -> str:
    """Run the parts of tests reaching a mutant, up to the first failure."""
    number = build.mutants.index(mutant) + 1
    if mutant in build.alone:
        # All parts then run, as the place is not recorded.
        if not OPERATORS[mutant.operator].alone or not build.make_alone(mutant):
            return NOT_BUILT
    else:
        parts = [part for part in parts if number in part.reached]
    if not parts:
        return NOT_REACHED
    for part in parts:
        if how := part.fails(number):
            return f"{how} of {part.name}"
    return SURVIVED


def record(path: Path, outcomes: dict[str, str]) -> None:
    """Write the counts of each file and operator, and the survivors; keep the reasons given for them."""
    reasons = json.loads(path.read_text())["survivors"] if path.exists() else {}
    files: dict[str, Counter[str]] = {}
    operators: dict[str, Counter[str]] = {}
    for key, outcome in outcomes.items():
        kind = outcome if outcome in (SURVIVED, NOT_REACHED, NOT_BUILT) else "killed"
        file, operator = key.split(": ")[:2]
        files.setdefault(file, Counter())[kind] += 1
        operators.setdefault(operator, Counter())[kind] += 1
    survivors = {key: reasons.get(key, "") for key, outcome in outcomes.items() if outcome in (SURVIVED, NOT_REACHED)}
    path.write_text(json.dumps({"files": files, "operators": operators, "survivors": survivors}, indent=1) + "\n")


def main() -> int:
    """Run the mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/mutants"), help="folder of the build")
    parser.add_argument("--files", nargs="+", default=["*"], metavar="GLOB", help="files to mutate")
    parser.add_argument("--operators", nargs="+", default=["*"], metavar="GLOB", help="kinds of changes")
    parser.add_argument("--sample", type=int, help="number of mutants; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", action="store_true", help="repeat the survivors")
    parser.add_argument("--record", type=Path, help="file of counts and survivors")
    parser.add_argument("--list", action="store_true", help="print the mutants without running them")
    given = parser.parse_args()
    files = sorted({str(path) for pattern in FILES for path in Path().glob(pattern)})
    files = [file for file in files if not any(fnmatch.fnmatch(file, one) for one in NOT_MUTATED)]
    mutants = [one for file in files for one in mutants_of(file, Path(file).read_text())]
    chosen = [one for one in mutants if any(fnmatch.fnmatch(one.file, pattern) for pattern in given.files)]
    chosen = [one for one in chosen if any(fnmatch.fnmatch(one.operator, pattern) for pattern in given.operators)]
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    if given.list:
        print(*(f"{one.file}:{one.line}: {one.operator}: {one.code}" for one in chosen), sep="\n")
        return 0
    build = Build(given.build, chosen)
    build.make()
    memory = given.build / "outcomes.json"
    outcomes: dict[str, str] = json.loads(memory.read_text()) if memory.exists() else {}
    parts = parts_of(build)
    if not any(part.name.startswith("stand_in") for part in parts):
        chosen = [one for one in chosen if "_cuda" not in one.file]
    # Those compiled alone last: each changes the build.
    for one in sorted(chosen, key=lambda one: one in build.alone):
        known = outcomes.get(one.key)
        if known is not None and not (given.again and known in (SURVIVED, NOT_REACHED)):
            continue
        outcomes[one.key] = outcome_of(one, build, parts)
        memory.write_text(json.dumps(outcomes, indent=1))
        print(f"{one.file}:{one.line}: {one.operator}: {one.code}: {outcomes[one.key]}", flush=True)
    outcomes = {one.key: outcomes[one.key] for one in chosen}
    if given.record:
        record(given.record, outcomes)
    counts = Counter(outcomes.values())
    survivors = counts[SURVIVED] + counts[NOT_REACHED]
    built = len(chosen) - counts[NOT_BUILT]
    print(f"{built - survivors} of {built} killed, {counts[NOT_REACHED]} not reached, {counts[NOT_BUILT]} do not build")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())

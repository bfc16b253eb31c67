"""Run the mutants of `mutants.yaml`: show that the tests fail when one line of the code is wrong.

    python -m tests.mutation.run --set all --out build/mutants.json
    python -m tests.mutation.run transport-round-off-by-one

Each mutant is applied to a temporary copy of the checkout, and the test files that it lists run there. A mutant is
killed if a test fails with it and passes without it. A run with the same `--out` skips finished mutants.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).with_name("mutants.yaml")
KINDS = {"swapped comparison", "dropped mask", "off by one", "missing transpose", "wrong axis", "wrong dtype"}

DEFAULT, FURTHER = "not thorough", "thorough"
"""Marker expressions of `make test`, and of the tests that only `make test-all` runs."""

REMOVE_FINDER = """import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""
"""`sitecustomize.py` of the copy: the finder of the editable installation precedes PYTHONPATH."""


@dataclass(frozen=True)
class Mutant:
    """A wrong line of code.

    Args:
        name: unique name; starts with the room.
        kind: one of `KINDS`.
        why: consequence for a user.
        file: path in the checkout.
        text: correct text; occurs once in `file`.
        new_text: wrong text.
        tests: test files that may kill the mutant.
    """

    name: str
    kind: str
    why: str
    file: str
    text: str
    new_text: str
    tests: list[str]

    @property
    def digest(self) -> str:
        """Fingerprint of the change and its tests."""
        return hashlib.sha256(repr((self.file, self.text, self.new_text, self.tests)).encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Return the mutated source.

        Raises:
            ValueError: `text` does not occur exactly once.
        """
        if source.count(self.text) != 1:
            raise ValueError(f"{self.name}: text occurs {source.count(self.text)} times in {self.file}; expected once")
        return source.replace(self.text, self.new_text)


def load_mutants() -> list[Mutant]:
    """Read `mutants.yaml`."""
    return [Mutant(**entry) for entry in yaml.safe_load(MUTANTS.read_text())["mutants"]]


class Copy:
    """Temporary copy of a checkout, in which mutants are applied and tests run.

    Args:
        checkout: a git checkout; its tracked files are copied as they are in the work tree.
        python: an interpreter with an editable installation of the checkout.
        folder: an empty folder.
        timeout_s: limit of one pytest process in seconds; a mutant that exceeds it counts as killed.
    """

    def __init__(self, checkout: Path, python: str, folder: Path, timeout_s: float) -> None:
        self.root, self.python, self.timeout_s = folder / "tree", python, timeout_s
        self.log = folder / "pytest.log"
        self.broken: list[str] = []
        """Tests that fail without a mutant; they are deselected."""
        # A file that changes twice in a second keeps its bytecode unless its time differs.
        self._time = int(time.time())
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (checkout / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, self.root / name)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(REMOVE_FINDER)
        self.environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{self.root}"}
        self.environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        self.environment.pop("CI", None)
        self._link_binaries()

    def _link_binaries(self) -> None:
        find = "import importlib.util; print(importlib.util.find_spec('jax_moe_lb._planning').origin)"
        there = {key: value for key, value in self.environment.items() if key != "PYTHONPATH"}
        built = subprocess.run(
            [self.python, "-c", find], cwd=self.root.parent, env=there, check=True, capture_output=True, text=True
        )
        for module in Path(built.stdout.strip()).parent.glob("*.so"):
            (self.root / "jax_moe_lb" / module.name).symlink_to(module)
        used = subprocess.run(
            [self.python, "-c", "import jax_moe_lb, jax_moe_lb._planning; print(jax_moe_lb.__file__)"],
            cwd=self.root.parent,
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        if not Path(used.stdout.strip()).is_relative_to(self.root):
            raise RuntimeError(f"jax_moe_lb is imported from {used.stdout.strip()}; expected {self.root}")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant while the context is open."""
        path = self.root / mutant.file
        source = path.read_text()
        try:
            self._write(path, mutant.apply(source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        self._time += 10
        os.utime(path, (self._time, self._time))

    def pytest(self, *args: str) -> int | None:
        """Run pytest in one process; return its exit status, `None` if it exceeded the time limit."""
        command = [self.python, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "--hypothesis-seed=0", *args]
        command += [f"--deselect={test}" for test in self.broken]
        # A session of its own, so that the processes that tests start end with it.
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            return process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def last_failed(self) -> str:
        """Return the node ID of the test that failed in the last run."""
        return next(iter(json.loads((self.root / ".pytest_cache/v/cache/lastfailed").read_text())))

    def killer(self, mutant: Mutant, markers: str) -> str | None:
        """Return the test that kills a mutant; `None` if the mutant survives.

        Args:
            mutant: the mutant.
            markers: marker expression of the tests that run.

        Raises:
            RuntimeError: pytest stops before it runs tests, as in an import error.
        """
        while True:
            with self.mutated(mutant):
                status = self.pytest("--cache-clear", "-m", markers, *mutant.tests)
            if status is None:
                return f"more than {self.timeout_s:g} s"
            if status < 0:
                return f"signal {-status}"
            if status in (0, 5):
                return None
            if status != 1:
                words = " ".join(self.log.read_text(errors="replace").split())
                raise RuntimeError(f"pytest exits with {status}; expected tests to run: ... {words[-300:]}")
            test = self.last_failed()
            if self.pytest("-p", "no:cacheprovider", test) == 0:
                return test
            self.broken.append(test)


def run_one(copy: Copy, mutant: Mutant, result: dict, everything: bool) -> dict:
    """Run a mutant; `result` holds earlier results of the same mutant and is extended.

    Args:
        copy: the copy of the checkout.
        mutant: the mutant.
        result: `default` and `all` are "killed", "survived" or "error"; empty at first.
        everything: if True, also run the tests marked thorough if the default set does not kill the mutant.
    """
    begin_s, begin_cpu_s = time.monotonic(), sum(os.times()[2:4])
    result = {"digest": mutant.digest, "by": "", "seconds": 0.0, "cpu_s": 0.0, **result}
    for name, markers in (("default", DEFAULT), ("all", FURTHER)):
        if name in result or (name == "all" and not everything):
            continue
        if name == "all" and result["default"] != "survived":
            result["all"] = result["default"]
            continue
        try:
            killer = copy.killer(mutant, markers)
            result |= {name: "killed" if killer else "survived", "by": killer or ""}
        except (RuntimeError, ValueError) as error:
            result |= {name: "error", "by": str(error)}
    result["seconds"] = round(result["seconds"] + time.monotonic() - begin_s, 1)
    result["cpu_s"] = round(result["cpu_s"] + sum(os.times()[2:4]) - begin_cpu_s, 1)
    return result


def line(name: str, result: dict) -> str:
    """Return a row of the table."""
    sets = f"{result['default']:<10}{result.get('all', '-'):<10}"
    return f"{name:<40}{sets}{result['seconds']:>8.1f}{result['cpu_s']:>8.1f}  {result['by']}"


def is_done(result: dict, mutant: Mutant, everything: bool) -> bool:
    """Return whether an earlier result covers the tests."""
    return result.get("digest") == mutant.digest and "default" in result and ("all" in result or not everything)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants or rooms; all by default")
    parser.add_argument("--set", choices=("default", "all"), default="default", help="tests of make test or test-all")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="results, read first and then extended")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="checkout; this one by default")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="limit of one pytest run in seconds")
    args = parser.parse_args()
    mutants = load_mutants()
    known = {one.name for one in mutants} | {one.name.partition("-")[0] for one in mutants}
    if unknown := set(args.names) - known:
        parser.error(f"NAME is {', '.join(sorted(unknown))}; expected a name or a room of {MUTANTS.name}")
    if args.names:
        mutants = [one for one in mutants if {one.name, one.name.partition("-")[0]} & set(args.names)]
    results = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    everything = args.set == "all"
    python = args.tree.resolve() / ".venv/bin/python"
    print(f"{'mutant':<40}{'default':<10}{'all':<10}{'s':>8}{'CPU s':>8}  by", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = None
        for mutant in mutants:
            earlier = results.get(mutant.name, {})
            if not is_done(earlier, mutant, everything):
                if copy is None:
                    used = str(python) if python.exists() else sys.executable
                    copy = Copy(args.tree.resolve(), used, Path(folder).resolve(), args.timeout)
                earlier = earlier if earlier.get("digest") == mutant.digest else {}
                results[mutant.name] = run_one(copy, mutant, earlier, everything)
                if args.out:
                    part = args.out.with_suffix(".part")
                    part.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                    part.replace(args.out)
            print(line(mutant.name, results[mutant.name]), flush=True)
        for test in copy.broken if copy else ():
            print(f"fails without a mutant: {test}")
    for name in ("default", "all") if everything else ("default",):
        killed = sum(results[one.name].get(name) == "killed" for one in mutants)
        print(f"{name}: {killed} of {len(mutants)} killed")


if __name__ == "__main__":
    main()

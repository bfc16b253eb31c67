"""Process that runs commands one after another, with imports and compiled programs of its own: a `Worker` starts it.

Each line of the input is a JSON object with the `name` of a command, its `folder`, and a folder for its `output`. Each
line of the output is an exit code. Training traces, compiles and draws figures once.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax_moe_lb.sim.measure
import models.run_folder.report
import models.training.loop
import tests.models.tiny_training
from jax_moe_lb.cli import main as moe_main
from jax_moe_lb.sim import machine_profile

RECORDING = Path(__file__).parents[1] / "cli" / "recorded" / "stat.pt"
STEPS = 4
"""Steps of a training run, with a checkpoint every two."""


def make_once(module: ModuleType, name: str) -> None:
    """Replace a function of a module by its first result."""
    function, results = getattr(module, name), []

    def first(*arguments: Any, **options: Any) -> Any:
        if not results:
            results.append(function(*arguments, **options))
        return results[0]

    setattr(module, name, first)


def train(folder: Path) -> None:
    sys.argv = ["train", "--run-dir", str(folder / "run"), "--resume=auto", "--steps", str(STEPS)]
    tests.models.tiny_training.main()


def convert(folder: Path) -> None:
    sys.exit(moe_main(["convert", str(RECORDING), "--ranks", "2", "--out", str(folder / "out.npz")]))


def calibrate(folder: Path) -> None:
    """Write a measurement made once, as another one has other numbers."""
    found = pickle.loads((folder.parent / "measured").read_bytes())
    jax_moe_lb.sim.measure.measure = lambda most_ranks: found
    sys.exit(moe_main(["calibrate", str(folder / "out.yaml")]))


def measure(folder: Path) -> None:
    for name, value in {"HIDDEN": 16, "INNER": 32, "ROWS": (4, 16), "MANY_ROWS": 64, "REPEATS": 1}.items():
        setattr(jax_moe_lb.sim.measure, name, value)
    (folder.parent / "measured").write_bytes(pickle.dumps(jax_moe_lb.sim.measure.measure(2)))


PROGRAMS: dict[str, Callable[[Path], None]] = {one.__name__: one for one in (train, convert, calibrate, measure)}


def run(name: str, folder: Path, output: Path) -> int:
    """Run a command, and return its exit code; its output is in the files `stdout` and `stderr`."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(output / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        PROGRAMS[name](folder)
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    # An interrupt may arrive after the command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


def main() -> None:
    for name in ("make_programs", "_traced", "_compiled", "_commit"):
        make_once(models.training.loop, name)
    for name in ("loss", "imbalance", "speed", "served", "load"):
        make_once(models.run_folder.report, f"{name}_png")
    machine_profile.warnings = lambda found: []
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        given = json.loads(line)
        code = run(given["name"], Path(given["folder"]), Path(given["output"]))
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Commands forked from one process with the imports: `python -m tests.faults.programs`.

Each line of the input is a JSON object: `name`, `folder`, the `number` of commands that run at once, and the seconds
`interrupt_s` before an interrupt, or null. Each line of the output lists their exit codes, negative for a signal.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import jax_moe_lb.sim.measure
import tests.models.tiny_training
from jax_moe_lb.cli import main as moe_main
from jax_moe_lb.sim import machine_profile

RECORDING = Path(__file__).parents[1] / "cli" / "recorded" / "stat.pt"
STEPS = 4
"""Steps of a training run, with a checkpoint every two."""


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


PROGRAMS = {function.__name__: function for function in (train, convert, calibrate, measure)}


def run(name: str, folder: Path, number: int, interrupt_s: float | None) -> list[int]:
    """Run commands in child processes; the output of the n-th is in the file `stderr-N` beside the folder."""
    children = [start(name, folder, at) for at in range(number)]
    if interrupt_s is not None:
        time.sleep(interrupt_s)
        for child in children:
            os.kill(child, signal.SIGINT)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def start(name: str, folder: Path, number: int) -> int:
    """Run a command in a child process, and return its identifier."""
    if child := os.fork():
        return child
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        path = folder.parent / f"{stream}-{number}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    machine_profile.warnings = lambda found: []
    code = 70
    try:
        PROGRAMS[name](folder)
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(run(**given | {"folder": Path(given["folder"])})), flush=True)

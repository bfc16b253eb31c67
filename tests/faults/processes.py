"""Kill one process of several, or stop it: the others name it, and training continues.

    python -m tests.faults.processes kills 2 100     # kill one of two processes that have joined
    python -m tests.faults.processes trainings 2 10  # kill one of two training processes, and resume
    python -m tests.faults.processes stalls 4 8      # stop each of four processes once before step 1 and once later

Each prints one JSON object per try; a third number is the seed, and of stalls the first try. Processes are forked from
one with the imports.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import tests.models.tiny_training
from benchmarks.training.local_gloo import bind_gloo
from models.run_folder.metrics import RunFolder
from tests.models import processes
from tests.models.kill_training import losses
from tests.models.processes import free_port

STEPS = 16
"""Steps of a training run, with a checkpoint every two."""

PER_RUN = 4
"""Maximum number of kills of a training run."""

NAMED_S = 30.0
"""Time in which the other processes name a killed or a stopped process."""

START_S = 400.0
"""Time limit of the start, and of the end of a run."""

STALL_S = 60
"""`multi_process.stall_timeout_s` of training runs."""

MOST_STALLS = 3
"""Maximum number of resumed stalls of a run."""


class Member:
    """Process forked from this one, which has the imports but no devices.

    Args:
        program: function called in the process.
        output: prefix of the files of its output.
    """

    def __init__(self, program: Callable[[], None], output: Path) -> None:
        self.output, self.code = output, None
        self.pid = os.fork()
        if not self.pid:
            _run(program, output)

    def ended(self) -> bool:
        """Return whether the process has ended, and keep its exit code."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self) -> None:
        """End the process at once."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            wait_until(self.ended, START_S)

    def lines(self, stream: str = "stderr") -> list[str]:
        path = self.output.with_suffix(f".{stream}")
        return path.read_text(errors="replace").splitlines() if path.exists() else []


def _run(program: Callable[[], None], output: Path) -> None:
    """Run a program in a new process, which ends here."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output.with_suffix(f".{stream}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = 70
    try:
        bind_gloo()
        program()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def train(number: int, folder: Path) -> list[Member]:
    """Start or resume a training run of processes with one device each."""
    port = free_port()

    def program(at: int) -> None:
        place = {"coordinator": f"127.0.0.1:{port}", "num_processes": number, "process_id": at}
        place |= {"stall_timeout_s": STALL_S}
        words = [word for key, value in place.items() for word in ("--set", f"multi_process.{key}={value}")]
        run = ["--run-dir", str(folder / "run"), "--resume=auto", "--steps", str(STEPS)]
        sys.argv = ["train", *run, "--distributed", "--mesh", f"expert={number}", *words]
        tests.models.tiny_training.main()

    folder.mkdir(exist_ok=True)
    return [Member(lambda at=at: program(at), folder / str(at)) for at in range(number)]


def join(number: int, folder: Path) -> list[Member]:
    """Start processes that join each other and wait; return once all have joined."""
    port = str(free_port())
    folder.mkdir(exist_ok=True)

    def member(at: int) -> Member:
        return Member(lambda: processes.main(port, str(number), str(at), "wait"), folder / str(at))

    members = [member(at) for at in range(number)]
    wait_until(lambda: all(one.lines("stdout") for one in members), START_S)
    return members


def wait_until(condition: Callable[[], Any], within_s: float) -> Any:
    """Return the result of a condition once it is true, or its last one."""
    until = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def wait_for_end(members: list[Member], within_s: float) -> list[int | None]:
    """Wait for the end of processes, kill the others, and return the exit codes, `None` for killed ones."""
    wait_until(lambda: all(member.ended() for member in members), within_s)
    codes = [member.code for member in members]
    for member in members:
        member.kill()
    return codes


def train_and_wait(number: int, folder: Path) -> list[Member]:
    """Start or resume a training run, and wait for its first step."""
    metrics = RunFolder(folder / "run").metrics
    before = metrics.stat().st_ino if metrics.exists() else None
    members, sizes = train(number, folder), []

    def stepped() -> bool:
        # A resumed run replaces the file, and then appends to it.
        if metrics.exists() and metrics.stat().st_ino != before:
            sizes.append(metrics.stat().st_size)
        return bool(sizes) and sizes[-1] > sizes[0]

    wait_until(lambda: stepped() or members[0].ended(), START_S)
    return members


def finish(number: int, folder: Path, members: list[Member] | None = None) -> tuple[dict, float]:
    """Run to the end, and resume after a stall; return faults and stalls, and the seconds from the first step on."""
    found: dict[str, Any] = {"faults": [], "stalls": 0}
    while True:
        members, began = members or train_and_wait(number, folder), time.monotonic()
        codes = wait_for_end(members, START_S)
        if not any(codes) and None not in codes:
            return found, time.monotonic() - began
        found["stalls"] += (stalled := has_stalled(members, codes))
        if not stalled or found["stalls"] > MOST_STALLS:
            found["faults"].append(f"a run ends with exit codes {codes}: {' '.join(members[0].lines())[-300:]}")
            return found, time.monotonic() - began
        members = None


def has_stalled(members: list[Member], codes: list[int | None]) -> bool:
    """Return whether all processes have ended in the line about a wait although all of them respond."""
    line = (
        rf"error: waiting, although all {len(members)} processes respond, for \d+ s, at step \d+; --resume continues .*"
    )
    return codes == [1] * len(codes) and all(re.fullmatch(line, member.lines()[-1]) for member in members)


def after_kill(members: list[Member], victim: int) -> dict:
    """Kill a process; return the seconds until the others have ended, and one line per fault."""
    members[victim].kill()
    began, faults = time.monotonic(), []
    others = [member for member in members if member is not members[victim]]
    codes = wait_for_end(others, NAMED_S)
    seconds = time.monotonic() - began
    for member, code in zip(others, codes, strict=True):
        lines = member.lines()
        named = re.fullmatch(rf"error: lost connection to process {victim} \(pid .*", lines[-1])
        if not (code == 1 and named and len(lines) == 2):
            faults.append(f"exit code {code}: {' '.join(lines)[-300:]}")
    return {"processes": len(members), "killed": victim, "seconds": round(seconds, 2), "faults": faults}


def kills(number: int, tries: int, seed: int, folder: Path) -> Iterator[dict]:
    """Kill one of several waiting processes; yield the outcomes."""
    generator = random.Random(seed)
    for at in range(tries):
        members = join(number, folder / str(at))
        time.sleep(generator.uniform(0, 0.5))
        yield after_kill(members, generator.randrange(number))


def trainings(number: int, tries: int, seed: int, folder: Path) -> Iterator[dict]:
    """Kill one process of a training run at random times, and resume; yield the outcomes."""
    generator = random.Random(seed)
    expected, seconds = straight(number, folder)
    run = killed = 0
    while killed < tries:
        of_run, victim = folder / str(run), generator.randrange(number)
        members = train_and_wait(number, of_run)
        time.sleep(generator.uniform(0, seconds / PER_RUN))
        if has_ended := members[victim].ended():
            wait_for_end(members, START_S)
            found: dict[str, Any] = {"processes": number, "killed": None, "seconds": 0.0, "faults": []}
        else:
            found, killed = after_kill(members, victim), killed + 1
        if has_ended or killed % PER_RUN == 0 or killed == tries:
            found = checked(found, finish(number, of_run)[0], of_run, expected)
            run += 1
        # A run that ended before its kill counts only with a fault.
        if not has_ended or found["faults"]:
            yield found


def checked(found: dict, end: dict, folder: Path, expected: object) -> dict:
    """Add the end of a run to an outcome: its faults, its stalls, and whether its losses differ."""
    differ = [] if end["faults"] or losses(folder / "run") == expected else ["the losses differ"]
    return found | {"faults": [*found["faults"], *end["faults"], *differ], "stalls": end["stalls"]}


def straight(number: int, folder: Path) -> tuple[object, float]:
    """Train without a fault; return the losses, and the seconds from the first step on."""
    found, seconds = finish(number, folder / "straight")
    assert not found["faults"], found
    return losses(folder / "straight" / "run"), seconds


def stalls(number: int, tries: int, first: int, folder: Path) -> Iterator[dict]:
    """Stop each waiting process, then each training one; yield the outcomes from a first try on."""
    expected = None
    for at in range(first, first + tries):
        is_training, of_try = at // number % 2 == 1, folder / str(at)
        if is_training and expected is None:
            expected, _ = straight(number, folder)
        members = (train_and_wait if is_training else join)(number, of_try)
        found = {"phase": "training" if is_training else "before step 1"} | after_stop(members, at % number)
        if is_training:
            found = checked(found, finish(number, of_try, members)[0], of_try, expected)
        for member in members:
            member.kill()
        yield found


def after_stop(members: list[Member], victim: int) -> dict:
    """Stop a process until all others have named it; return the seconds, and one line per fault."""
    os.kill(members[victim].pid, signal.SIGSTOP)
    began, others = time.monotonic(), [member for member in members if member is not members[victim]]
    pattern = re.compile(rf"waiting for process {victim} \(pid {members[victim].pid} on \S+\) for \d+ s, .*")
    named = wait_until(lambda: all(pattern.fullmatch(one.lines()[-1]) for one in others), NAMED_S)
    seconds = time.monotonic() - began
    os.kill(members[victim].pid, signal.SIGCONT)
    faults = [] if named else [f"not named: {[one.lines()[-1][:200] for one in others]}"]
    return {"processes": len(members), "stopped": victim, "seconds": round(seconds, 2), "faults": faults}


def main(kind: str, number: int, tries: int, seed: int = 0) -> None:
    """Print the results."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_platforms", "cpu")
        for found in {"kills": kills, "trainings": trainings, "stalls": stalls}[kind](
            number, tries, seed, Path(folder)
        ):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

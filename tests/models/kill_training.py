"""Kill a training run at random times and resume it; losses equal those of an uninterrupted run bit for bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from models.run_folder.metrics import RunFolder

ROOT = Path(__file__).parents[2]
STEPS_PER_KILL = 30
MAX_WAIT_S = 600.0


def start(folder: Path, *options: str, module: str = "tests.models.tiny_training") -> subprocess.Popen:
    """Start training the tiny model."""
    command = [sys.executable, "-m", module, "--run-dir", str(folder), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=MAX_WAIT_S)
    if process.returncode:
        raise RuntimeError(f"a training ended with exit code {process.returncode}: {errors.strip()[-2000:]}")
    return output


def wait_for_steps(process: subprocess.Popen, folder: Path) -> None:
    """Wait until the process has appended a line to the metrics, which it rewrites at its start, or has ended."""
    metrics, kept = RunFolder(folder).metrics, None
    earlier = metrics.stat().st_ino if metrics.exists() else None
    until = time.monotonic() + MAX_WAIT_S
    while process.poll() is None and time.monotonic() < until:
        if metrics.exists() and (now := metrics.stat()).st_ino != earlier:
            kept = now.st_size if kept is None else kept
            if now.st_size > kept:
                return
        time.sleep(0.005)


def kill(process: subprocess.Popen, folder: Path, wait_s: float, *, at_once: bool) -> None:
    """Send SIGKILL after `wait_s` seconds, counted from the first metrics line or from the start."""
    if not at_once:
        wait_for_steps(process, folder)
    time.sleep(wait_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def losses(folder: Path) -> list[tuple[str, int, float]]:
    kinds = ("step", "validation")
    return [(kind, row["step"], row["loss"]) for kind in kinds for row in RunFolder(folder).rows(kind)]


def kill_and_compare(
    folder: Path, kills: int, seed: int, steps_per_kill: int = STEPS_PER_KILL
) -> list[tuple[str, int, float]]:
    """Train twice, once with kills, assert equal losses, and return them."""
    # The same command starts the run and continues it.
    generator, steps = random.Random(seed), ["--resume=auto", "--steps", str(steps_per_kill * max(kills, 1))]
    straight, killed = folder / "straight", folder / "killed"
    process, began = start(straight, *steps), time.monotonic()
    wait_for_steps(process, straight)
    startup_s, began = time.monotonic() - began, time.monotonic()
    finish(process)
    training_s = time.monotonic() - began
    for number in range(1, kills + 1):
        # Most kills occur during training; every fourth may occur during startup.
        at_once = number % 4 == 0
        wait_s = generator.uniform(0, startup_s if at_once else 2 * training_s / kills)
        kill(start(killed, *steps), killed, wait_s, at_once=at_once)
        rows = RunFolder(killed).rows("step")
        print(f"kill {number}: at step {rows[-1]['step'] if rows else 0}", flush=True)
    finish(start(killed, *steps))
    want, got = losses(straight), losses(killed)
    assert got == want, [pair for pair in zip(got, want, strict=False) if pair[0] != pair[1]][:3] or (got, want)
    return got

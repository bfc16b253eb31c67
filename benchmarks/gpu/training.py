"""Checks of training: losses of a small model fall, and equal those of the system without balancing."""

import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks.gpu.findings import Finding, Scale

STEPS = 200
MEMORY_FRACTION = 0.2
RELATIVE = 0.02
"""Largest difference of the last losses of two systems, after rounding in another order."""


def losses_of(system: str, steps: int) -> list[float]:
    """Train the preset `tiny` in a process of its own, and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--system", system, "--steps", str(steps), "--run-dir", f"{folder}/run"]
        # The preset has 8 ranks.
        options += ["--mesh", f"expert={jax.device_count()}"]
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION)}
        command = [sys.executable, "-m", "models.train", "tiny", *options]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-400:]
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [found["loss"] for line in lines if "loss" in (found := json.loads(line))]


def trains(scale: Scale) -> Finding:
    """Check that `exact` trains to the loss of `plain`."""
    if scale.dry:
        return Finding(None, "not in a dry run; `make train` trains on CPUs")
    # Most of the time is start and compilation.
    with ThreadPoolExecutor(2) as pool:
        losses, plain = pool.map(lambda system: losses_of(system, STEPS), ("exact", "plain"))
    assert all(map(math.isfinite, losses)), "a loss is not finite"
    found = f"loss {losses[0]:.3f} to {losses[-1]:.3f}; plain to {plain[-1]:.3f}"
    return Finding(losses[-1] < losses[0] and abs(losses[-1] / plain[-1] - 1) <= RELATIVE, found)

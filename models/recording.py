"""The run folder has what is written while a model trains, and read back for its report."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_moe_lb import Stats

PER_LAYER = ("imbalance_before", "imbalance_after")
"""These are recorded as their mean and maximum over layers."""

PER_STEP = ("counts", "quota", "load_before", "load_after")
"""These are kept whole, of the first expert-parallel group."""

FIGURES = ("loss", "imbalance", "load", "served", "counts")


@dataclass(frozen=True)
class RunFolder:
    """A run folder says where things are in the folder of a run.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Names the folder of the newest checkpoints."""
        return self.path / "checkpoint"

    @property
    def metrics(self) -> Path:
        """Names the file with one JSON object per line: a step, a validation or a relocation."""
        return self.path / "metrics.jsonl"

    @property
    def counts(self) -> Path:
        """Names the file with arrays of the routing and load of each step, of the first expert-parallel group.

        Experts are numbered by place: the last relocation before a step says which expert was where.
        """
        return self.path / "counts.npz"

    @property
    def config(self) -> Path:
        """Names the file that says what was run, on what."""
        return self.path / "config.json"

    @property
    def summary(self) -> Path:
        """Names the file with the final numbers."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """Names the file with all of it for a reader."""
        return self.path / "report.html"

    @property
    def figures(self) -> list[Path]:
        """Names the files with the figures of the report."""
        return [self.path / f"{name}.png" for name in FIGURES]

    def clear(self) -> None:
        """Removes what an earlier run left here, and nothing else."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for file in (self.metrics, self.counts, self.config, self.summary, self.report, *self.figures):
            file.unlink(missing_ok=True)

    def rows(self, kind: str, last_step: int | None = None) -> list[dict]:
        """Reads the lines of `metrics.jsonl` of one kind, up to a step.

        Args:
            kind: `"step"`, `"validation"` or `"relocation"`.
            last_step: the last step that counts; `None` takes all.
        """
        return [row for row in self._rows(last_step) if row["kind"] == kind]

    def keep_until(self, last_step: int) -> None:
        """Drops the lines that were written after the checkpoint of `last_step`."""
        kept = self._rows(last_step)
        self.metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def _rows(self, last_step: int | None) -> list[dict]:
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if last_step is None or row["step"] <= last_step]


class Recorder:
    """A recorder appends to a run folder.

    Args:
        folder: the run folder, which exists already.
        first_step: the steps before it are kept, those from it on are written anew.
        writes: whether this process writes files; one of them should.
    """

    def __init__(self, folder: RunFolder, first_step: int, *, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.arrays: dict[str, list[np.ndarray | np.int32]] = {name: [] for name in ("steps", *PER_STEP)}
        if first_step > 1 and folder.counts.exists():
            with np.load(folder.counts) as earlier:
                kept = earlier["steps"] < first_step
                # Steps after the checkpoint are done again, and would stand there twice.
                self.arrays = {name: list(earlier[name][kept]) for name in self.arrays}
        if writes:
            folder.keep_until(first_step - 1)

    def step(self, step: int, loss: float, stats: Stats, num_tokens: int, step_time_s: float) -> dict:
        """Records one step, and returns its line.

        Args:
            step: the number of the step, from 1.
            loss: the training loss, in nats per byte.
            stats: the statistics of the layers, `[layers, D, ...]`.
            num_tokens: the bytes that the step learned from.
            step_time_s: the seconds that it took.
        """
        row = {"kind": "step", "step": step, "loss": loss, "tokens_per_s": num_tokens / step_time_s}
        row |= {"step_time_s": step_time_s} | summarised(stats)
        self._append(row)
        self.arrays["steps"].append(np.int32(step))
        for name in PER_STEP:
            self.arrays[name].append(np.asarray(getattr(stats, name))[:, 0].astype(np.int32))
        return row

    def validation(self, step: int, loss: float) -> None:
        """Records the loss of a validation, given in nats per byte, in nats and bits."""
        self._append({"kind": "validation", "step": step, "loss": loss, "loss_bits": loss / math.log(2)})

    def relocation(self, row: dict) -> None:
        """Records that experts moved; its `homes`, `[layers, E]`, are their places in the counts of the steps after."""
        self._append(row)

    def flush(self) -> None:
        """Writes the arrays; the lines are written as they come."""
        if self.writes and self.arrays["steps"]:
            stacked: dict[str, Any] = {name: np.stack(rows) for name, rows in self.arrays.items()}
            np.savez_compressed(self.folder.counts, **stacked)

    def _append(self, row: dict) -> None:
        if self.writes:
            # Each line is written as it comes: a run that is killed keeps all before.
            with self.folder.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")


def summarised(stats: Stats) -> dict[str, float]:
    """Makes the numbers of one step out of those of its layers and groups, `[layers, D, ...]`."""
    row: dict[str, float] = {}
    for name in PER_LAYER:
        values = np.asarray(getattr(stats, name))
        row |= {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}
    for name in ("straggler_before", "straggler_after"):
        row[name] = float(np.asarray(getattr(stats, name)).mean())
    row |= {"rounds_max": int(np.max(stats.rounds)), "rows_moved": int(np.sum(stats.rows_moved))}
    return row | {"weight_bytes_moved": float(np.sum(stats.weight_bytes_moved))}

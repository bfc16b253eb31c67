"""Metrics of a run: rows of steps and layers, the routing trace, and the summary.

`CountsTrace` collects the routing of each step in the format of `jax-moe-lb replay`.
"""

import io
import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_moe_lb import Stats, System, Topology
from jax_moe_lb.balancers import LayerCost
from jax_moe_lb.core import FileLimits, plain_plan
from jax_moe_lb.core.file_limits import DEFAULT_LIMITS, LimitError, parse_json, read_bytes
from jax_moe_lb.core.plan_file import read_named
from models.run_folder.files import free_sibling, is_number, naming, parts_in, read_object, write_whole

# Statistics recorded as mean and maximum over layers.
PER_LAYER = ("imbalance_before", "imbalance_after", "overload_factor", "max_violation")
MEANS = (*PER_LAYER, "straggler_before", "straggler_after")
SUMS = ("rows_moved", "weight_bytes_moved")


def layer_row(step: int, stats: Stats, system: System, topology: Topology) -> dict:
    """Return the row of `metrics.jsonl` for the layers of a step."""
    # Returns lists with one number per layer, reduced over its `D` groups: means, sums of moved rows and bytes, and
    # maxima of rounds and loads. `planner_s` is the planning time on the host for the first layer, in seconds.
    row: dict = {"kind": "layers", "step": step}
    row |= {name: np.asarray(getattr(stats, name)).mean(1).tolist() for name in MEANS}
    row |= {name: np.asarray(getattr(stats, name)).sum(1).tolist() for name in SUMS}
    row["rounds"] = np.asarray(stats.rounds).max(1).tolist()
    row["load_before_max"] = np.asarray(stats.load_before).max((1, 2)).tolist()
    row["load_after_max"] = np.asarray(stats.load_after).max((1, 2)).tolist()
    return row | {"planner_s": planner_s(np.asarray(stats.counts)[0, 0], system, topology)}


def planner_s(counts: np.ndarray, system: System, topology: Topology) -> float:
    """Measure the planning time of a system on the host, in seconds."""
    num_ranks, num_experts = counts.shape
    counts = counts.astype(np.int32)
    balancer = system.balancer.sized(LayerCost(num_copies=max(1, round(float(counts.sum()) / num_ranks))))
    start = plain_plan(counts, topology, num_experts // num_ranks + system.replica_slots)
    state = balancer.init(counts.shape)
    began = time.perf_counter()
    balancer.rebalance(counts, start, topology, state)
    return time.perf_counter() - began


class CountsTrace:
    """Routing counts of each step, of the first expert-parallel group."""

    def __init__(self) -> None:
        self.counts: list[np.ndarray] = []

    def add(self, stats: Stats) -> None:
        """Add the statistics `[layers, D, ...]` of a step."""
        self.counts.append(np.asarray(stats.counts)[:, 0].astype(np.int32))

    def write(self, path: Path) -> None:
        """Write an npz file with `steps` `[steps]`, from 1, and `counts` `[steps, layers, R, E]`."""
        packed = io.BytesIO()
        steps = np.arange(1, len(self.counts) + 1, dtype=np.int32)
        np.savez_compressed(packed, steps=steps, counts=np.stack(self.counts))
        write_whole(path, packed.getvalue())


MAX_SEGMENT_BYTES = 2**25  # bytes of counts after which a segment ends; each checkpoint writes a whole segment
FASTEST = 1  # level of compression: counts take 10 times as long at the default level, for a tenth fewer bytes

# Statistics recorded in full, for the first expert-parallel group.
PER_STEP = ("counts", "quota", "load_before", "load_after")


class RunFolder:
    """Paths of the files in the folder of a run."""

    def __init__(self, path: Path, limits: FileLimits = DEFAULT_LIMITS) -> None:
        self.path, self.limits = path, limits  # folder, and the limits of each file read
        self.checkpoints = path / "checkpoint"  # folder of the newest checkpoints
        self.damaged = path / "damaged"  # folder of checkpoints found damaged on resuming; they are kept but not used
        self.metrics = path / "metrics.jsonl"  # a JSON object per line: a step, a validation, or another kind of `rows`
        self.counts = self.counts_of(1)  # counts of the first segment
        self.config = path / "config.json"  # configuration and environment
        self.summary = path / "summary.json"  # final results
        self.report = path / "report.html"  # self-contained report
        self.tensorboard = path / "tensorboard"  # folder of event files
        self.profile = path / "profile"  # folder of profiler traces, for Perfetto and TensorBoard
        self.model = path / "model"  # final model of a checkpoint, in the format of `transformers`
        self.adapter = path / "adapter"  # final adapters of a checkpoint, in the format of PEFT

    def counts_of(self, segment: int) -> Path:
        """Return the file with the counts of a segment: consecutive steps with the same ranks and system."""
        # Segments also end at `MAX_SEGMENT_BYTES`.
        # Arrays of routing and load per step, of the first expert-parallel group. Experts are numbered by place: the
        # last relocation before a step gives the expert at each place.
        return self.path / ("counts.npz" if segment == 1 else f"counts-{segment}.npz")

    @property
    def segments(self) -> list[int]:
        """Segments with recorded counts, in order."""
        numbers = (path.stem.removeprefix("counts-") for path in self.path.glob("counts-*.npz"))
        later = sorted(int(number) for number in numbers if is_number(number) and int(number) > 1)
        return [1] * self.counts.exists() + later

    @property
    def files(self) -> list[Path]:
        """All paths written by a run; other files of the folder do not belong to it."""
        # The first is the one required for resuming.
        files = [self.config, self.metrics, self.counts, self.summary, self.report]
        files += [self.counts_of(segment) for segment in self.segments if segment > 1]
        folders = [self.checkpoints, self.damaged, self.tensorboard, self.profile, self.model, self.adapter]
        return [*files, *folders, self.path / "wandb"]

    @property
    def incomplete(self) -> list[Path]:
        """Temporary files and folders that a killed run has left."""
        return parts_in(self.path, {path.name for path in self.files})

    @property
    def has_run(self) -> bool:
        """Whether the folder contains files of a run; temporary files do not count."""
        return any(path.exists() for path in self.files)

    @property
    def is_own(self) -> bool:
        """Whether `config.json` is that of a run; that of a model, among others, has the same name."""
        try:
            return self.described().keys() >= {"config", "environment"}
        except (OSError, ValueError):
            return False

    def move_aside(self) -> Path:
        """Move the files of an earlier run into a new sibling folder, and return it."""
        aside = free_sibling(self.path, "before")
        aside.mkdir()
        for path in filter(Path.exists, [*self.files, *self.incomplete]):
            # Unlike a rename, this works across file systems, as needed if the run folder is a mount point.
            shutil.move(path, aside / path.name)
        return aside

    def rows(self, kind: str, last_step: int | None = None) -> list[dict]:
        """Return the rows of `metrics.jsonl` of one kind, up to a step."""
        return [row for row in self._rows(last_step) if row["kind"] == kind]

    def keep_until(self, last_step: int) -> None:
        """Delete rows after the checkpoint of `last_step`, and layouts without any step."""
        kept = [row for row in self._rows(last_step) if row["kind"] != "layout" or row["step"] < last_step]
        write_whole(self.metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def _rows(self, last_step: int | None) -> list[dict]:
        lines = self._metric_lines()
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(_row(line, self.limits))
            except ValueError as error:
                # A run killed during a write leaves an incomplete last line.
                if number < len(lines):
                    where = f"line {number} of {str(self.metrics)!r}"
                    raise ValueError(f"{where} is {line[:40]!r}; expected a JSON object") from error
        return [row for row in rows if last_step is None or row["step"] <= last_step]

    def _metric_lines(self) -> list[bytes]:
        if not self.metrics.exists():
            return []
        try:
            text = read_bytes(self.metrics, self.limits, "array_bytes")
            self.limits.check("values", sum(map(text.count, (b",", b":", b"[", b"{"))), "rows of {} values")
        except LimitError as error:
            raise LimitError(f"{str(self.metrics)!r}: {error}") from error
        return text.splitlines()

    def described(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return read_object(self.config, self.limits)

    @property
    def run_id(self) -> str:
        """Identifier of the run, recorded in its checkpoints."""
        return str(self.described().get("run_id", ""))

    def check_limits(self) -> None:
        """Raise `LimitError` if the counts of a segment exceed the limits; other faults are ignored."""
        for segment in self.segments:
            try:
                self.read_counts(segment)
            except LimitError:
                raise
            except ValueError:
                continue

    def read_counts(self, segment: int = 1) -> dict[str, np.ndarray] | None:
        """Return the arrays of a segment's counts, `None` if there are none."""
        path = self.counts_of(segment)
        if not path.exists():
            return None
        try:
            arrays, _ = read_named(path, ("steps", *PER_STEP), self.limits)
            read = {name: arrays[name] for name in ("steps", *PER_STEP)}
        except MemoryError:
            raise
        except LimitError as error:
            raise LimitError(f"counts in {str(path)!r}: {error}") from error
        except Exception as error:  # NumPy and zipfile raise many types for a damaged file
            raise ValueError(f"counts in {str(path)!r} cannot be read; expected the arrays of the run") from error
        if len({array.shape[:1] for array in read.values()}) != 1 or not read["steps"].ndim:
            raise ValueError(f"counts in {str(path)!r} have different lengths; expected the length of steps")
        return read

    def all_counts(self) -> list[dict[str, np.ndarray]]:
        """Return the arrays of all segments, without unreadable ones."""
        found = []
        for segment in self.segments:
            with suppress(ValueError):
                found.append(self.read_counts(segment))
        return [arrays for arrays in found if arrays is not None]


class Recorder:
    """Writer of the metrics of a run."""

    def __init__(
        self,
        folder: RunFolder,
        first_step: int,
        layout: dict[str, Any] | None = None,
        *,
        writes: bool,
        tell: Callable[[str], None] = print,
        watch: Callable[[dict], None] = lambda row: None,
    ) -> None:
        self.folder, self.writes, self.segment, self.watch = folder, writes, 1, watch
        self.layout = layout or {}
        self.arrays = self._no_arrays()
        if writes:
            folder.keep_until(first_step - 1)
            self._begin(first_step - 1, layout)
            self._take_up(first_step, tell)

    def _begin(self, last_step: int, layout: dict[str, Any] | None) -> None:
        """Continue the last segment if its layout is the same; otherwise start one."""
        before = self.folder.rows("layout")
        self.segment = before[-1]["segment"] if before else 1
        if layout is not None and (not before or any(before[-1].get(name) != layout[name] for name in layout)):
            self.segment += bool(before)
            self.other({"kind": "layout", "step": last_step, "segment": self.segment} | layout)

    def _take_up(self, first_step: int, tell: Callable[[str], None]) -> None:
        """Read the counts of earlier steps of this segment, and delete those to be replaced."""
        for segment in self.folder.segments:
            if segment > self.segment or first_step == 1:
                self.folder.counts_of(segment).unlink()
        if earlier := _counts_or_none(self.folder, self.segment, tell):
            # Steps after the checkpoint are repeated and would be duplicated.
            kept = earlier["steps"] < first_step
            self.arrays = {name: list(earlier[name][kept]) for name in self.arrays}
            rows = self.folder.rows("layout")
            missing = first_step - 1 - (rows[-1]["step"] if rows else 0) - len(np.unique(earlier["steps"][kept]))
            if missing > 0:
                tell(f"counts of {missing} steps are missing; the previous run ended before writing them")

    def step(
        self,
        step: int,
        loss: float,
        stats: Stats,
        num_tokens: int,
        step_time_s: float,
        accumulate: int = 1,
        others: Mapping[str, float] = MappingProxyType({}),
    ) -> dict:
        """Record one step, and return its row."""
        row = {"kind": "step", "step": step, "loss": loss, "tokens_per_s": num_tokens / step_time_s}
        row |= {"step_time_s": step_time_s} | router_losses(stats)
        row |= dict(others) | summarised(stats)
        self.other(row)
        if not self.writes:
            return row
        self.arrays["steps"] += [np.int32(step)] * accumulate
        for name in PER_STEP:
            # Keep the first group of each microbatch.
            groups = np.asarray(getattr(stats, name)).astype(np.int32)
            self.arrays[name] += [part[:, 0] for part in np.split(groups, accumulate, axis=1)]
        return row

    def validation(self, step: int, loss: float) -> None:
        """Record a validation loss, given in nats per token, in nats and bits."""
        self.other({"kind": "validation", "step": step, "loss": loss, "loss_bits": loss / math.log(2)})

    def other(self, row: dict | None) -> None:
        """Record a row of any kind; ignore `None`."""
        if self.writes and row is not None:
            # Write each row immediately, so that a killed run keeps all earlier rows.
            with naming(self.folder.metrics), self.folder.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self.watch(row)

    def flush(self) -> Callable[[], None]:
        """Return a function writing the rows and counts recorded so far to disk; it may run in any thread."""
        arrays = {name: list(rows) for name, rows in self.arrays.items()}
        write = partial(self._write, self.folder.counts_of(self.segment), arrays)
        if sum(row.nbytes for rows in arrays.values() for row in rows) >= MAX_SEGMENT_BYTES:
            # Otherwise the time of all checkpoints is quadratic in the number of steps.
            self.segment, self.arrays = self.segment + 1, self._no_arrays()
            step = int(arrays["steps"][-1])
            self.other({"kind": "layout", "step": step, "segment": self.segment} | self.layout)
        return write

    def _no_arrays(self) -> dict[str, list[np.ndarray | np.int32]]:
        return {name: [] for name in ("steps", *PER_STEP)}

    def _write(self, path: Path, arrays: dict[str, list[np.ndarray | np.int32]]) -> None:
        if self.writes and arrays["steps"]:
            packed = io.BytesIO()
            # As `numpy.savez_compressed`, which has no level.
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=FASTEST) as archive:
                for name, rows in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.stack(rows))
            write_whole(path, packed.getvalue())
            with naming(self.folder.metrics), self.folder.metrics.open("a") as file:
                os.fsync(file.fileno())


def _row(line: bytes, limits: FileLimits) -> dict:
    row = parse_json(line, limits)
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or type(row.get("step")) is not int:
        raise ValueError("expected kind and step")
    return row


def _counts_or_none(folder: RunFolder, segment: int, tell: Callable[[str], None]) -> dict[str, np.ndarray] | None:
    try:
        return folder.read_counts(segment)
    except LimitError:
        # The file is intact; `--file-limits` reads it.
        raise
    except ValueError as error:
        tell(f"{error}; the counts of earlier steps are lost")
        return None


def router_losses(stats: Stats) -> dict[str, float]:
    """Return the weighted router losses of a step, summed over layers: of balance, of z, and both."""
    both, z = (0.0 if loss is None else float(np.asarray(loss).sum(0).mean()) for loss in (stats.loss, stats.z_loss))
    return {"router_loss": both, "aux_loss": both - z, "z_loss": z}


def summarised(stats: Stats) -> dict[str, float]:
    """Reduce the statistics `[layers, D, ...]` of a step to scalars."""
    row: dict[str, float] = {}
    for name in PER_LAYER:
        values = np.asarray(getattr(stats, name))
        row |= {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}
    for name in ("straggler_before", "straggler_after"):
        row[name] = float(np.asarray(getattr(stats, name)).mean())
    row |= {"rounds_max": int(np.max(stats.rounds)), "rows_moved": int(np.sum(stats.rows_moved))}
    return row | {"weight_bytes_moved": float(np.sum(stats.weight_bytes_moved))}


RECENT_STEPS = 50  # number of last steps over which varying metrics are averaged


def summarise(folder: RunFolder) -> dict:
    """Return the final loss, balance and speed of a run."""
    steps = folder.rows("step")
    recent, validation = steps[-RECENT_STEPS:], folder.rows("validation")[-1]
    data = folder.described()["data"]
    entropy_nats = data["unigram_entropy_nats"]

    means = {"train_loss_nats": "loss", "straggler_before_tokens": "straggler_before"}
    means |= {"straggler_after_tokens": "straggler_after", "rows_moved": "rows_moved"}
    means |= {f"imbalance_{when}": f"imbalance_{when}_mean" for when in ("before", "after")}
    means |= {"weight_bytes_moved": "weight_bytes_moved"}
    return {
        "steps": steps[-1]["step"],
        "unit": data["unit"],
        "validation_loss_nats": validation["loss"],
        "validation_loss_bits": validation["loss_bits"],
        "unigram_entropy_nats": entropy_nats,
        "unigram_entropy_bits": entropy_nats / math.log(2),
        **{name: mean(row[metric] for row in recent) for name, metric in means.items()},
        "one_round_share": mean(row["rounds_max"] == 1 for row in recent),
        "rounds_max": max(row["rounds_max"] for row in recent),
        # Use the median, as steps with a checkpoint are slower.
        "tokens_per_s": median(row["tokens_per_s"] for row in recent),
        "step_time_s": median(row["step_time_s"] for row in recent),
    }

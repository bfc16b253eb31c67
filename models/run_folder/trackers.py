"""Loggers of a run: a status line, TensorBoard, Weights & Biases and profiles of some steps."""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.run_folder.metrics import RunFolder

LINE = "loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  imbalance {imbalance_before_mean:.2f} -> "
LINE += "{imbalance_after_mean:.2f}  rounds {rounds_max}"


class StepLine:
    """This line follows the steps of a run on a terminal; elsewhere only `note` prints.

    Args:
        console: where it is printed.
        done: the steps that are behind already.
        steps: the steps in all.
    """

    def __init__(self, console: Console, done: int, steps: int) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[line]}"))
        self.progress = Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
        )
        self.task = self.progress.add_task("train", total=steps, completed=done, line="compiling")

    def __enter__(self) -> "StepLine":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def show(self, row: dict) -> None:
        """Show the recorded numbers of a step."""
        self.progress.update(self.task, completed=row["step"], line=LINE.format(**row))

    def note(self, row: dict, validation_loss: float) -> None:
        """Print a line that stays."""
        text = f"step {row['step']:>5}  validation {validation_loss:.3f}  " + LINE.format(**row)
        self.progress.console.print(text, highlight=False, soft_wrap=True)


SKIPPED_STEPS = 2
"""A trace begins after so many steps, of which the first are slower than all others."""


@dataclass(frozen=True)
class MetricLoggerConfig:
    """These options say who watches a run, beside `metrics.jsonl`, which always has all lines.

    Args:
        tensorboard: whether event files are written into the folder `tensorboard` of the run.
        wandb: the project of Weights & Biases, whose account is that of `wandb login`; `None` for none.
        profile: how many steps are traced into the folder `profile` of the run; 0 for none, 3 are usual.

    Raises:
        ValueError: a number is below 0, or a package is not installed.
    """

    tensorboard: bool = False
    wandb: str | None = None
    profile: int = 0

    def __post_init__(self) -> None:
        if self.profile < 0:
            raise ValueError(f"profile is {self.profile}; expected a number of steps, at least 0")
        for option, package, extra in (("tensorboard", "tensorboardX", "train"), ("wandb", "wandb", "wandb")):
            if getattr(self, option) and importlib.util.find_spec(package) is None:
                raise ValueError(f"{option} is set, but {package} is not installed; expected pip install '.[{extra}]'")


class MetricLogger:
    """A watcher passes the lines of `metrics.jsonl` on; it is a context that closes what it opened.

    Args:
        folder: the run folder.
        watching: who watches.
        first_step: the first step of this part of the run; what was told of it and later ones before is replaced.
        writes: whether this process tells them; one of them should. All of them trace.
        config: what is told of the run itself.
    """

    def __init__(
        self, folder: RunFolder, watching: MetricLoggerConfig, first_step: int, *, writes: bool, config: dict[str, Any]
    ) -> None:
        self.traced = range(first_step + SKIPPED_STEPS, first_step + SKIPPED_STEPS + watching.profile)
        self.tracing, self.profile = False, folder.profile
        self.board: Any = None
        self.run: Any = None
        if writes and watching.tensorboard:
            board = importlib.import_module("tensorboardX")
            self.board = board.SummaryWriter(str(folder.tensorboard), purge_step=first_step)
        if writes and watching.wandb is not None:
            # It writes beside the metrics; without an account it says what to do.
            wandb = importlib.import_module("wandb")
            name = folder.path.absolute().name
            self.run = wandb.init(project=watching.wandb, dir=str(folder.path), name=name, config=config)

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_tracing()
        if self.board is not None:
            self.board.close()
        if self.run is not None:
            self.run.finish(exit_code=int(error is not None))

    def tell(self, row: dict) -> None:
        """Pass a line of `metrics.jsonl` on.

        Args:
            row: the line, with its `kind` and `step`.
        """
        if self.board is None and self.run is None:
            return
        numbers = scalars(row)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, row["step"])
        if self.run is not None:
            self.run.log(numbers, step=row["step"])

    def before(self, step: int) -> None:
        """Begin to trace, if this is the first step of those that are traced."""
        if step in self.traced and not self.tracing:
            jax.profiler.start_trace(str(self.profile), create_perfetto_trace=True)
            self.tracing = True

    def after(self, step: int) -> Path | None:
        """End the trace if this was the last of its steps, and returns where it is."""
        if not self.tracing or step + 1 in self.traced:
            return None
        self._stop_tracing()
        return self.profile

    def _stop_tracing(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False


def scalars(row: dict) -> dict[str, float]:
    """Name the numbers of a line of `metrics.jsonl` as they are shown: `step/loss`, `layers/imbalance_after/3`.

    Args:
        row: the line. Of lists each entry is a number of its own, from 1 for layers and from 0 for hosts.
    """
    kind, found = row["kind"], {}
    for name, value in row.items():
        if isinstance(value, bool | str) or name in ("kind", "step") or value is None:
            continue
        if isinstance(value, int | float):
            found[f"{kind}/{name}"] = float(value)
        elif all(isinstance(entry, int | float) for entry in value):
            first = 1 if kind == "layers" else 0
            found |= {f"{kind}/{name}/{i}": float(entry) for i, entry in enumerate(value, first)}
    return found

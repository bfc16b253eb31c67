"""Loggers of a run: a status line, TensorBoard, Weights & Biases and profiles of some steps."""

import importlib
import importlib.util
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from models.config import TrainConfig
from models.console import show
from models.run_folder.metrics import RunFolder

LINE = "loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  imbalance {imbalance_before_mean:.2f} -> "
LINE += "{imbalance_after_mean:.2f}  rounds {rounds_max}"

LOG_INTERVAL = 10  # steps between two lines if the output is no terminal


class StepLine:
    """Progress line on a terminal; elsewhere a line for every tenth step, and after each validation."""

    def __init__(self, console: Console, done: int, steps: int) -> None:
        # A narrow terminal cuts the metrics, not the steps and the remaining time.
        metrics = TextColumn("{task.fields[line]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(8), TimeRemainingColumn(), metrics)
        self.progress = Progress(
            *columns, console=console, disable=not console.is_terminal, transient=True, expand=True
        )
        self.steps = steps
        self.task = self.progress.add_task("train", total=steps, completed=done, line="compiling")

    def __enter__(self) -> "StepLine":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, row: dict) -> None:
        """Show the metrics of a step."""
        self.progress.update(self.task, completed=row["step"], line=LINE.format(**row))
        if self.progress.disable and row["step"] % LOG_INTERVAL == 0:
            rates = "lr {learning_rate:.1e}  gradient norm {gradient_norm:.2f}  epoch {epoch:.2f}  ".format(**row)
            show(self.progress.console, f"step {row['step']:>5} of {self.steps}  {rates}" + LINE.format(**row))

    def note(self, row: dict, validation_loss: float) -> None:
        """Print a permanent line with the metrics of a step and a validation loss."""
        line = f"step {row['step']:>5}  validation {validation_loss:.3f}  " + LINE.format(**row)
        show(self.progress.console, line)


SKIPPED_STEPS = 2  # number of steps before a trace begins; the first steps are slower than the rest


@dataclass(frozen=True)
class MetricLoggerConfig:
    """Metric loggers of a run, besides `metrics.jsonl`, which always has all rows."""

    tensorboard: bool = False  # if True, write event files into the folder `tensorboard` of the run
    wandb: str | None = None  # project of Weights & Biases, under the account of `wandb login`; `None` disables it
    # Number of steps to trace into the folder `profile` of the run; 0 disables tracing, and 3 is usual
    profile: int = 0

    def __post_init__(self) -> None:
        if self.profile < 0:
            raise ValueError(f"profile is {self.profile}; expected a number of steps, at least 0")
        for option, package, extra in (("tensorboard", "tensorboardX", "train"), ("wandb", "wandb", "wandb")):
            if getattr(self, option) and importlib.util.find_spec(package) is None:
                raise ValueError(f"{option} is set, but {package} is not installed; expected pip install '.[{extra}]'")


class MetricLogger(AbstractContextManager["MetricLogger"]):
    """Forwarder of the rows of `metrics.jsonl` to loggers, and a context manager closing them."""

    def __init__(
        self, folder: RunFolder, watching: MetricLoggerConfig, first_step: int, config: TrainConfig, *, writes: bool
    ) -> None:
        # A short run skips fewer steps.
        first_traced = min(first_step + SKIPPED_STEPS, max(first_step, config.steps + 1 - watching.profile))
        self.traced = range(first_traced, min(first_traced + watching.profile, config.steps + 1))
        self.tracing, self.profile = False, folder.profile
        self.board: Any = None
        self.run: Any = None
        if writes and watching.tensorboard:
            board = importlib.import_module("tensorboardX")
            self.board = board.SummaryWriter(str(folder.tensorboard), purge_step=first_step)
        if writes and watching.wandb is not None:
            # wandb writes into the run folder; without an account it prints instructions.
            wandb = importlib.import_module("wandb")
            name = folder.path.absolute().name
            self.run = wandb.init(project=watching.wandb, dir=str(folder.path), name=name, config=asdict(config))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop_tracing()
        if self.board is not None:
            self.board.close()
        if self.run is not None:
            self.run.finish(exit_code=int(error is not None))

    def tell(self, row: dict) -> None:
        """Forward a row of `metrics.jsonl`."""
        if self.board is None and self.run is None:
            return
        numbers = scalars(row)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, row["step"])
        if self.run is not None:
            self.run.log(numbers, step=row["step"])

    def before(self, step: int) -> None:
        """Start the trace if this is its first step."""
        if step in self.traced and not self.tracing:
            jax.profiler.start_trace(str(self.profile), create_perfetto_trace=True)
            self.tracing = True

    def after(self, step: int) -> Path | None:
        """Stop the trace if this was its last step, and return its folder."""
        if not self.tracing or step + 1 in self.traced:
            return None
        self._stop_tracing()
        return self.profile

    def _stop_tracing(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False


def scalars(row: dict) -> dict[str, float]:
    """Return the numbers of a row of `metrics.jsonl` by display name: `step/loss`, `layers/imbalance_after/3`."""
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

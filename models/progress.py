"""`StepLine` shows a run while it trains."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
        """Shows the recorded numbers of a step."""
        self.progress.update(self.task, completed=row["step"], line=LINE.format(**row))

    def note(self, row: dict, validation_loss: float) -> None:
        """Prints a line that stays."""
        text = f"step {row['step']:>5}  validation {validation_loss:.3f}  " + LINE.format(**row)
        self.progress.console.print(text, highlight=False, soft_wrap=True)

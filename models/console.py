"""Messages, exit codes and shared options of the command lines."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from jax_moe_lb.core.file_limits import MOST_FACTOR

USER_ERRORS = 2  # exit code of a process ended by a `UserError`


class UserError(Exception):
    """Invalid request of the user; the program prints it as one line and exits with `USER_ERRORS`."""


FileLimitsOption = Annotated[
    int, typer.Option("--file-limits", min=1, max=MOST_FACTOR, help="Factor on the size limits of input files.")
]


def show(console: Console, text: str) -> None:
    """Print a line to standard output as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def say(line: str) -> None:
    """Print one line to standard error in a single write, not interleaved with other threads and processes."""
    sys.stderr.write(f"{' '.join(line.split())}\n")
    sys.stderr.flush()

"""Whatever is wrong with what a user gave becomes one line on stderr, and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

BAD_INPUT, CANNOT_PRINT = 2, 1

MOST_CHARACTERS = 500
"""A line on stderr has so many characters of a longer message: names and lists of strangers may have any length."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the errors of bad input into one line and `BAD_INPUT`."""
    try:
        yield
    except (ValueError, OSError) as error:
        print_error(str(error))
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def printing() -> Iterator[None]:
    """Ends a command whose stdout takes no more with `CANNOT_PRINT`: in one line, or in none if its reader has gone."""
    try:
        yield
    except OSError as error:
        # The interpreter's last flush must not complain of what is still to be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print_error(f"standard output cannot be written: {error.strerror}; expected room for the answer")
        raise typer.Exit(CANNOT_PRINT) from error


def print_error(message: str) -> None:
    """Prints one line on stderr: without its middle if it is long, and without what a terminal would obey."""
    line = " ".join(message.split())
    if len(line) > MOST_CHARACTERS:
        # What was expected stands at the end.
        line = f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"
    typer.echo(f"error: {''.join(map(_printable, line))}", err=True)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()

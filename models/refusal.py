"""A `Refused` ends the program with one line and an exit code of its own."""

import sys

REFUSED = 2
"""The exit code of a process that does not begin, or goes no further, because of what the user asked for."""


class Refused(Exception):
    """The program ends with this line, since what the user asked for cannot be done."""


def say(line: str) -> None:
    """Prints one line to standard error at once, whole, whatever other threads and processes print."""
    sys.stderr.write(f"{' '.join(line.split())}\n")
    sys.stderr.flush()

"""`read_yaml` reads a small YAML file of a stranger: what would grow, hang or run code is refused before it does."""

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.sim.limits import shown

MOST_BYTES = 2**18
"""A file has at most so many bytes; the presets have less than 1000."""

MOST_NODES = 10_000
"""A file has at most so many values, with those that aliases repeat."""

MOST_DEPTH = 32
"""Values lie at most so deep inside each other; the format needs 5."""

MOST_CHARACTERS = 1000
"""A value has at most so many characters; a number of that many digits is still read at once."""


def read_yaml(path: Path) -> Any:
    """Reads what a file holds.

    Args:
        path: a regular file in UTF-8; pipes and devices, which may never end, are refused.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, no YAML, or beyond a limit; the message does not name the file.
    """
    text = _text(path)
    try:
        _check_events(text)
        # Other loaders of YAML run code that the file names.
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, " if mark else ""
        raise ValueError(f"is no YAML: {where}{_shortened(error.problem or error.context)}") from error
    except _LimitError:
        raise
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {_shortened(error)}") from error
    except Exception as error:  # dates and tags with bad values make PyYAML raise nearly anything
        raise ValueError(f"is no YAML: a value cannot be read, {_shortened(error)}") from error


class _LimitError(ValueError):
    """A file is beyond a limit."""


def _text(path: Path) -> str:
    # Opening a pipe waits for a writer, so that what it is must be known before.
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
        raise ValueError("is no regular file; expected one that ends in .yaml")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES} bytes; expected at most as many")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is no YAML: {error}") from error


def _check_events(text: str) -> None:
    """Refuses what is too much or too deep while nothing is built of it yet.

    An alias counts as all that stands behind it. So a file that doubles itself by aliases in aliases, or merges such,
    is refused at the line where it becomes too large.
    """
    nodes = 0
    sizes: dict[str | None, int] = {}
    # Of each collection that has not ended: its anchor, and the values before it.
    started: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = started.pop()
            sizes[anchor] = nodes - before
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent) and any(anchor == event.anchor for anchor, _ in started):
            raise _LimitError(f"repeats {shown(event.anchor)} inside itself in line {_line(event)}; expected an end")
        # An alias that nobody has defined is PyYAML's to refuse.
        nodes += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if isinstance(event, yaml.CollectionStartEvent):
            started.append((event.anchor, nodes - 1))
        if isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            _check("characters in a value", len(event.value), MOST_CHARACTERS, event)
        _check("values, those that aliases repeat included,", nodes, MOST_NODES, event)
        _check("values inside each other", len(started), MOST_DEPTH, event)


def _check(what: str, number: int, most: int, event: Any) -> None:
    if number > most:
        raise _LimitError(f"has {number} {what} by line {_line(event)}; expected at most {most}")


def _line(event: Any) -> int:
    return event.start_mark.line + 1


def _shortened(value: Any) -> str:
    # The words of PyYAML contain names of any length; `shown` puts quotes around what it shows.
    return shown(str(value))[1:-1]

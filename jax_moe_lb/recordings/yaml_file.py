"""Limits on sizes in files and arguments, and a reader of YAML files from untrusted sources.

The limits are far above usual sizes and fit into the memory of one machine; larger requests are refused at once.
`simulate_uniform` holds no counts and accepts more ranks and experts. `read_yaml` refuses content that would expand,
hang or run code.
"""

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.core.topology import INT32_MAX

MOST_LAYERS = 1000
"""A model has at most so many layers; the presets have up to 94."""

MOST_WIDTH = 2**17
"""A model's `hidden` and `inner` are at most this; the presets have up to 14336."""

MOST_POINTS = 1000
"""A curve of measured GEMMs has at most so many points; `calibrate` measures 6."""

MOST_ENTRIES = 2**24
"""The counts of a layer have at most so many entries, one for each rank and expert: 4096 of both."""

MOST_COUNTS = 2**28
"""The counts of all layers that are planned apart have at most so many entries together, which take 1 GiB."""

MOST_RANK_LAYERS = 2**21
"""A timeline has a start and an end of every task for each rank, in all layers; at most so many pairs of the two."""

MOST_PLANNED_RANKS = 256
"""`advise` draws counts for at most so many ranks; larger machines are judged by a sample, see `sim/uniform.py`."""

PLAN_S, PLAN_RANKS, PLAN_POWER = 0.03, 128, 2.5
"""A plan takes about so many seconds on so many ranks, and grows with this power of them: measured for 128 to 1024."""

TOLD_S, TOLD_BYTES = 30.0, 2**30
"""What takes less is done without a word before it."""

MOST_SHOWN = 60
"""A message shows so many characters of a value."""


def shown(value: Any) -> str:
    """Returns a value as messages have it: what Python calls it, without the middle if that is long.

    Args:
        value: what a user gave.

    Examples:
        >>> shown("400 Gbps"), shown("9" * 1000)
        ("'400 Gbps'", "'99999999999999999999999999999999999999999999 ... 999999999'")
    """
    # Python refuses to write out integers of thousands of digits.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 10000 else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 15]} ... {text[-10:]}"


def check_entries(layers: int, num_ranks: int, num_experts: int) -> None:
    """Refuses counts that memory would not hold, before anybody makes them.

    Args:
        layers: the layers that are planned apart.
        num_ranks: `R`.
        num_experts: `E`, at least `R`.

    Raises:
        ValueError: there are more than `MOST_ENTRIES` in a layer, or `MOST_COUNTS` in all.
    """
    entries = num_ranks * num_experts
    if entries > MOST_ENTRIES or layers * entries > MOST_COUNTS:
        raise ValueError(
            f"counts of {layers} layers, {num_ranks} ranks and {num_experts} experts are too many; expected at most "
            f"{MOST_ENTRIES} entries in a layer and {MOST_COUNTS} in all (simulate_uniform needs none)"
        )


def check_tokens(tokens: int, per_token: int, num_ranks: int) -> None:
    """Refuses tokens whose copies, over all ranks of a layer, are more than planners count in int32.

    Args:
        tokens: `T`, the tokens of each rank.
        per_token: `K`.
        num_ranks: `R`.

    Raises:
        ValueError: there are more.
    """
    most = INT32_MAX // (per_token * num_ranks)
    if tokens > most:
        raise ValueError(
            f"tokens is {shown(tokens)}; expected at most {most} with {per_token} experts per token on {num_ranks} "
            f"ranks, as the copies of a layer are counted in int32"
        )


def check_timeline(layers: int, num_ranks: int) -> None:
    """Refuses timelines that memory would not hold.

    Args:
        layers: the layers of the model.
        num_ranks: `R`.

    Raises:
        ValueError: there are more than `MOST_RANK_LAYERS` pairs of both.
    """
    if layers * num_ranks > MOST_RANK_LAYERS:
        raise ValueError(
            f"layers is {shown(layers)} on {num_ranks} ranks; expected at most {MOST_RANK_LAYERS // num_ranks} layers "
            f"on so many"
        )


def forecast(plans: int, layers: int, num_ranks: int, num_experts: int) -> str | None:
    """Says what a large simulation will need; `None` for a small one. It is rough: machines and planners differ.

    Args:
        plans: how many layers are planned, over all steps and systems.
        layers: how many layers of counts are held.
        num_ranks: `R`.
        num_experts: `E`.

    Examples:
        >>> forecast(plans=4, layers=4, num_ranks=1024, num_experts=1024)
        >>> forecast(plans=4, layers=4, num_ranks=2048, num_experts=2048)
        '2048 ranks and 2048 experts: 4 plans take about 2 min, and counts and exchanges take 0.5 GB'
    """
    plan_s = plans * PLAN_S * (num_ranks / PLAN_RANKS) ** PLAN_POWER
    # Counts in four bytes, and some matrices between ranks in eight.
    num_bytes = 4 * layers * num_ranks * num_experts + 12 * 8 * num_ranks**2
    if plan_s < TOLD_S and num_bytes < TOLD_BYTES:
        return None
    took = f"{plan_s / 60:.0f} min" if plan_s > 90 else f"{plan_s:.0f} s"
    planning = f"{plans} plans take about {took}, and " if plans else ""
    return f"{num_ranks} ranks and {num_experts} experts: {planning}counts and exchanges take {num_bytes / 1e9:.1f} GB"


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

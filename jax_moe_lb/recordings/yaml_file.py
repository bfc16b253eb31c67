"""Size limits of arguments, and a reader of untrusted YAML files.

The limits are far above usual sizes and fit into the memory of one machine; larger requests are rejected immediately.
`simulate_uniform` stores no counts and accepts more ranks and experts. `read_yaml` rejects content with excessive
expansion, excessive depth or executable tags.
"""

from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.core.file_limits import FileLimits, LimitError, read_bytes
from jax_moe_lb.core.topology import INT32_MAX

MOST_LAYERS = 1000
"""Maximum number of layers of a model; the presets have up to 94."""

MOST_WIDTH = 2**17
"""Maximum of a model's `hidden` and `inner`; the presets have up to 14336."""

MOST_POINTS = 1000
"""Maximum number of points of a measured GEMM curve; `calibrate` measures 6."""

MOST_ENTRIES = 2**24
"""Maximum number of counts per layer, one per rank and expert: 4096 of both."""

MOST_COUNTS = 2**28
"""Maximum number of counts of all separately planned layers; they take 1 GiB."""

MOST_RANK_LAYERS = 2**21
"""Maximum product of ranks and layers of a timeline, which stores the start and end of every task of each rank."""

MOST_PLANNED_RANKS = 256
"""Maximum number of ranks for which `advise` samples all counts; larger machines use `sim/uniform.py`."""

PLAN_S, PLAN_RANKS, PLAN_POWER = 0.03, 128, 2.5
"""Model of the planning time: seconds for this number of ranks, growing with this power of it; measured for 128 to 1024
ranks.
"""

TOLD_S, TOLD_BYTES = 30.0, 2**30
"""Thresholds in seconds and bytes for announcing the cost of a simulation."""

MOST_SHOWN = 60
"""Maximum number of characters of a value in a message."""


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message, with the middle of long values omitted.

    Args:
        value: any user input.

    Returns:
        Text of at most `MOST_SHOWN` characters.

    Examples:
        >>> shown("400 Gbps"), shown("9" * 1000)
        ("'400 Gbps'", "'99999999999999999999999999999999999999999999 ... 999999999'")
    """
    # Python rejects converting integers of thousands of digits to text.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 10000 else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 15]} ... {text[-10:]}"


def check_entries(layers: int, num_ranks: int, num_experts: int) -> None:
    """Check the number of counts against the memory limit, before allocating them.

    Args:
        layers: number of separately planned layers.
        num_ranks: `R`.
        num_experts: `E`, at least `R`.

    Raises:
        ValueError: a layer has more than `MOST_ENTRIES` counts, or all layers more than `MOST_COUNTS`.
    """
    entries = num_ranks * num_experts
    if entries > MOST_ENTRIES or layers * entries > MOST_COUNTS:
        raise ValueError(
            f"counts of {layers} layers, {num_ranks} ranks and {num_experts} experts are too many; expected at most "
            f"{MOST_ENTRIES} entries in a layer and {MOST_COUNTS} in all (simulate_uniform needs none)"
        )


def check_tokens(tokens: int, per_token: int, num_ranks: int) -> None:
    """Check that the token copies of all ranks of a layer fit int32.

    Args:
        tokens: `T`, tokens per rank.
        per_token: `K`.
        num_ranks: `R`.

    Raises:
        ValueError: `T * K * R` exceeds int32.
    """
    most = INT32_MAX // (per_token * num_ranks)
    if tokens > most:
        raise ValueError(
            f"tokens is {shown(tokens)}; expected at most {most} with {per_token} experts per token on {num_ranks} "
            f"ranks, as the copies of a layer are counted in int32"
        )


def check_timeline(layers: int, num_ranks: int) -> None:
    """Check the size of a timeline against the memory limit.

    Args:
        layers: number of layers of the model.
        num_ranks: `R`.

    Raises:
        ValueError: the product of both exceeds `MOST_RANK_LAYERS`.
    """
    if layers * num_ranks > MOST_RANK_LAYERS:
        raise ValueError(
            f"layers is {shown(layers)} on {num_ranks} ranks; expected at most {MOST_RANK_LAYERS // num_ranks} layers"
        )


def forecast(plans: int, layers: int, num_ranks: int, num_experts: int) -> str | None:
    """Return a rough estimate of time and memory of a large simulation; `None` for a small one.

    Args:
        plans: number of planned layers, over all steps and systems.
        layers: number of layers with counts in memory.
        num_ranks: `R`.
        num_experts: `E`.

    Returns:
        One line of text, or `None` below `TOLD_S` and `TOLD_BYTES`.

    Examples:
        >>> forecast(plans=4, layers=4, num_ranks=1024, num_experts=1024)
        >>> forecast(plans=4, layers=4, num_ranks=2048, num_experts=2048)
        '2048 ranks and 2048 experts: 4 plans take about 2 min, and counts and exchanges take 0.5 GB'
    """
    plan_s = plans * PLAN_S * (num_ranks / PLAN_RANKS) ** PLAN_POWER
    # Counts in 4 bytes, and about 12 matrices between ranks in 8 bytes.
    num_bytes = 4 * layers * num_ranks * num_experts + 12 * 8 * num_ranks**2
    if plan_s < TOLD_S and num_bytes < TOLD_BYTES:
        return None
    took = f"{plan_s / 60:.0f} min" if plan_s > 90 else f"{plan_s:.0f} s"
    planning = f"{plans} plans take about {took}, and " if plans else ""
    return f"{num_ranks} ranks and {num_experts} experts: {planning}counts and exchanges take {num_bytes / 1e9:.1f} GB"


def read_yaml(path: Path, limits: FileLimits = FileLimits()) -> Any:
    """Read a YAML file.

    Args:
        path: regular file in UTF-8; pipes and devices are rejected, because they may never end.
        limits: limits of its bytes, values and depth.

    Returns:
        The parsed content.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a regular file or not valid YAML, or exceeds a limit; the message does not name the
            file.
    """
    text = _text(path, limits)
    try:
        _check_events(text, limits)
        # Other YAML loaders can run code named in the file.
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, " if mark else ""
        raise ValueError(f"is not valid YAML: {where}{_shortened(error.problem or error.context)}") from error
    except (LimitError, MemoryError):
        raise
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {_shortened(error)}") from error
    except Exception as error:  # PyYAML raises many types for dates and tags with invalid values
        raise ValueError(f"is not valid YAML: a value cannot be read, {_shortened(error)}") from error


def _text(path: Path, limits: FileLimits) -> str:
    try:
        content = read_bytes(path, limits, "yaml_bytes")
    except LimitError as error:
        raise LimitError(
            f"has {error}" if path.is_file() else "is not a regular file; expected a .yaml file"
        ) from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid YAML: {error}") from error


def _check_events(text: str, limits: FileLimits) -> None:
    """Check size and depth before constructing any value.

    An alias counts as all values of its anchor. A file growing exponentially by nested aliases or merges is therefore
    rejected at the first line exceeding the limit.
    """
    nodes = 0
    sizes: dict[str | None, int] = {}
    # Anchor of each open collection, and the number of values before it.
    started: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = started.pop()
            sizes[anchor] = nodes - before
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent) and any(anchor == event.anchor for anchor, _ in started):
            raise LimitError(
                f"repeats {shown(event.anchor)} inside itself in line {_line(event)}; expected no recursion"
            )
        # PyYAML rejects undefined aliases.
        nodes += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if isinstance(event, yaml.CollectionStartEvent):
            started.append((event.anchor, nodes - 1))
        by = f"by line {_line(event)}"
        if isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            limits.check("yaml_characters", len(event.value), f"has {{}} characters in a value {by}")
        limits.check("yaml_values", nodes, f"has {{}} values, including repetitions by aliases, {by}")
        limits.check("yaml_depth", len(started), f"has {{}} nested values {by}")


def _line(event: Any) -> int:
    return event.start_mark.line + 1


def _shortened(value: Any) -> str:
    # PyYAML's messages contain names of any length; `shown` adds quotes, removed here.
    return shown(str(value))[1:-1]

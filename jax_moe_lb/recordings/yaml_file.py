"""Reader of untrusted YAML files; it rejects content with excessive expansion, excessive depth or executable tags."""

import re
from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import FileLimits, LimitError, read_bytes


def read_yaml(path: Path, limits: FileLimits = FileLimits()) -> Any:
    """Read a YAML file."""
    text = _text(path, limits)
    try:
        _check_events(text, limits)
        return _Loader(text).get_single_data()
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


class _Loader(yaml.SafeLoader):
    """Loader that rejects repeated keys, of which PyYAML keeps the last value."""

    # Other loaders than the safe one can run code named in the file.

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


# YAML 1.1 takes an exponent without a point or a sign, as in 1e-3, for text.
EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$", re.ASCII)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


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
    """Check size and depth before constructing any value."""
    # An alias counts as all values of its anchor. A file growing exponentially by nested aliases or merges is therefore
    # rejected at the first line exceeding the limit.
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


def _shortened(value: object) -> str:
    # PyYAML's messages contain names of any length; `shown` adds quotes, removed here.
    return shown(str(value))[1:-1]

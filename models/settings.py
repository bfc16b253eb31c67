"""Text settings of config dataclasses: `--set section.key=value`, `--system`, `--mesh` and YAML files.

All functions iterate over dataclass fields, so a new field of a section becomes a new key.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.layer.system import parse_system
from jax_moe_lb.layer.systems import make_system
from jax_moe_lb.recordings.yaml_file import read_yaml
from models.config import ParallelConfig, TrainConfig

Given = dict[str, Any]  # given fields by name; a section is a nested dictionary

ConfigT = TypeVar("ConfigT")

# Keys of the section `parallel` by their name in `--mesh`.
MESH_AXES = {"data": "data_parallel", "expert": "expert_parallel", "domain": "ranks_per_domain", "stage": "stages"}
LIST = "list"  # value of `--set` to print all keys
KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
WORDS = {"true": True, "false": False}
MAX_MATCHES, CUTOFF = 3, 0.7  # maximum number of suggested keys in a message, and their minimum similarity


def read_assignments(texts: Iterable[str]) -> Given:
    """Parse the options `--set`; a later one overrides an earlier one."""
    given: Given = {}
    for text in texts:
        path, equals, value = text.partition("=")
        section, _, key = path.partition(".")
        keys = _kinds(_sections().get(section, NoneType))
        if not equals or key not in keys:
            raise ValueError(f"--set {text}: key is {shown(path)}; expected {_matches(path)}")
        try:
            given.setdefault(section, {})[key] = _converted(path, keys[key], value)
        except ValueError as error:
            raise ValueError(f"--set {text}: {error}") from error
    return _with_system_options(given)


def read_system(text: str) -> Given:
    """Parse the option `--system`."""
    name, values = parse_system(text)
    make_system(name, {})
    return {"parallel": {"system": name} | values}


def _with_system_options(given: Given) -> Given:
    """Split the text `parallel.system` into its name and options."""
    if (text := given.get("parallel", {}).get("system")) is None:
        return given
    others = {key: value for key, value in given["parallel"].items() if key != "system"}
    return combined(given | {"parallel": others}, read_system(text))


def read_mesh(text: str) -> Given:
    """Parse the option `--mesh`."""
    values: Given = {}
    for pair in text.split(","):
        axis, equals, value = pair.partition("=")
        if not equals or axis not in MESH_AXES:
            raise ValueError(
                f"--mesh {text}: key is {shown(axis)}; expected KEY=VALUE, a key of {', '.join(MESH_AXES)}"
            )
        try:
            key = MESH_AXES[axis]
            if key in values:
                raise ValueError(f"{axis} is given twice; expected it once")
            values[key] = _converted(f"parallel.{key}", _kinds(ParallelConfig)[key], value)
        except ValueError as error:
            raise ValueError(f"--mesh {text}: {error}") from error
    return {"parallel": values}


def read_file(path: Path, limits: FileLimits = FileLimits()) -> Given:
    """Read a YAML file with the sections of `TrainConfig`, and top-level `steps` and `seed`."""
    try:
        found = read_yaml(path, limits)
    except OSError as error:
        raise ValueError(f"config is {str(path)!r}; expected a readable file: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"config {str(path)!r} {error}") from error
    try:
        return _with_system_options(read_mapping(TrainConfig, {} if found is None else found))
    except ValueError as error:
        raise ValueError(f"config {str(path)!r}: {error}") from error


def layered(*layers: Given) -> Given:
    """Merge the fields of several sources; later sources override earlier ones."""
    whole: Given = {}
    for given in layers:
        for name, value in given.items():
            whole[name] = layered(whole.get(name, {}), value) if isinstance(value, dict) else value
    return whole


def combined(*parts: Given) -> Given:
    """Merge the fields of several options of one command line."""
    whole: Given = {}
    for part in parts:
        for section, values in part.items():
            if isinstance(values, dict) and (twice := whole.get(section, {}).keys() & values.keys()):
                raise ValueError(f"{section}.{min(twice)} is given by two options; expected one of them")
        whole = layered(whole, part)
    return whole


def updated(config: ConfigT, given: Mapping[str, Any], prefix: str = "") -> ConfigT:
    """Return the config with the given fields replaced."""
    fields: Any = config
    changes = {
        name: updated(getattr(config, name), value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in given.items()
    }
    with in_section(prefix.rstrip(".")):
        changed: ConfigT = dataclasses.replace(fields, **changes)
    return changed


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Prefix the messages of errors, which start with a key, with the section, if any, in place of a class."""
    try:
        yield
    except ValueError as error:
        key = re.sub(r"^[A-Z]\w*\.", "", str(error))
        raise ValueError(f"{section}.{key}" if section else key) from error


def list_keys(config: TrainConfig) -> str:
    """Return all keys of `--set` as lines, with type, value and meaning."""
    rows = []
    for section, kind in _sections().items():
        meanings, values = typing.get_type_hints(kind, include_extras=True), getattr(config, section)
        for key, hint in _kinds(kind).items():
            value, meaning = getattr(values, key), meanings[key].__metadata__[-1]
            shown_value = "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            rows.append((f"{section}.{key}", _expected(hint), shown_value, meaning))
    rows = [("key", "type", "value", ""), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def _sections() -> dict[str, Any]:
    return {name: kind for name, kind in _kinds(TrainConfig).items() if dataclasses.is_dataclass(kind)}


def _kinds(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, {} for another type."""
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def read_mapping(kind: type, found: Any, prefix: str = "") -> Given:
    """Return the fields of a configuration in a mapping of YAML or JSON; another key or type raises `ValueError`."""
    if not isinstance(found, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the file'} is {shown(found)}; expected a mapping of keys to values")
    kinds, given = _kinds(kind), {}
    for name, value in found.items():
        path = f"{prefix}{name}"
        if name not in kinds:
            options = difflib.get_close_matches(str(name), kinds, MAX_MATCHES) or kinds
            raise ValueError(f"key is {shown(path)}; expected one of {', '.join(f'{prefix}{one}' for one in options)}")
        section = dataclasses.is_dataclass(kinds[name])
        given[name] = read_mapping(kinds[name], value, f"{path}.") if section else _converted(path, kinds[name], value)
    return given


def _converted(path: str, hint: Any, raw: Any) -> Any:
    """Convert text, or a value of a YAML file, to the type of a field."""
    kind, optional = _kind(hint)
    if kind is str and raw == "":
        # An empty path would be the working directory.
        raise ValueError(f"{path} is ''; expected a string that is not empty")
    if isinstance(raw, str):
        if optional and raw == "none" and kind is not str:
            return None
        try:
            return WORDS[raw] if kind is bool else kind(raw)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path} is {shown(raw)}; expected {_expected(hint)}") from error
    if (raw is None and optional) or type(raw) is kind:
        return raw
    if kind is float and type(raw) is int:
        return float(raw)
    raise ValueError(f"{path} is {shown(raw)}; expected {_expected(hint)}")


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of a field without `None`, and whether `None` is allowed."""
    kinds = typing.get_args(hint) or (hint,)
    return next(kind for kind in kinds if kind is not NoneType), NoneType in kinds


def _expected(hint: Any) -> str:
    kind, optional = _kind(hint)
    return KIND_NAMES[kind] + " or none" * (optional and kind is not str)


def _matches(path: str) -> str:
    """Return keys similar to an unknown one, for a message."""
    paths = [f"{section}.{key}" for section, kind in _sections().items() for key in _kinds(kind)]
    section, _, name = path.rpartition(".")
    if path in paths:
        return f"{path}=VALUE"
    if not section and name in _kinds(TrainConfig).keys() - _sections().keys():
        return f"the option --{name}"
    same = [one for one in paths if one.partition(".")[2] == name]
    here = [one for one in paths if one.partition(".")[0] == (section or name)]
    if close := same or difflib.get_close_matches(path, here or paths, MAX_MATCHES, CUTOFF):
        return " or ".join(close[:MAX_MATCHES])
    return f"one of {', '.join(here)}" if here else f"section.key=value; --set {LIST} prints all keys"

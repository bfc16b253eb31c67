"""Reader of the `config.json` of a Hugging Face checkpoint."""

import copy
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError, parse_json, read_bytes
from models.decoder.rope import Rope, yarn_scale
from models.run_folder.files import read_object

MOST_NUMBER = 1e30  # largest magnitude of a number
LAYER_TYPES = ("sliding_attention", "full_attention")  # kinds of attention in `layer_types`
MOST_LAYERS, MOST_EXPERTS = 2**10, 2**12  # maximum number of layers, and of experts per layer

# Names of the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Names of the rotary settings, which depend on the version of `transformers`; the first overrides the second.
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
SHOWN_NAME = 64  # maximum length of the name of an unknown field in a message
_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("without_effect.yaml").read_text())
TRAINING_NOISE: list[str] = _TABLES["training_noise"]  # dropout and noise, of training alone

# Values without effect by name, besides null and false, which have none in any field; `None` for every value.
WITHOUT_EFFECT: dict[str, list[Any] | None] = {
    **dict.fromkeys(itertools.chain(*_TABLES["any_value"].values(), TRAINING_NOISE)),
    **_TABLES["values"],
}

# Rotary settings with an effect by `rope_type`, besides `rope_type` and `rope_theta`.
ROPE_SETTINGS: dict[str, list[str]] = _TABLES["rope_settings"]

# Lists with a kind per layer, and their kind without effect.
PLAIN_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


class Fields:
    """Typed access to the fields of a `config.json`; a missing or invalid field raises an error with its name."""

    # `read` has the names of the fields read, and `ignored` those without effect beside the values of others.

    def __init__(self, text: str, limits: FileLimits = FileLimits()) -> None:
        try:
            self.raw = parse_json(text.encode(), limits)
        except LimitError as error:
            raise LimitError(f"config.json: {error}") from error
        except ValueError as error:
            raise ValueError(f"config.json is not valid JSON: {error}") from error
        if not isinstance(self.raw, dict):
            raise ValueError("config.json is not a JSON object")
        self.text, self.limits = text, limits
        self.defaults: Mapping[str, Any] = {}
        self.read: set[str] = set()
        self.ignored: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the same fields with the architecture's defaults of absent ones; `null` has no default."""
        fields = copy.copy(self)
        fields.defaults, fields.read, fields.ignored = defaults, set(), set()
        return fields

    def get(self, name: str) -> Any:
        """Return the value of a field, or its default in the architecture; `None` if there is neither."""
        self.read.add(name)
        return self.raw.get(name, self.defaults.get(name))

    def ignore(self, *names: str) -> None:
        """Mark fields as without effect beside the values of other fields."""
        self.ignored.update(names)

    def refuse_unread(self) -> None:
        """Raise `ValueError` if a field that was never read may change the outputs; see `WITHOUT_EFFECT`."""
        for name in sorted(self.raw.keys() - self.read - self.ignored):
            if has_effect(name, self.raw[name]):
                self._refuse(name, self.raw[name], " or ".join(["no value", *map(str, WITHOUT_EFFECT.get(name) or ())]))
        settings = self.rope_settings()
        known = ROPE_SETTINGS.get(settings["rope_type"], tuple(settings))
        for key in sorted(settings.keys() - {"rope_theta", "rope_type", *known}):
            name = f"rope_parameters.{key}"
            if name not in self.read and settings[key] is not False:
                self._refuse(name, settings[key], "no value")

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        raise ValueError(
            f"config.json: {_shown_name(name)} is {shown(value)}; expected {expected} for this architecture. "
            "Remove a field without effect"
        )

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**31) -> int:
        """Return an integer field between `least` and `most`; `default` replaces an absent field."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"config.json: {name} is {shown(value)}; expected an integer, {least} to {most}")
        return value

    def integer_if(self, condition: bool, name: str) -> int:
        """Return an integer field if the condition holds, and otherwise 0, as the field then has no effect."""
        if condition:
            return self.integer(name)
        self.ignore(name)
        return 0

    def num_layers(self) -> int:
        """Return the number of layers, at most `MOST_LAYERS`."""
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def num_further(self) -> int:
        """Return the number of multi-token prediction layers, under either of the two names in use (default 0)."""
        name = "num_nextn_predict_layers"
        return self.integer(name if name in self.raw else "num_mtp_layers", 0, most=MOST_LAYERS)

    def num_experts(self, name: str) -> int:
        """Return the number of experts, under `name` or `num_local_experts`, its name in newer transformers."""
        # Its other names must have the same value.
        number = self.integer(name if name in self.raw else "num_local_experts", most=MOST_EXPERTS)
        for other in EXPERT_COUNTS:
            self.require(other, number)
        return number

    def number(self, name: str, default: float | None = None, *, above: float | None = None) -> float:
        """Return a number above a bound as a float; `default` replaces an absent field."""
        return checked_number(name, self.get(name), default, above)

    def flag(self, name: str, default: bool) -> bool:
        """Return a Boolean field; `default` replaces an absent field."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ValueError(f"config.json: {name} is {shown(value)}; expected true or false")
        return value

    def head_dim(self) -> int:
        """Return the channels per head; absent, the heads share the width of the model."""
        return self.integer("head_dim", self.integer("hidden_size") // max(self.integer("num_attention_heads"), 1))

    def windows(self, kinds: list[str]) -> tuple[int | None, ...]:
        """Return the attention window of each layer, `None` for full attention; empty if all layers are full."""
        kinds = self.kinds("layer_types", LAYER_TYPES) or kinds
        if LAYER_TYPES[0] not in kinds:
            self.ignore("sliding_window")
            return ()
        window = self.integer("sliding_window", least=1)
        return tuple(window if kind == LAYER_TYPES[0] else None for kind in kinds)

    def kinds(self, name: str, known: tuple[str, ...]) -> list[str]:
        """Return a list with a kind for each layer, empty if the field is absent or empty."""
        num_layers, kinds = self.num_layers(), self.get(name) or []
        is_valid = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in known for kind in kinds)
        if kinds and not is_valid:
            raise ValueError(f"config.json: {name} is {str(kinds)[:80]}; expected {num_layers} of {', '.join(known)}")
        return kinds

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, empty if the field is absent."""
        value = self.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise ValueError(f"config.json: {name} is {shown(value)}; expected a list of integers")
        return tuple(value)

    def require(self, name: str, expected: Any) -> None:
        """Raise `ValueError` if the field is present with a value other than `expected`, the only supported one."""
        self.read.add(name)
        value = self.raw.get(name)
        if value is not None and (value != expected or isinstance(value, bool) != isinstance(expected, bool)):
            raise ValueError(f"config.json: {name} is {shown(value)}; expected {expected!r}, the only supported value")

    def rope_settings(self) -> dict[str, Any]:
        """Return the rotary-embedding settings, with `rope_type` and, if it is given, `rope_theta`."""
        # A setting with two different values is an error.
        self.read.update(ROPE_OBJECTS)
        found = [self.raw.get(name) for name in ROPE_OBJECTS]
        given = [_rope_object(value) for value in found if value is not None]
        if "rope_theta" in self.raw:
            given.append(_rope_object({"rope_theta": self.raw["rope_theta"]}))
        named = {"rope_theta": self.get("rope_theta"), "rope_type": "default"}
        defaults = self.defaults.get("rope_parameters") if found == [None, None] else None
        settings = {**named, **(defaults or {})}
        for values in reversed(given):
            settings |= values
        for key, value in ((key, value) for values in given for key, value in values.items()):
            if value != settings[key]:
                values = f"{shown(settings[key])} and {shown(value)}"
                raise ValueError(f"config.json: {_shown_name(key)} is {values}; expected one value")
        return {key: value for key, value in settings.items() if value is not None}

    def partial_rotary_factor(self, default: float | None = None) -> float:
        """Return the share of rotated channels, a rotary setting or a field of its own; both must agree."""
        name = "partial_rotary_factor"
        share = self.rope_settings().get(name)
        self.read.add(f"rope_parameters.{name}")
        if share is None:
            return self.number(name, default)
        self.require(name, share)
        return checked_number(f"rope_parameters.{name}", share)

    def rope_number(self, name: str, default: float | None = None, *, above: float | None = 0.0) -> float:
        """Return a rotary setting above a bound as a float; `default` replaces an absent one."""
        return checked_number(f"rope_parameters.{name}", self.rope_settings().get(name), default, above)

    def rope(self, dim: int, *, interleaved: bool = False) -> Rope:
        """Return the rotary embedding of attention heads with `dim` rotated channels."""
        settings, factor = self.rope_settings(), self.rope_number("factor", 1.0)
        kind, truncate = settings["rope_type"], settings.get("truncate", True)
        if type(truncate) is not bool:
            raise ValueError(f"config.json: rope_parameters.truncate is {shown(truncate)}; expected true or false")
        positions = self.integer("max_position_embeddings", 4096, least=1)
        return Rope(
            dim=dim,
            base=self.rope_number("rope_theta", 1e4, above=1.0),
            kind=kind,
            factor=factor,
            original_positions=math.ceil(self.rope_number("original_max_position_embeddings", positions)),
            low_frequency=self.rope_number("low_freq_factor", 1.0),
            high_frequency=self.rope_number("high_freq_factor", 4.0),
            beta_fast=self.rope_number("beta_fast", 32.0),
            beta_slow=self.rope_number("beta_slow", 1.0),
            truncate=truncate,
            attention_factor=self._attention_factor(factor) if kind == "yarn" else 1.0,
            interleaved=interleaved,
        )

    def _attention_factor(self, factor: float) -> float:
        above, below = (self.rope_number(name, 0.0, above=None) for name in ("mscale", "mscale_all_dim"))
        default = yarn_scale(factor, above) / yarn_scale(factor, below) if above and below else yarn_scale(factor)
        return self.rope_number("attention_factor", default)


def _shown_name(name: str) -> str:
    return name if name.isprintable() and len(name) <= SHOWN_NAME else shown(name)


def _rope_object(settings: Any) -> dict[str, Any]:
    """Return rotary settings without `null`, and with `rope_type` as the name of the kind."""
    if not isinstance(settings, dict):
        raise ValueError(f"config.json: rope_parameters is {shown(settings)}; expected an object")
    given = {key: value for key, value in settings.items() if value is not None}
    kind = given.pop("type", None)
    if kind is not None and given.setdefault("rope_type", kind) != kind:
        raise ValueError(f"config.json: rope_type is {shown(given['rope_type'])} and type {shown(kind)}; expected one")
    return given


def checked_number(name: str, value: Any, default: float | None = None, above: float | None = None) -> float:
    """Return a field's value above a bound as a float; `default` replaces `None`."""
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER
    if not is_number or (above is not None and value <= above):
        bound = "" if above is None else f" above {above:g}"
        raise ValueError(f"config.json: {name} is {shown(value)}; expected a finite number{bound}")
    return float(value)


def read_settings(path: Path, limits: FileLimits = FileLimits()) -> dict[str, Any]:
    """Read an optional JSON object of a checkpoint; empty if the file does not exist."""
    return read_object(path, limits) if path.exists() else {}


def read_fields(folder: Path, limits: FileLimits = FileLimits()) -> Fields:
    """Read the `config.json` of a checkpoint folder."""
    path = folder / "config.json"
    try:
        content = read_bytes(path, limits)
    except LimitError as error:
        raise LimitError(f"{path}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"checkpoint is {str(folder)!r}; expected a folder with config.json: {error.strerror}"
        ) from error
    try:
        return Fields(content.decode(), limits)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error.reason}") from error


def has_effect(name: str, value: Any) -> bool:
    """Return whether an unread field may change the outputs."""
    if value is None or value is False:
        return False
    if name in PLAIN_KINDS and isinstance(value, list):
        return any(kind != PLAIN_KINDS[name] for kind in value)
    values = WITHOUT_EFFECT.get(name, ())
    # True equals 1 in Python.
    return values is not None and not any(value == one and value is not True for one in values)

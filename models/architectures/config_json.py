"""`Fields` reads a `config.json` of Hugging Face."""

import json
from pathlib import Path
from typing import Any

from models.decoder.rope import Rope, yarn_scale

MOST_BYTES = 2**20
"""A `config.json` has at most so many bytes."""

MOST_LAYERS, MOST_EXPERTS = 2**10, 2**12
"""A model has at most so many layers, and experts in each."""


class Fields:
    """These are the fields of a `config.json`; an absent one is an error that names it.

    Args:
        text: the JSON text.

    Raises:
        ValueError: it is no JSON object.
    """

    def __init__(self, text: str) -> None:
        try:
            self.raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"config.json is no JSON: {error}") from error
        if not isinstance(self.raw, dict):
            raise ValueError("config.json is no JSON object")
        self.text = text

    def integer(self, name: str, default: int | None = None, most: int = 2**31) -> int:
        """Read an integer from 0 to `most`."""
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"config.json: {name} is {str(value)[:40]!r}; expected an integer, 0 to {most}")
        return value

    def num_layers(self) -> int:
        """Read the number of layers, which is no such that listing them would take long."""
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def num_further(self) -> int:
        """Read how many layers predict further tokens; older and newer files have another name for it."""
        name = "num_nextn_predict_layers"
        return self.integer(name if name in self.raw else "num_mtp_layers", 0, most=MOST_LAYERS)

    def num_experts(self, name: str) -> int:
        """Read the number of experts, which newer versions of `transformers` call the same in all models."""
        return self.integer(name if name in self.raw else "num_local_experts", most=MOST_EXPERTS)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number."""
        return _number(name, self.raw.get(name), default)

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ValueError(f"config.json: {name} is {value!r}; expected true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Read a list of integers, which is empty where it is absent."""
        value = self.raw.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise ValueError(f"config.json: {name} is {value!r}; expected a list of integers")
        return tuple(value)

    def require(self, name: str, expected: Any) -> None:
        """Refuse a field that is there with another value than the one that is supported."""
        value = self.raw.get(name)
        if value is not None and value != expected:
            raise ValueError(f"config.json: {name} is {value!r}; expected {expected!r}, which alone is supported")

    def rope_settings(self) -> dict[str, Any]:
        """Collect the settings of rotary positions, whose place depends on the version of `transformers`."""
        settings = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(settings, dict):
            raise ValueError(f"config.json: rope_parameters is {settings!r}; expected an object")
        named = {"rope_theta": self.raw.get("rope_theta"), "type": "default"}
        return {key: value for key, value in {**named, **settings}.items() if value is not None}

    def rope(self, dim: int, *, base: float, interleaved: bool = False) -> Rope:
        """Make the rotary positions of heads with so many rotated channels.

        Args:
            dim: the channels.
            base: the base where there is none in the file.
            interleaved: whether neighbours make a pair.
        """
        settings = self.rope_settings()
        kind = settings.get("rope_type", settings["type"])

        def number(name: str, default: float) -> float:
            return _number(f"rope_parameters.{name}", settings.get(name), default)

        factor = number("factor", 1.0)
        return Rope(
            dim=dim,
            base=number("rope_theta", base),
            kind=kind,
            factor=factor,
            original_positions=int(
                number("original_max_position_embeddings", self.integer("max_position_embeddings", 4096))
            ),
            low_frequency=number("low_freq_factor", 1.0),
            high_frequency=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(settings.get("truncate", True)),
            attention_factor=_attention_factor(settings, factor) if kind == "yarn" else 1.0,
            interleaved=interleaved,
        )


def _attention_factor(settings: dict[str, Any], factor: float) -> float:
    given, above, below = (settings.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return _number("rope_parameters.attention_factor", given, None)
    if above and below:
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor)


def _number(name: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name} is {value!r}; expected a number")
    return float(value)


def read_fields(folder: Path) -> Fields:
    """Read the `config.json` of a folder.

    Args:
        folder: the folder of a checkpoint.

    Raises:
        ValueError: it is not there, or is no JSON object of a sensible size.
    """
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"checkpoint is {str(folder)!r}; expected a folder with config.json: {error.strerror}"
        ) from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path}: expected at most {MOST_BYTES} bytes")
    try:
        return Fields(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error.reason}") from error

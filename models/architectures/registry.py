"""Registry of architectures by the `model_type` of a `config.json`."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import UNLIMITED
from models.architectures import configs
from models.architectures.config_json import ROPE_OBJECTS, Fields
from models.architectures.parameter_map import Names, ParameterSlice, Stack, packed_slice, pieces
from models.decoder.config import DecoderConfig

# Architectures, multimodal models and published models by name.
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())


@dataclass(frozen=True)
class Architecture:
    """Reader of one architecture, and its row in `tables.yaml`."""

    config: Callable[[Fields], DecoderConfig]  # function from the `config.json` fields to the `DecoderConfig`
    class_name: str  # its class in `transformers`
    defaults: Mapping[str, Any]  # values of absent fields
    tiny: Mapping[str, Any]  # fields of a small model
    names: Names  # names of the checkpoint tensors
    has_further: bool = False  # if True, multi-token prediction layers are supported
    required: Mapping[str, Any] = field(default_factory=dict)  # the only supported values of some fields
    ignored: Sequence[str] = ()  # fields without effect beside the values of others

    def read(self, fields: Fields) -> DecoderConfig:
        """Return the configuration of fields with the defaults of this architecture."""
        for name, value in self.required.items():
            fields.require(name, value)
        fields.ignore(*self.ignored)
        return self.config(fields)


def _names(given: Mapping[str, Any]) -> Names:
    read = {name: _tuples(value) for name, value in given.items()}
    return Names(**read | ({"stack": Stack(**read["stack"])} if "stack" in read else {}))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _architecture(kind: str, row: dict[str, Any]) -> Architecture:
    config = getattr(configs, row.get("config", kind))
    return Architecture(**row | {"config": config, "names": _names(row.get("names", {}))})


# Supported architectures by `model_type`.
ARCHITECTURES = {kind: _architecture(kind, row) for kind, row in TABLES["architectures"].items()}


@dataclass(frozen=True)
class TextPart:
    """Text model of a multimodal architecture, whose tensors are inside of `language_model`."""

    kind: str  # `model_type` of the same model as a checkpoint of its own
    class_name: str  # its class in `transformers`
    text_kind: str  # `model_type` of its `text_config`
    defaults: Mapping[str, Any]  # values of absent fields that differ from those of `kind`
    # Names of the tensors in files, in one of two layouts, if they differ from those of `kind`
    names: tuple[Names, ...] | None = None
    are_tied: bool = False  # value of an absent `tie_word_embeddings`


# Text parts of multimodal checkpoints by `model_type`.
TEXT_PARTS = {
    kind: TextPart(**row | {"names": tuple(map(_names, row.get("names", ()))) or None})
    for kind, row in TABLES["text_parts"].items()
}


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text part of a multimodal checkpoint, as of a checkpoint of its own."""
    kind, text = fields.raw.get("model_type"), fields.raw.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return fields
    part = TEXT_PARTS[kind]
    if not isinstance(text, dict) or text.get("model_type", part.text_kind) != part.text_kind:
        raise ValueError(f"config.json: text_config is {shown(text)}; expected an object of {part.text_kind}")
    text = {name: value for name, value in text.items() if value is not None}
    for name in ROPE_OBJECTS:
        if isinstance(text.get(name), dict):
            text[name] = {key: value for key, value in text[name].items() if key not in configs.IMAGE_POSITIONS}
    above = {"tie_word_embeddings": part.are_tied} | fields.raw
    shared = {name: above[name] for name in ("tie_word_embeddings", "dtype", "quantization_config") if name in above}
    named = {"model_type": part.kind, "architectures": [part.class_name]}
    return Fields(json.dumps({**part.defaults, **text, **shared, **named}), fields.limits)


def architecture_of(fields: Fields) -> Architecture:
    """Return the architecture of a `config.json`."""
    kind = fields.raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"config.json: model_type is {shown(kind)}; "
            f"expected one of {', '.join(sorted([*ARCHITECTURES, *TEXT_PARTS]))}"
        )
    return ARCHITECTURES[kind]


def configured(
    fields: Fields,
    *,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    predict_further: bool = False,
) -> DecoderConfig:
    """Return the `DecoderConfig` of a `config.json`."""
    kind, fields = fields.raw.get("model_type"), text_fields(fields)
    architecture = architecture_of(fields)
    num_further = fields.num_further() if predict_further and architecture.has_further else 0
    if predict_further and not num_further:
        raise ValueError("predict_further is True; expected False, as config.json has no multi-token prediction layers")
    try:
        known = fields.with_defaults(architecture.defaults)
        config = architecture.read(known)
        known.refuse_unread()
    except ValueError as error:
        message = str(error).removeprefix("config.json: ").removeprefix("DecoderConfig.")
        raise ValueError(f"config.json: {message}") from error
    # A slice of an expert's tensor has eight values: see `ParameterSlice`.
    num_values = 8 * 3 * (config.num_layers + num_further) * max(config.num_experts, 1)
    fields.limits.check("values", num_values, "config.json: expert tensors with {} values")
    return dataclasses.replace(
        config,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        num_further=num_further,
        text_of=kind if kind in TEXT_PARTS else "",
        max_positions=known.integer("max_position_embeddings", 0) or None,
    )


def pieces_of(config: DecoderConfig, *, packed: bool = False) -> list[ParameterSlice]:
    """Return the slices of all checkpoint tensors of a model."""
    # The limits have been checked when the file was read.
    names = architecture_of(Fields(config.source, UNLIMITED)).names
    if not packed:
        return list(pieces(config, names))
    return [packed_slice(piece, config, names) for piece in pieces(config, names)]


def layouts_in_file(config: DecoderConfig) -> list[list[ParameterSlice]]:
    """Return the slices in the two layouts that a file may have, usually of published files and packed."""
    part = TEXT_PARTS.get(config.text_of)
    if part is not None and part.names is not None:
        return [list(pieces(config, names)) for names in part.names]
    return [pieces_of(config), pieces_of(config, packed=True)]

"""`architecture_of` finds what reads a checkpoint, by the `model_type` of its `config.json`."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from models.architectures import deepseek_v3, glm4_moe, gpt_oss, mixtral, qwen3_moe
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class Architecture:
    """An architecture is what one file of this folder says.

    Args:
        config: reads the sizes from a `config.json`.
        pieces: names all tensors of a checkpoint of such sizes.
        has_further: whether it may have layers that predict further tokens.
    """

    config: Callable[[Fields], DecoderConfig]
    pieces: Callable[[DecoderConfig], Iterable[ParameterSlice]]
    has_further: bool = False


ARCHITECTURES = {
    "deepseek_v3": Architecture(deepseek_v3.config, deepseek_v3.pieces, has_further=True),
    "glm4_moe": Architecture(glm4_moe.config, glm4_moe.pieces, has_further=True),
    "gpt_oss": Architecture(gpt_oss.config, gpt_oss.pieces),
    "mixtral": Architecture(mixtral.config, mixtral.pieces),
    "qwen3_moe": Architecture(qwen3_moe.config, qwen3_moe.pieces),
}
"""The supported architectures, by `model_type`."""


def architecture_of(fields: Fields) -> Architecture:
    """Find the architecture of a `config.json`.

    Raises:
        ValueError: it is another.
    """
    kind = fields.raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {kind!r}; expected one of {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[kind]


def configured(
    fields: Fields,
    *,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    scan_layers: bool = False,
    predict_further: bool = False,
) -> DecoderConfig:
    """Read the sizes of a model from its `config.json`.

    Args:
        fields: the file.
        compute_dtype: the dtype of activations and products.
        param_dtype: the dtype of parameters.
        scan_layers: whether equal layers are one loop.
        predict_further: whether the model has its layers that predict further tokens.

    Raises:
        ValueError: the architecture or one of its options is not supported, or a size does not fit; or no layer
            predicts further tokens.
    """
    architecture = architecture_of(fields)
    num_further = fields.num_further() if predict_further and architecture.has_further else 0
    if predict_further and not num_further:
        raise ValueError("predict_further is True; expected False, as config.json has no layers for it")
    return dataclasses.replace(
        architecture.config(fields),
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        scan_layers=scan_layers,
        num_further=num_further,
    )


def pieces_of(config: DecoderConfig) -> list[ParameterSlice]:
    """Name all tensors of a checkpoint, and what they are in the model."""
    return list(architecture_of(Fields(config.source)).pieces(config))

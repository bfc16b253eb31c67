"""Registry of architectures by the `model_type` of a `config.json`."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import UNLIMITED
from models.architectures import (
    deepseek_v3,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    llama4,
    minimax_m2,
    mixtral,
    phimoe,
    qwen3_moe,
)
from models.architectures.config_json import Fields
from models.architectures.packed import packed_slice
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class Architecture:
    """Reader of one architecture."""

    config: Callable[[Fields], DecoderConfig]  # function from the `config.json` fields to the `DecoderConfig`
    # Function from the `DecoderConfig` to the slices of all checkpoint tensors
    pieces: Callable[[DecoderConfig], Iterable[ParameterSlice]]
    defaults: Mapping[str, Any]  # values of absent fields, those of `transformers`. Sizes have none.
    has_further: bool = False  # if True, multi-token prediction layers are supported
    # Parts of tensor names in published files, each with its replacement in the modules of `transformers` 5, in this
    # order
    names_in_memory: tuple[tuple[str, str], ...] = ()


_MLP = (".block_sparse_moe.", ".mlp.")

ARCHITECTURES = {
    "deepseek_v3": Architecture(deepseek_v3.config, deepseek_v3.pieces, deepseek_v3.DEFAULTS, has_further=True),
    "dots1": Architecture(glm4_moe.dots1_config, glm4_moe.pieces, glm4_moe.DOTS1_DEFAULTS),
    "ernie4_5_moe": Architecture(
        ernie4_5_moe.config,
        ernie4_5_moe.pieces,
        ernie4_5_moe.DEFAULTS,
        names_in_memory=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    ),
    "glm4_moe": Architecture(glm4_moe.config, glm4_moe.pieces, glm4_moe.DEFAULTS, has_further=True),
    "glm4_moe_lite": Architecture(deepseek_v3.config, deepseek_v3.pieces, deepseek_v3.GLM_LITE_DEFAULTS),
    "gpt_oss": Architecture(gpt_oss.config, gpt_oss.pieces, gpt_oss.DEFAULTS),
    "granitemoe": Architecture(
        granitemoe.config, granitemoe.pieces, granitemoe.DEFAULTS, names_in_memory=granitemoe.NAMES_IN_MEMORY
    ),
    "kimi_k2": Architecture(deepseek_v3.config, deepseek_v3.pieces, deepseek_v3.KIMI_DEFAULTS),
    "llama4_text": Architecture(llama4.config, llama4.pieces, llama4.DEFAULTS),
    "minimax_m2": Architecture(minimax_m2.config, minimax_m2.pieces, minimax_m2.DEFAULTS, names_in_memory=(_MLP,)),
    "mixtral": Architecture(mixtral.config, mixtral.pieces, mixtral.DEFAULTS, names_in_memory=(_MLP,)),
    "olmoe": Architecture(qwen3_moe.olmoe_config, qwen3_moe.pieces, qwen3_moe.OLMOE_DEFAULTS),
    "phimoe": Architecture(
        phimoe.config, phimoe.pieces, phimoe.DEFAULTS, names_in_memory=(_MLP, (".gate.weight", ".router.weight"))
    ),
    "qwen2_moe": Architecture(qwen3_moe.qwen2_config, qwen3_moe.pieces, qwen3_moe.QWEN2_DEFAULTS),
    "qwen3_moe": Architecture(qwen3_moe.config, qwen3_moe.pieces, qwen3_moe.DEFAULTS),
    "solar_open": Architecture(glm4_moe.config, glm4_moe.pieces, glm4_moe.SOLAR_DEFAULTS),
}
"""Supported architectures by `model_type`."""


def architecture_of(fields: Fields) -> Architecture:
    """Return the architecture of a `config.json`."""
    kind = fields.raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"config.json: model_type is {shown(kind)}; expected one of {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[kind]


def configured(
    fields: Fields,
    *,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    scan_layers: bool = False,
    predict_further: bool = False,
) -> DecoderConfig:
    """Return the `DecoderConfig` of a `config.json`."""
    architecture = architecture_of(fields)
    num_further = fields.num_further() if predict_further and architecture.has_further else 0
    if predict_further and not num_further:
        raise ValueError("predict_further is True; expected False, as config.json has no multi-token prediction layers")
    try:
        known = fields.with_defaults(architecture.defaults)
        config = architecture.config(known)
        known.refuse_unread()
    except ValueError as error:
        message = str(error).removeprefix("config.json: ")
        raise ValueError(f"config.json: {message}") from error
    # A slice of an expert's tensor has eight values: see `ParameterSlice`.
    num_values = 8 * 3 * (config.num_layers + num_further) * max(config.num_experts, 1)
    fields.limits.check("values", num_values, "config.json: expert tensors with {} values")
    return dataclasses.replace(
        config,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        scan_layers=scan_layers,
        num_further=num_further,
        max_positions=known.integer("max_position_embeddings", 0) or None,
    )


def pieces_of(config: DecoderConfig, *, packed: bool = False) -> list[ParameterSlice]:
    """Return the slices of all checkpoint tensors of a model."""
    # The limits have been checked when the file was read.
    architecture = architecture_of(Fields(config.source, UNLIMITED))
    if not packed:
        return list(architecture.pieces(config))
    return [packed_slice(piece, config, architecture.names_in_memory) for piece in architecture.pieces(config)]

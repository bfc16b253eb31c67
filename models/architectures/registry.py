"""Registry of architectures by the `model_type` of a `config.json`."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import UNLIMITED
from models.architectures import configs
from models.architectures.config_json import ROPE_OBJECTS, Fields
from models.architectures.parameter_map import Names, ParameterSlice, Stack, packed_slice, pieces
from models.decoder.config import DecoderConfig

USUAL = Names()


@dataclass(frozen=True)
class Architecture:
    """Reader of one architecture."""

    config: Callable[[Fields], DecoderConfig]  # function from the `config.json` fields to the `DecoderConfig`
    defaults: configs.Defaults  # values of absent fields
    names: Names = USUAL  # names of the checkpoint tensors
    has_further: bool = False  # if True, multi-token prediction layers are supported


SHARED = Names(shared="mlp.shared_expert")
SPARSE_BLOCK = Names(
    moe="block_sparse_moe",
    bias="e_score_correction_bias",
    projections=("w1", "w3", "w2"),
    in_memory=((".block_sparse_moe.", ".mlp."),),
)
ERNIE = Names(
    bias="moe_statics.e_score_correction_bias",
    bias_rows=1,
    in_memory=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
)
GRANITE = Names(
    moe="block_sparse_moe",
    router="router.layer.weight",
    stack=Stack("input_linear.weight", "output_linear.weight", transposed=True),
    shared="shared_mlp",
    shared_both="input_linear.weight",
    shared_down="output_linear.weight",
    in_memory=(
        (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
        (".router.layer.weight", ".router.weight"),
    ),
)
HUNYUAN = Names(router="gate.wg.weight", shared="mlp.shared_mlp", head_norms=("query_layernorm", "key_layernorm"))
BOTH, DOWN = "experts.gate_up_proj", "experts.down_proj"
LLAMA = Names(
    moe="feed_forward",
    router="router.weight",
    stack=Stack(BOTH, DOWN),
    shared="feed_forward.shared_expert",
    dense="feed_forward",
)
GPT_OSS = Names(router="router.weight", stack=Stack(BOTH, DOWN, interleaved=True))
PHI = replace(SPARSE_BLOCK, in_memory=(*SPARSE_BLOCK.in_memory, (".gate.weight", ".router.weight")))

ARCHITECTURES = {
    "deepseek_v2": Architecture(configs.deepseek_v2, configs.DEEPSEEK_V2),
    "deepseek_v3": Architecture(configs.deepseek_v3, configs.DEEPSEEK_V3, has_further=True),
    "dots1": Architecture(configs.dots1, configs.DOTS1),
    "ernie4_5_moe": Architecture(configs.ernie4_5_moe, configs.ERNIE4_5, ERNIE),
    "flex_olmo": Architecture(
        configs.flex_olmo,
        configs.FLEX_OLMO,
        Names(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    ),
    "glm4_moe": Architecture(configs.glm4_moe, configs.GLM4, has_further=True),
    "glm4_moe_lite": Architecture(configs.deepseek_v3, configs.GLM4_LITE),
    "gpt_oss": Architecture(configs.gpt_oss, configs.GPT_OSS, GPT_OSS),
    "granitemoe": Architecture(configs.granitemoe, configs.GRANITE, GRANITE),
    "granitemoeshared": Architecture(configs.granitemoeshared, configs.GRANITE_SHARED, GRANITE),
    "hunyuan_v1_moe": Architecture(configs.hunyuan_v1_moe, configs.HUNYUAN, HUNYUAN),
    "kimi_k2": Architecture(configs.deepseek_v3, configs.KIMI),
    "llama4_text": Architecture(configs.llama4, configs.LLAMA4, LLAMA),
    "minimax_m2": Architecture(configs.minimax_m2, configs.MINIMAX_M2, SPARSE_BLOCK),
    "mistral4": Architecture(configs.mistral4, configs.MISTRAL4, Names(stack=Stack(BOTH, DOWN, transposed=True))),
    "mixtral": Architecture(configs.mixtral, configs.MIXTRAL, SPARSE_BLOCK),
    "olmoe": Architecture(configs.olmoe, configs.OLMOE),
    "phimoe": Architecture(configs.phimoe, configs.PHIMOE, PHI),
    "qwen2_moe": Architecture(configs.qwen2_moe, configs.QWEN2, SHARED),
    "qwen3_moe": Architecture(configs.qwen3_moe, configs.QWEN3),
    "solar_open": Architecture(configs.glm4_moe, configs.SOLAR),
}
"""Supported architectures by `model_type`."""


@dataclass(frozen=True)
class TextPart:
    """Text model of a multimodal architecture, whose tensors are inside of `language_model`."""

    kind: str  # `model_type` of the same model as a checkpoint of its own
    class_name: str  # its class in `transformers`
    text_kind: str  # `model_type` of its `text_config`
    defaults: configs.Defaults  # values of absent fields that differ from those of `kind`
    # Names of the tensors in files, in one of two layouts, if they differ from those of `kind`
    names: tuple[Names, Names] | None = None
    are_tied: bool = False  # value of an absent `tie_word_embeddings`


QWEN3_VL = {"norm_topk_prob": True, "num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 5e5}
# The published tensors are those of `transformers` 5 with swapped dimensions; both have the same names.
QWEN3_VL_NAMES = Names(stack=Stack(BOTH, DOWN, transposed=True)), Names(stack=Stack(BOTH, DOWN))
TEXT_PARTS = {
    "glm4v_moe": TextPart("glm4_moe", "Glm4MoeForCausalLM", "glm4v_moe_text", {"attention_bias": True}),
    "llama4": TextPart("llama4_text", "Llama4ForCausalLM", "llama4_text", {}),
    "mistral3": TextPart("mistral4", "Mistral4ForCausalLM", "mistral4", {}, are_tied=True),
    "qwen3_vl_moe": TextPart("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_vl_moe_text", QWEN3_VL, QWEN3_VL_NAMES),
}
"""Text parts of multimodal checkpoints by `model_type`."""

IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Rotary settings of images: the three positions of a token of text are equal."""


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text part of a multimodal checkpoint, as of a checkpoint of its own."""
    kind, text = fields.raw.get("model_type"), fields.raw.get("text_config")
    if kind not in TEXT_PARTS:
        return fields
    part = TEXT_PARTS[kind]
    if not isinstance(text, dict) or text.get("model_type", part.text_kind) != part.text_kind:
        raise ValueError(f"config.json: text_config is {shown(text)}; expected an object of {part.text_kind}")
    text = {name: value for name, value in text.items() if value is not None}
    for name in ROPE_OBJECTS:
        if isinstance(text.get(name), dict):
            text[name] = {key: value for key, value in text[name].items() if key not in IMAGE_POSITIONS}
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
    scan_layers: bool = False,
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

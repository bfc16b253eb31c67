"""GLM-4.5, dots.llm1 and Solar-Open: sigmoid routing with a bias, a shared expert, dense first layers."""

from dataclasses import replace
from typing import Any

import jax

from jax_moe_lb import TopK
from jax_moe_lb.routing import GroupLimit
from models.architectures.config_json import LAYER_TYPES, MOST_LAYERS, Fields
from models.architectures.parameter_map import usual_pieces as pieces
from models.decoder.config import DecoderConfig, HeadNorm

__all__ = ["DEFAULTS", "DOTS1_DEFAULTS", "SOLAR_DEFAULTS", "config", "dots1_config", "pieces", "sigmoid_router"]

DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
"""Values of absent fields of GLM-4.5."""

SOLAR_DEFAULTS = DEFAULTS | {
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "partial_rotary_factor": 1.0,
    "rope_theta": 1e6,
}
"""Values of absent fields of Solar-Open."""

DOTS1_DEFAULTS = DEFAULTS | {
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "max_window_layers": 62,
    "n_shared_experts": None,
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "use_qk_norm": True,
}
"""Values of absent fields of dots.llm1."""


def sigmoid_router(fields: Fields) -> TopK:
    """Return the router of GLM-4.5 and DeepSeek-V3."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    num_groups = fields.integer("n_group")
    limit = GroupLimit(num_groups, fields.integer("topk_group")) if num_groups > 1 else None
    return TopK(
        fields.integer("num_experts_per_tok"),
        score=jax.nn.sigmoid,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        group_limit=limit,
        selection_bias=True,
    )


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a GLM-4.5 or Solar-Open `config.json`."""
    fields.require("hidden_act", "silu")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    num_layers, mlp_dim = fields.num_layers(), fields.integer("moe_intermediate_size")
    num_dense = min(num_layers, fields.integer("first_k_dense_replace"))
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_experts=fields.num_experts("n_routed_experts"),
        router=sigmoid_router(fields),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(int(head_dim * fields.partial_rotary_factor())),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        dense_mlp_dim=fields.integer_if(num_dense > 0, "intermediate_size"),
        dense_layers=tuple(range(num_dense)),
        shared_mlp_dim=mlp_dim * fields.integer("n_shared_experts"),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=HeadNorm.PER_HEAD if fields.flag("use_qk_norm", False) else None,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def dots1_config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a dots.llm1 `config.json`."""
    with_window = fields.get("sliding_window") is not None
    before = fields.integer_if(with_window, "max_window_layers")
    first = before if with_window else MOST_LAYERS
    kinds = [LAYER_TYPES[layer < first] for layer in range(fields.num_layers())]
    one = config(fields)
    return replace(one, out_bias=one.qkv_bias, windows=fields.windows(kinds))

"""Qwen3-MoE, Qwen2-MoE and OLMoE: softmax top-k routing; they differ in norms, biases and the shared expert."""

from collections.abc import Iterator
from dataclasses import replace

from jax_moe_lb import TopK
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig, HeadNorm

DEFAULTS = {"max_position_embeddings": 32768, "num_experts_per_tok": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}
"""Values of absent fields of Qwen3-MoE."""

QWEN2_DEFAULTS = DEFAULTS | {"num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True}
"""Values of absent fields of Qwen2-MoE."""

OLMOE_DEFAULTS = DEFAULTS | {"max_position_embeddings": 4096, "num_key_value_heads": None, "rms_norm_eps": 1e-5}
"""Values of absent fields of OLMoE."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Qwen3-MoE `config.json`."""
    has_bias = fields.flag("attention_bias", False)
    fields.require("use_qk_norm", True)
    return replace(_qwen(fields), qkv_bias=has_bias, out_bias=has_bias, qk_norm=HeadNorm.PER_HEAD)


def qwen2_config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Qwen2-MoE `config.json`."""
    return replace(
        _qwen(fields),
        qkv_bias=fields.flag("qkv_bias", True),
        shared_mlp_dim=fields.integer("shared_expert_intermediate_size"),
        shared_is_gated=True,
    )


def olmoe_config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of an OLMoE `config.json`."""
    has_bias = fields.flag("attention_bias", False)
    shared = _softmax_config(fields, fields.integer("intermediate_size"))
    return replace(shared, qkv_bias=has_bias, out_bias=has_bias, qk_norm=HeadNorm.FULL_WIDTH)


def _qwen(fields: Fields) -> DecoderConfig:
    fields.require("use_sliding_window", False)
    fields.ignore("max_window_layers", "sliding_window")
    num_layers, sparse_step = fields.num_layers(), fields.integer("decoder_sparse_step", 1)
    without = fields.integers("mlp_only_layers")
    dense = [i for i in range(num_layers) if i in without or (i + 1) % max(sparse_step, 1)]
    dense_mlp_dim = fields.integer_if(bool(dense), "intermediate_size")
    shared = _softmax_config(fields, fields.integer("moe_intermediate_size"))
    return replace(shared, dense_layers=tuple(dense), dense_mlp_dim=dense_mlp_dim)


def _softmax_config(fields: Fields, mlp_dim: int) -> DecoderConfig:
    fields.require("hidden_act", "silu")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=fields.num_layers(),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_experts=fields.num_experts("num_experts"),
        router=TopK(fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    return names.usual_pieces(config, shared="shared_expert")

"""MiniMax-M2: sigmoid routing with a bias, norms over the full width of queries and keys, partial rotary embedding."""

from collections.abc import Iterator

import jax

from jax_moe_lb import TopK
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig, HeadNorm

DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
}
"""Values of absent fields."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a MiniMax-M2 `config.json`."""
    fields.require("hidden_act", "silu")
    fields.require("scoring_func", "sigmoid")
    fields.require("use_qk_norm", True)
    fields.require("qk_norm_type", "per_layer")
    fields.require("use_routing_bias", True)
    fields.require("attn_type_list", [1] * fields.num_layers())
    fields.require("shared_intermediate_size", 0)
    # Published files have these fields of MiniMax-Text-01: of dense layers, shared experts and windows.
    fields.ignore("mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=fields.num_layers(),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        router=TopK(fields.integer("num_experts_per_tok"), score=jax.nn.sigmoid, renormalise=True, selection_bias=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(_rotated_dim(fields, head_dim)),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        qk_norm=HeadNorm.FULL_WIDTH,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _rotated_dim(fields: Fields, head_dim: int) -> int:
    """Return the rotated channels per head: published files have `rotary_dim`, `transformers` a factor."""
    if fields.get("rotary_dim") is None:
        return int(head_dim * fields.partial_rotary_factor(1.0))
    dim = fields.integer("rotary_dim")
    share = fields.partial_rotary_factor(dim / max(head_dim, 1))
    if int(head_dim * share) != dim:
        raise ValueError(f"config.json: partial_rotary_factor is {share}; expected rotary_dim {dim} / {head_dim}")
    return dim


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        yield from names.experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"), "e_score_correction_bias")

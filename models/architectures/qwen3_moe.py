"""Qwen3-MoE: softmax top-k routing, normalised query and key heads."""

from jax_moe_lb import TopK
from models.architectures.config_json import Fields
from models.architectures.parameter_map import usual_pieces as pieces
from models.decoder.config import DecoderConfig

__all__ = ["config", "pieces"]


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Qwen3-MoE `config.json`."""
    fields.require("hidden_act", "silu")
    fields.require("use_sliding_window", False)
    num_layers, sparse_step = fields.num_layers(), fields.integer("decoder_sparse_step", 1)
    without = fields.integers("mlp_only_layers")
    dense = [i for i in range(num_layers) if i in without or (i + 1) % max(sparse_step, 1)]
    width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", width // max(num_heads, 1))
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=fields.integer("moe_intermediate_size"),
        num_experts=fields.num_experts("num_experts"),
        router=TopK(fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=fields.rope(head_dim, base=1e4),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        dense_mlp_dim=fields.integer("intermediate_size") if dense else 0,
        dense_layers=tuple(dense),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=True,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )

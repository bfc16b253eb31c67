"""Mixtral: softmax top-k routing, grouped-query attention, an optional sliding window."""

from collections.abc import Iterator

from jax_moe_lb import TopK
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""Values of absent fields."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Mixtral `config.json`."""
    fields.require("hidden_act", "silu")
    fields.require("norm_topk_prob", True)
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    num_layers, window = fields.num_layers(), fields.integer("sliding_window", 0)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        router=TopK(fields.integer("num_experts_per_tok"), renormalise=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        windows=(window,) * num_layers if window else (),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        yield from names.experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))

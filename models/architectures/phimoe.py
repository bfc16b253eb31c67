"""Phi-3.5-MoE: SparseMixer routing, layer norms with biases, LongRoPE; inference alone, as training samples experts."""

from collections.abc import Iterator
from typing import Any

from jax_moe_lb.core.checks import shown
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields, checked_number
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig
from models.decoder.rope import LongRope, Rope
from models.decoder.sparse_mixer import SparseMixer

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_jitter_noise": 0.01,
}
"""Values of absent fields."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Phi-3.5-MoE `config.json`."""
    fields.require("hidden_act", "silu")
    fields.require("num_experts_per_tok", 2)
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    num_layers, window = fields.num_layers(), fields.integer("sliding_window", 0)
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        router=SparseMixer(2, renormalise=False, jitter=fields.number("router_jitter_noise")),
        norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, head_dim),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        qkv_bias=has_bias,
        out_bias=has_bias,
        windows=(window,) * num_layers if window else (),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        layer_norm=True,
        head_bias=fields.flag("lm_head_bias", False),
    )


def _rope(fields: Fields, head_dim: int) -> Rope:
    settings = fields.rope_settings()
    if settings["rope_type"] != "longrope":
        fields.ignore("original_max_position_embeddings")
        return fields.rope(head_dim)

    def number(name: str) -> float:
        return checked_number(f"rope_parameters.{name}", settings.get(name))

    def numbers(name: str) -> tuple[float, ...]:
        given = settings.get(name)
        if not isinstance(given, list):
            raise ValueError(f"config.json: rope_parameters.{name} is {shown(given)}; expected a list of numbers")
        return tuple(checked_number(f"rope_parameters.{name}", value) for value in given)

    settings.setdefault("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
    fields.require("original_max_position_embeddings", settings["original_max_position_embeddings"])
    return LongRope(
        dim=head_dim,
        base=number("rope_theta"),
        original_positions=int(number("original_max_position_embeddings")),
        short_factors=numbers("short_factor"),
        long_factors=numbers("long_factor"),
        short_scale=number("short_mscale"),
        long_scale=number("long_mscale"),
    )


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        yield from names.experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))

"""DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash: latent attention, sigmoid routing with a bias and groups, shared experts,
dense first layers.
"""

from collections.abc import Iterator
from typing import Any

from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.glm4_moe import sigmoid_router
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig, Latent
from models.decoder.rope import yarn_scale

DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
"""Values of absent fields of DeepSeek-V3."""

GLM_LITE_DEFAULTS = DEFAULTS | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}
"""Values of absent fields of GLM-4.7-Flash."""

KIMI_DEFAULTS = {"max_position_embeddings": 131072, "rope_interleave": True}
"""Values of absent fields of Kimi-K2: published files have all others."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a DeepSeek-V3 `config.json`."""
    fields.require("hidden_act", "silu")
    fields.require("moe_layer_freq", 1)
    latent = Latent(
        query_rank=fields.integer("q_lora_rank", 0) or None,
        kv_rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rotated_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    _require_repeated(fields, latent)
    num_heads, mlp_dim = fields.integer("num_attention_heads"), fields.integer("moe_intermediate_size")
    has_bias, num_layers = fields.flag("attention_bias", False), fields.num_layers()
    head_dim, dense = latent.plain_dim + latent.rotated_dim, _dense_layers(fields)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_experts=fields.num_experts("n_routed_experts"),
        router=sigmoid_router(fields),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(latent.rotated_dim, interleaved=fields.flag("rope_interleave", True)),
        attention_scale=head_dim**-0.5 * _temperature(fields),
        source=fields.text,
        dense_mlp_dim=fields.integer_if(bool(dense), "intermediate_size"),
        dense_layers=dense,
        shared_mlp_dim=mlp_dim * fields.integer("n_shared_experts"),
        qkv_bias=has_bias,
        out_bias=has_bias,
        latent=latent,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _require_repeated(fields: Fields, latent: Latent) -> None:
    """Check the fields of `transformers` that repeat other sizes."""
    fields.require("head_dim", latent.rotated_dim)
    fields.require("qk_head_dim", latent.plain_dim + latent.rotated_dim)
    fields.require("num_key_value_heads", fields.integer("num_attention_heads"))


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    num_layers, kinds, known = fields.num_layers(), fields.get("mlp_layer_types"), ("dense", "sparse")
    if kinds is None:
        return tuple(range(min(num_layers, fields.integer("first_k_dense_replace"))))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ValueError(f"config.json: mlp_layer_types is {str(kinds)[:80]}; expected {num_layers} of {known}")
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if dense == tuple(range(len(dense))):
        fields.require("first_k_dense_replace", len(dense))
    return dense


def _temperature(fields: Fields) -> float:
    """Return YaRN's `mscale` squared: queries and keys are each scaled by it for longer contexts."""
    settings = fields.rope_settings()
    if settings["rope_type"] == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return yarn_scale(settings.get("factor", 1.0), settings["mscale_all_dim"]) ** 2


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield from names.further(config, _layer)


def _layer(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    yield from names.layer_norms(config, layer)
    yield from _latent_attention(config, layer)
    yield from names.feed_forward(config, layer)


def _latent_attention(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    theirs, ours = f"model.layers.{layer}.self_attn", f"blocks.{layer}.attention"
    latent, width, heads = config.latent, config.embed_dim, config.num_heads
    assert latent is not None
    if latent.query_rank is None:
        yield from names.linear(f"{theirs}.q_proj", f"{ours}.q_up", width, heads * config.head_dim)
    else:
        yield from names.linear(f"{theirs}.q_a_proj", f"{ours}.q_down", width, latent.query_rank, config.qkv_bias)
        yield names.scale(f"{theirs}.q_a_layernorm", f"{ours}.q_norm", latent.query_rank)
        yield from names.linear(f"{theirs}.q_b_proj", f"{ours}.q_up", latent.query_rank, heads * config.head_dim)
    down = latent.kv_rank + latent.rotated_dim
    yield from names.linear(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.kv_down", width, down, config.qkv_bias)
    yield names.scale(f"{theirs}.kv_a_layernorm", f"{ours}.kv_norm", latent.kv_rank)
    up = heads * (latent.plain_dim + latent.value_dim)
    yield from names.linear(f"{theirs}.kv_b_proj", f"{ours}.kv_up", latent.kv_rank, up)
    yield from names.linear(f"{theirs}.o_proj", f"{ours}.out", heads * latent.value_dim, width, config.out_bias)

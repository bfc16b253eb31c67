"""Llama 4 for text: top-1 sigmoid routing that scales inputs, a shared expert, chunked attention, layers without rotary
positions.
"""

from collections.abc import Iterator
from typing import Any

import jax

from jax_moe_lb import TopK
from jax_moe_lb.core.checks import shown
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig, HeadNorm, Temperature

DEFAULTS: dict[str, Any] = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 131072,
    "no_rope_layer_interval": 4,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "use_qk_norm": True,
}
"""Values of absent fields."""

CHUNKED, FULL = "chunked_attention", "full_attention"
"""Kinds of attention in `layer_types`."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Llama 4 `config.json` without images."""
    fields.require("hidden_act", "silu")
    # With several experts a token has a different input for each.
    fields.require("num_experts_per_tok", 1)
    num_heads, head_dim, num_layers = fields.integer("num_attention_heads"), fields.head_dim(), fields.num_layers()
    has_bias, unrotated, dense = fields.flag("attention_bias", False), _unrotated(fields), _dense(fields)
    tunes = fields.get("attn_temperature_tuning")
    temperature = Temperature(fields.number("floor_scale"), fields.number("attn_scale")) if tunes else None
    if not tunes:
        fields.ignore("attn_scale", "floor_scale")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        router=TopK(1, score=jax.nn.sigmoid, renormalise=False, scale_inputs=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim, interleaved=True),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        dense_mlp_dim=fields.integer_if(bool(dense), "intermediate_size_mlp"),
        dense_layers=dense,
        shared_mlp_dim=fields.integer("intermediate_size"),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=HeadNorm.UNWEIGHTED if fields.flag("use_qk_norm", True) else None,
        chunks=_chunks(fields, unrotated),
        unrotated_layers=unrotated,
        temperature=temperature,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _unrotated(fields: Fields) -> tuple[int, ...]:
    """Return the layers without rotary positions: those with 0 in `no_rope_layers`."""
    num_layers, rotated = fields.num_layers(), fields.integers("no_rope_layers")
    interval = max(fields.integer("no_rope_layer_interval"), 1)
    if not rotated:
        return tuple(range(interval - 1, num_layers, interval))
    if len(rotated) != num_layers:
        raise ValueError(f"config.json: no_rope_layers has {len(rotated)} entries; expected {num_layers}")
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)


def _dense(fields: Fields) -> tuple[int, ...]:
    """Return the layers without experts."""
    num_layers, step = fields.num_layers(), max(fields.integer("interleave_moe_layer_step"), 1)
    sparse: Any = range(step - 1, num_layers, step)
    if fields.get("moe_layers") is not None:
        sparse = fields.integers("moe_layers")
    return tuple(layer for layer in range(num_layers) if layer not in sparse)


def _chunks(fields: Fields, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the chunk of each layer, `None` for full attention; empty if all layers are full."""
    num_layers, size = fields.num_layers(), fields.integer("attention_chunk_size", 0) or None
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [FULL if size is None or layer in unrotated else CHUNKED for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (CHUNKED, FULL) for kind in kinds):
        raise ValueError(f"config.json: layer_types is {str(kinds)[:80]}; expected {num_layers} of {CHUNKED}, {FULL}")
    if CHUNKED not in kinds:
        return ()
    if size is None:
        raise ValueError(f"config.json: attention_chunk_size is {shown(size)}; expected a number for {CHUNKED}")
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors; one tensor stacks all experts of a layer."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        if layer in config.dense_layers:
            yield from names.dense(config, layer, "feed_forward")
        else:
            yield from _experts(config, layer)
            yield from names.shared_expert(config, layer, "shared_expert", "feed_forward")


def _experts(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    theirs, ours = f"model.layers.{layer}.feed_forward", f"blocks.{layer}.moe"
    experts, width, inner = config.num_experts, config.embed_dim, config.mlp_dim
    yield ParameterSlice(f"{theirs}.router.weight", (experts, width), f"{ours}.kernel", transposed=True)
    for expert in range(experts):
        for first, path in ((0, "gate"), (inner, "up")):
            columns = (expert, slice(None), slice(first, first + inner))
            shape = (experts, width, 2 * inner)
            yield ParameterSlice(f"{theirs}.experts.gate_up_proj", shape, f"{ours}.{path}", columns, expert)
        yield ParameterSlice(f"{theirs}.experts.down_proj", (experts, inner, width), f"{ours}.down", (expert,), expert)

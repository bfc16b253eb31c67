"""ERNIE-4.5: softmax routing with a bias for the selection, shared experts, dense layers around the sparse ones."""

from collections.abc import Iterator

from jax_moe_lb import TopK
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig

DEFAULTS = {
    "max_position_embeddings": 131072,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_shared_experts": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
"""Values of absent fields."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of an ERNIE-4.5 `config.json` without images."""
    fields.require("hidden_act", "silu")
    fields.require("use_bias", False)
    fields.require("moe_gate", "topk")
    fields.require("moe_norm_min", 1e-12)
    fields.require("moe_use_aux_free", True)
    fields.require("use_rmsnorm", True)
    num_heads, head_dim, num_layers = fields.integer("num_attention_heads"), fields.head_dim(), fields.num_layers()
    mlp_dim, per_token = fields.integer("moe_intermediate_size"), fields.integer("moe_k")
    fields.require("num_experts_per_tok", per_token)
    dense = [layer for layer in range(num_layers) if not _is_sparse(fields, layer, num_layers)]
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_experts=fields.num_experts("moe_num_experts"),
        router=TopK(per_token, renormalise=True, selection_bias=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim, interleaved=True),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        dense_mlp_dim=fields.integer_if(bool(dense), "intermediate_size"),
        dense_layers=tuple(dense),
        shared_mlp_dim=mlp_dim * fields.integer("moe_num_shared_experts"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _is_sparse(fields: Fields, layer: int, num_layers: int) -> bool:
    last = fields.get("moe_layer_end_index")
    last = num_layers - 1 if last == -1 else fields.integer("moe_layer_end_index")
    inside = fields.integer("moe_layer_start_index") <= layer <= last
    return inside and (layer + 1) % max(fields.integer("moe_layer_interval"), 1) == 0


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors; the router's bias has a leading dimension of 1."""
    bias = "moe_statics.e_score_correction_bias"
    for piece in names.usual_pieces(config, bias=bias):
        if piece.name.endswith(bias):
            yield ParameterSlice(piece.name, (1, *piece.shape), piece.path, index=(0,))
        else:
            yield piece

"""Granite-MoE: multipliers of embeddings, attention, residuals and logits; one tensor stacks all experts of a layer."""

from collections.abc import Iterator

from jax_moe_lb import TopK
from models.architectures import parameter_map as names
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig

DEFAULTS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
}
"""Values of absent fields."""


NAMES_IN_MEMORY = (
    (".input_linear.weight", ".experts.gate_up_proj"),
    (".output_linear.weight", ".experts.down_proj"),
    (".router.layer.weight", ".router.weight"),
)
"""Parts of the names of tensors in published files, and in the modules of `transformers` 5."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a Granite-MoE `config.json`."""
    fields.require("hidden_act", "silu")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=fields.num_layers(),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        # A softmax over the chosen logits equals the renormalised softmax over all logits.
        router=TopK(fields.integer("num_experts_per_tok"), renormalise=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim),
        attention_scale=fields.number("attention_multiplier"),
        source=fields.text,
        qkv_bias=has_bias,
        out_bias=has_bias,
        embed_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1 / fields.number("logits_scaling"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        yield from _experts(config, layer)


def _experts(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.moe"
    experts, width, inner = config.num_experts, config.embed_dim, config.mlp_dim
    yield ParameterSlice(f"{theirs}.router.layer.weight", (experts, width), f"{ours}.kernel", transposed=True)
    for expert in range(experts):
        for first, path in ((0, "gate"), (inner, "up")):
            index = (expert, slice(first, first + inner))
            shape = (experts, 2 * inner, width)
            yield ParameterSlice(
                f"{theirs}.input_linear.weight", shape, f"{ours}.{path}", index, expert, transposed=True
            )
        shape = (experts, width, inner)
        yield ParameterSlice(
            f"{theirs}.output_linear.weight", shape, f"{ours}.down", (expert,), expert, transposed=True
        )

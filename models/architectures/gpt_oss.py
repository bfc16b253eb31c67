"""GPT-OSS: clamped SwiGLU with biases, router bias, attention sinks, sliding windows in every other layer, YaRN."""

from collections.abc import Iterator

from jax_moe_lb import TopK
from jax_moe_lb.kernels import ClampedSwiGLU
from models.architectures import parameter_map as names
from models.architectures.config_json import LAYER_TYPES, Fields
from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""Values of absent fields."""


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a GPT-OSS `config.json`."""
    fields.require("hidden_act", "silu")
    num_layers, has_bias = fields.num_layers(), fields.flag("attention_bias", True)
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim()
    rope, per_token = fields.rope(head_dim), fields.integer("num_experts_per_tok")
    # Published files have these names, too.
    fields.require("experts_per_token", per_token)
    fields.require("initial_context_length", rope.original_positions)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_experts=fields.num_experts("num_local_experts"),
        # A softmax over the chosen logits equals the renormalised softmax over all logits.
        router=TopK(per_token, renormalise=True, logit_bias=True),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        attention_scale=head_dim**-0.5,
        source=fields.text,
        expert_bias=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        sinks=True,
        windows=fields.windows([LAYER_TYPES[layer % 2] for layer in range(num_layers)]),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        activation=ClampedSwiGLU(fields.number("swiglu_limit"), fields.number("swiglu_alpha")),
    )


def pieces(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameter slices of the checkpoint tensors; one tensor stacks all experts of a layer."""
    yield from names.outside(config)
    for layer in range(config.num_layers):
        yield from names.layer_norms(config, layer)
        yield from names.grouped_attention(config, layer)
        yield from _experts(config, layer)


def _experts(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    theirs, ours = f"model.layers.{layer}.mlp", f"blocks.{layer}.moe"
    experts, width, inner = config.num_experts, config.embed_dim, config.mlp_dim
    yield ParameterSlice(f"{theirs}.router.weight", (experts, width), f"{ours}.kernel", transposed=True)
    yield ParameterSlice(f"{theirs}.router.bias", (experts,), f"{ours}.kernel_bias")
    both, out = f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj"
    for expert in range(experts):
        # The columns of the gate and the up projection are interleaved.
        for first, path in ((0, "gate"), (1, "up")):
            columns, wide = slice(first, None, 2), (experts, 2 * inner)
            whole = (expert, slice(None), columns)
            yield ParameterSlice(both, (experts, width, 2 * inner), f"{ours}.{path}", whole, expert)
            yield ParameterSlice(f"{both}_bias", wide, f"{ours}.{path}_bias", (expert, columns), expert)
        yield ParameterSlice(out, (experts, inner, width), f"{ours}.down", (expert,), expert)
        yield ParameterSlice(f"{out}_bias", (experts, width), f"{ours}.down_bias", (expert,), expert)

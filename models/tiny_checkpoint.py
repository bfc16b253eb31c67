"""Write a small random checkpoint: `python -m models.tiny_checkpoint --architecture mixtral --out DIR`.

It replaces a real checkpoint in tests and examples. Its vocabulary is the 256 bytes.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_moe_lb import System
from jax_moe_lb.cli.output import CheckedCommand, OutputPath
from models.architectures.config_json import Fields
from models.architectures.registry import ARCHITECTURES, configured
from models.console import USER_ERRORS, say
from models.decoder.model import Decoder
from models.mesh import make_mesh, offer_cpu_devices
from models.model_config import NUM_BYTES, ParallelConfig
from models.pretrained.saving import save_pretrained
from models.run_folder.files import write_whole

USUAL = {
    "vocab_size": NUM_BYTES,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
SIGMOID = {
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": SIGMOID | LATENT | {"norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    "deepseek_v3": SIGMOID | LATENT,
    "dots1": SIGMOID,
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "flex_olmo": {"num_experts": 16},
    "glm4_moe": SIGMOID | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": SIGMOID | LATENT,
    "gpt_oss": {"num_local_experts": 16, "sliding_window": 32},
    "granitemoe": {"num_local_experts": 16, "attention_multiplier": 0.25},
    "granitemoeshared": {"num_local_experts": 16, "attention_multiplier": 0.25, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2},
    "kimi_k2": SIGMOID | LATENT,
    "llama4_text": {
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64,
    },
    "minimax_m2": {"num_local_experts": 16},
    "mistral4": SIGMOID | LATENT | {"head_dim": 32},
    "mixtral": {"num_local_experts": 16},
    "olmoe": {"num_experts": 16},
    "phimoe": {"num_local_experts": 16, "lm_head_bias": True},
    "qwen2_moe": {"num_experts": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "solar_open": SIGMOID | {"first_k_dense_replace": 0},
}
CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
}
"""Class names of the architectures in `transformers`."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def tiny_config(architecture: str) -> str:
    """Return the `config.json` of a small model."""
    if architecture not in SIZES:
        raise ValueError(f"architecture is {architecture!r}; expected one of {', '.join(sorted(ARCHITECTURES))}")
    named = {"model_type": architecture, "architectures": [CLASSES[architecture]]}
    return json.dumps(named | USUAL | SIZES[architecture], indent=2)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose vocabulary is the 256 bytes."""
    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tiny(architecture: str, folder: Path, seed: int = 0) -> None:
    """Write a small random checkpoint with its tokenizer.

    Args:
        architecture: `model_type` of the `config.json`.
        folder: output folder; it must be absent or empty.
        seed: seed of the parameters.

    Raises:
        ValueError: the architecture is not supported, or the folder is not empty.
    """
    config = configured(Fields(tiny_config(architecture)))
    mesh = make_mesh(ParallelConfig(expert_parallel=1))
    save_pretrained(Decoder(config, mesh=mesh, system=System(), rngs=nnx.Rngs(seed)), folder)
    write_whole(folder / "tokenizer.json", byte_tokenizer().to_str().encode())


@app.command(cls=CheckedCommand)
def main(
    architecture: Annotated[str, typer.Option(help=f"Architecture: {', '.join(sorted(ARCHITECTURES))}.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; new or empty."), OutputPath("")],
    seed: Annotated[int, typer.Option(help="Seed of the parameters.")] = 0,
) -> None:
    """Write a small random checkpoint in the format of transformers."""
    try:
        offer_cpu_devices(1)
        write_tiny(architecture, out, seed)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()

"""Tiny random models of `transformers`: checkpoints, logits, gradients and generated tokens."""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from safetensors import safe_open

from models.tiny_checkpoint import CLASSES

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="torch|transformers")

VOCAB, PROMPT, NEW_TOKENS = 61, 5, 6

USUAL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SIGMOID = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "head_dim": 16,
}
LATENT = SIGMOID | {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 3,
    "head_dim": 8,
}
CONFIGS = {
    "mixtral": (
        "MixtralConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 24,
            "sliding_window": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 16,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", SIGMOID | {"use_qk_norm": True, "attention_bias": True, "num_hidden_layers": 3}),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 16,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 16, "intermediate_size": 24, "attention_bias": True}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 16, "intermediate_size": 24, "head_dim": 16, "rotary_dim": 8},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 16,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
            "moe_layer_end_index": 1,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 24,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 24,
            "shared_intermediate_size": 20,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {
            "num_experts": 8,
            "moe_topk": 2,
            "intermediate_size": 24,
            "head_dim": 16,
            "attention_bias": True,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 8, "intermediate_size": 24, "attention_bias": True}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {name: value for name, value in LATENT.items() if name != "norm_topk_prob"}
        | {
            "topk_method": "group_limited_greedy",
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "mistral4": (
        "Mistral4Config",
        LATENT
        | {
            "head_dim": 20,
            "rope_parameters": YARN
            | {
                "partial_rotary_factor": 0.4,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "dots1": (
        "Dots1Config",
        SIGMOID | {"attention_bias": True, "num_hidden_layers": 3, "sliding_window": 5, "max_window_layers": 2},
    ),
    "solar_open": ("SolarOpenConfig", SIGMOID | {"attention_bias": True, "first_k_dense_replace": 0}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 5,
            "floor_scale": 3,
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 24,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.4,
            "sliding_window": 7,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [4.0, 5.0, 6.0, 7.0],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 24,
            "head_dim": 16,
            "sliding_window": 5,
            "rope_scaling": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
}
"""Sizes covering the features of each architecture with few layers."""


@dataclass(frozen=True)
class Reference:
    """Results of `transformers` for a model.

    Args:
        folder: its checkpoint.
        tokens: int64 `[B, T]`.
        logits: float32 `[B, T, V]`.
        rounded: logits computed in bfloat16.
        gradients: gradients of the mean next-token cross-entropy, by checkpoint tensor name.
        generated: `[B, NEW_TOKENS]`, greedy continuation of the first `PROMPT` tokens.
    """

    folder: Path
    tokens: np.ndarray
    logits: np.ndarray
    rounded: np.ndarray
    gradients: dict[str, np.ndarray]
    generated: np.ndarray


def make_reference(name: str, folder: Path) -> Reference:
    model = make_model(name)
    model.save_pretrained(folder / "checkpoint")
    tokens = torch.randint(1, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ids = model.generate(tokens[:, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=None)
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)).backward()
    with torch.no_grad():
        rounded = make_model(name).to(torch.bfloat16)(tokens).logits.float().numpy()
        for parameter in model.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    # Save gradients as parameters, which gives them the checkpoint's tensor names.
    model.save_pretrained(folder / "gradients")
    return Reference(
        folder / "checkpoint",
        tokens.numpy(),
        logits.detach().numpy(),
        rounded,
        read_tensors(folder / "gradients"),
        ids[:, PROMPT:].numpy(),
    )


def make_model(name: str) -> torch.nn.Module:
    """Return a model with weights large enough to make all experts and tokens distinct."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(USUAL | sizes))
    model = getattr(transformers, CLASSES[name])._from_config(config, attn_implementation="eager").eval()
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if path.endswith("e_score_correction_bias"):
            tensor.data.uniform_(-0.2, 0.2)
        elif "norm" in path:
            tensor.data.uniform_(0.5, 1.5)
        elif isinstance(tensor, torch.nn.Parameter):
            tensor.data.normal_(0, 0.2)
    return model


def make_dense(name: str, folder: Path) -> torch.nn.Module:
    """Return a dense model, and write its checkpoint."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**USUAL, intermediate_size=40, head_dim=8)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read all files of a checkpoint."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of a checkpoint not written by `transformers`."""
    (kind,) = raw_config(folder)["architectures"]
    options = {"attn_implementation": "eager", "output_loading_info": True}
    model, told = getattr(transformers, kind).from_pretrained(folder, **options)
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    with torch.no_grad():
        return model.eval()(torch.asarray(tokens)).logits.numpy()


def raw_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())

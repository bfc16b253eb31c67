"""Sizes of published models: fields of their `config.json`, besides those with the default of the architecture.

`python -m models.architectures.published` prints a table of them.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import configured, pieces_of
from models.decoder.config import DecoderConfig

MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_local_experts": 8,
    "max_position_embeddings": 32_768,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_experts": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "max_position_embeddings": 163_840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM_4_5: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 151_552,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 96,
    "head_dim": 128,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000,
}
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_local_experts": 128,
    "max_position_embeddings": 131_072,
}
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
PUBLISHED = {
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "GLM-4.5": GLM_4_5,
    "gpt-oss-120b": GPT_OSS_120B,
    "gpt-oss-20b": GPT_OSS_20B,
}
"""Relevant `config.json` fields of each published model."""


def published_config(name: str) -> DecoderConfig:
    """Return the sizes of a published model."""
    if name not in PUBLISHED:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(PUBLISHED)}")
    return configured(Fields(json.dumps(PUBLISHED[name])))


def num_params(config: DecoderConfig) -> tuple[int, int]:
    """Return the total parameters of a model, and the active parameters per token."""
    # Both include the embedding. Multi-token prediction layers do not count.
    pieces = pieces_of(config)
    in_experts = _size(piece for piece in pieces if piece.expert is not None)
    # A tensor stacking all experts has many slices but counts once.
    total = _size(pieces)
    per_token = config.router.num_experts_per_tok
    return total, total - in_experts + in_experts * per_token // config.num_experts


def _size(pieces: Iterable[ParameterSlice]) -> int:
    return sum(math.prod(shape) for shape in {piece.name: piece.shape for piece in pieces}.values())


def main() -> None:
    """Print the sizes of all published models."""
    table = Table("model", "layers", "experts", "parameters", "of a token", "bytes in bfloat16")
    for name in PUBLISHED:
        config = published_config(name)
        total, active = num_params(config)
        experts = f"{config.router.num_experts_per_tok} of {config.num_experts}"
        table.add_row(
            name,
            str(config.num_layers),
            experts,
            f"{total / 1e9:.1f} B",
            f"{active / 1e9:.1f} B",
            f"{2 * total / 1e9:.0f} GB",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

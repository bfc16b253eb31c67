"""Text parts of multimodal checkpoints equal `transformers`, and are saved as checkpoints of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from jax_moe_lb import System
from models.config import ParallelConfig
from models.mesh import make_mesh
from models.pretrained.loading import from_pretrained
from models.pretrained.saving import save_pretrained
from tests.parity.references import CONFIGS, USUAL, VOCAB, logits_of, read_tensors

VISION = {"hidden_size": 16, "intermediate_size": 64, "num_heads": 2, "num_attention_heads": 2}
LAYERS = {"depth": 1, "num_hidden_layers": 1}
KINDS = {
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        },
        VISION | LAYERS | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        CONFIGS["qwen3_5_moe_text"][1]
        | {
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 0],
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            }
        },
        VISION | LAYERS | {"out_hidden_size": 32, "num_position_embeddings": 16},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        CONFIGS["glm4_moe"][1]
        | {"use_qk_norm": False, "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"}},
        VISION | LAYERS | {"out_hidden_size": 32},
    ),
    "llama4": (
        "Llama4",
        CONFIGS["llama4_text"][1],
        VISION | LAYERS | {"vision_output_dim": 32, "image_size": 28, "projector_input_dim": 64},
    ),
    "mistral3": (
        "Mistral3",
        CONFIGS["mistral4"][1] | {"model_type": "mistral4"},
        VISION | LAYERS | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    ),
}
"""Prefix of the classes in `transformers`, sizes of the text part, and of the vision part."""


@pytest.mark.parametrize("kind", KINDS)
def test_text_parts(kind, tmp_path):
    prefix, sizes, vision = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(text_config=USUAL | sizes, vision_config=vision)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, torch.nn.Parameter) or path.endswith("e_score_correction_bias"):
            # Weights of norms are around 1, or around 0 where the norm adds 1.
            tensor.data = torch.empty_like(tensor).normal_(0, 0.2).add_(tensor.data * ("norm" in path))
    model.eval().save_pretrained(tmp_path / "whole")
    tokens = np.arange(24).reshape(2, 12) % (VOCAB - 1) + 1
    with torch.no_grad():
        # Llama 4 as a whole fails without an image.
        expected = (model.language_model if kind == "llama4" else model)(input_ids=torch.asarray(tokens)).logits.numpy()
    ours = from_pretrained(tmp_path / "whole", make_mesh(ParallelConfig(1, 1)), System())
    found = nnx.jit(lambda model, tokens: model(tokens)[0])(ours, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    if kind == "qwen3_vl_moe":
        tensors = read_tensors(tmp_path / "whole")
        turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items() if ".experts." in name}
        save_file(tensors | turned, tmp_path / "whole" / "model.safetensors")
        published = nnx.state(from_pretrained(tmp_path / "whole", make_mesh(ParallelConfig(1, 1)), System()))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), published)
    save_pretrained(ours, tmp_path / "text")
    np.testing.assert_allclose(logits_of(tmp_path / "text", tokens), expected, rtol=0, atol=1e-5)

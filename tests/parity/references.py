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
import yaml
from safetensors import safe_open

from models.architectures.registry import ARCHITECTURES

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
TINY = yaml.safe_load(Path(__file__).with_name("tiny_models.yaml").read_text())
CONFIGS = {
    name: (fields["class"], {key: value for key, value in fields.items() if key != "class"})
    for name, fields in TINY["models"].items()
}
"""Configuration class of `transformers` and fields of each architecture."""


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
    made = getattr(transformers, ARCHITECTURES[name].class_name)
    model = made._from_config(config, attn_implementation="eager").eval()
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if path.endswith("e_score_correction_bias"):
            tensor.data.uniform_(-0.2, 0.2)
        elif "norm" in path:
            # From 1, or from 0 where the norm adds 1.
            tensor.data.add_(torch.empty_like(tensor).uniform_(-0.5, 0.5))
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

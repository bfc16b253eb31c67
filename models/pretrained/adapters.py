"""Adapters (LoRA) by the names of checkpoint modules: targets of a run, and files in the format of PEFT."""

import json
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import UNLIMITED
from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice, renamed
from models.architectures.registry import architecture_of, pieces_of
from models.config import LoraConfig
from models.decoder.config import DecoderConfig
from models.decoder.layers import ADAPTED
from models.decoder.stacked import StackedDecoder
from models.pretrained.loading import by_path
from models.pretrained.saving import TensorShapes, stored_slice, vacant, write_file
from models.run_folder.files import write_whole

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # names of PEFT's files

# Paths of the matrices of experts, which have adapters together.
EXPERTS = frozenset({"moe.up", "moe.gate", "moe.down"})

# Architectures whose adapters of experts PEFT 0.21 ignores with `transformers` 5, without an error.
IGNORED_EXPERTS = ("qwen2_moe", "qwen3_5_moe_text")

# Prefix of tensor names in PEFT's files, and the end of the name of a linear map's weight.
PREFIX, WEIGHT = "base_model.model.", ".weight"


def target_paths(config: DecoderConfig, targets: str | None) -> frozenset[str]:
    """Return the paths in a block of the matrices with adapters."""
    paths: dict[str, set[str]] = {}
    for piece in pieces_of(config):
        if piece.path.startswith("blocks.") and ADAPTED.fullmatch(path := piece.path.split(".", 2)[2]):
            paths.setdefault(piece.name.removesuffix(WEIGHT).rpartition(".")[2], set()).add(path)
    chosen = list(paths) if targets is None else targets.split(",")
    for name in chosen:
        if name not in paths:
            raise ValueError(f"lora.targets has {shown(name)}; expected names out of {', '.join(sorted(paths))}")
    found = frozenset(path for name in chosen for path in paths[name])
    experts = [name for name in sorted(paths) if not paths[name].isdisjoint(EXPERTS)]
    if found & EXPERTS and not found >= EXPERTS:
        raise ValueError(
            f"lora.targets is {shown(targets)}; expected all or none of {', '.join(experts)}, the experts'"
        )
    return found


def save_adapters(model: StackedDecoder, folder: Path, lora: LoraConfig, base: str) -> bool:
    """Write the adapters of a model as `adapter_config.json` and `adapter_model.safetensors`, in the format of PEFT."""
    # Tensors have the names of the modules in published files, with a module for each expert. All processes
    # call this function, and process 0 writes.
    values = by_path(nnx.state(model))
    pieces = [piece.in_stack(model.places, model.config.num_layers) for piece in pieces_of(model.config)]
    pieces = [piece for piece in pieces if f"{piece.path}_a" in values]
    are_linear = all(piece.name.endswith(WEIGHT) and piece.transposed and not piece.index for piece in pieces)
    ignores_experts = Fields(model.config.source, UNLIMITED).raw["model_type"] in IGNORED_EXPERTS
    if not are_linear or (ignores_experts and any(piece.expert is not None for piece in pieces)):
        return False
    shapes = {name: shape for piece in pieces for name, shape in _shapes(piece, lora.rank, values).items()}
    tensors = (tensor for piece in pieces for tensor in _tensors(piece, values))
    if jax.process_index() != 0:
        # A loop would hold each tensor until the next one is there.
        deque(tensors, maxlen=0)
        return True
    with vacant(folder) as aside:
        write_file(aside / TENSORS, shapes, tensors)
        write_whole(aside / CONFIG, (json.dumps(_config(model.config, pieces, lora, base), indent=2) + "\n").encode())
    return True


def _shapes(piece: ParameterSlice, rank: int, values: dict[str, Any]) -> TensorShapes:
    """Return shape and dtype of both tensors of an adapter; `torch` stores linear maps transposed."""
    name, (outer, inner), dtype = PREFIX + piece.name.removesuffix(WEIGHT), piece.shape, values[piece.path].dtype
    shapes = {"lora_A": (rank, inner), "lora_B": (outer, rank)}
    return {f"{name}.{part}{WEIGHT}": jax.ShapeDtypeStruct(shape, dtype) for part, shape in shapes.items()}


def _tensors(piece: ParameterSlice, values: dict[str, Any]) -> Iterator[np.ndarray]:
    for suffix in ("_a", "_b"):
        yield np.ascontiguousarray(stored_slice(piece, values, suffix).T)


def _config(config: DecoderConfig, pieces: list[ParameterSlice], lora: LoraConfig, base: str) -> dict[str, Any]:
    # A list of last names would add empty adapters to dense layers and shared experts, too. PEFT looks for experts of
    # `transformers` 5, which are one tensor, under the module names there and without their numbers.
    names = architecture_of(Fields(config.source, UNLIMITED)).names
    modules = {piece.name.removesuffix(WEIGHT) for piece in pieces}
    modules |= {renamed(module + WEIGHT, names).removesuffix(WEIGHT) for module in modules}
    kinds = (re.sub(r"\\\.\d+", r"\.\\d+", re.escape(module)) for module in modules)
    patterns = {kind.replace(r"\.experts\.\d+", r"\.experts(\.\d+)?") for kind in kinds}
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "inference_mode": True}
    sizes = {"base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha}
    return kind | sizes | {"target_modules": "|".join(sorted(patterns))}

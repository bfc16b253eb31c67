"""Writer of checkpoints in the format of `transformers`."""

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import pieces_of
from models.decoder.config import DecoderConfig
from models.decoder.layers import adapted
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.pretrained.loading import by_path
from models.pretrained.safetensors import INDEX, SINGLE
from models.run_folder.files import part, write_whole

MAX_FILE_BYTES = 2**30
"""Maximum bytes of tensors per file, unless one tensor is larger; host memory holds one file at a time."""

KEPT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Optional checkpoint files, copied unchanged to a fine-tuned checkpoint."""


def save_pretrained(
    model: Decoder | StackedDecoder,
    folder: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    keep_from: Path | None = None,
) -> None:
    """Write a model as `config.json` and safetensors, in several files if it is large.

    The folder appears only once it is complete. All processes call this function, and process 0 writes.

    Args:
        model: the model, with relocated experts under their own names.
        folder: output folder; it must be absent or empty.
        dtype: dtype of the tensors in the files; `None` (default) keeps the dtype of the parameters and every bit.
        max_file_bytes: maximum bytes of tensors per file (default 1 GiB), which host memory holds at once.
        keep_from: folder with tokenizer and generation settings to copy; `None` copies none.

    Raises:
        ValueError: the folder is not empty.
        OSError: a file cannot be written.
    """
    dtype = model.config.param_dtype if dtype is None else dtype
    if jax.process_index() != 0:
        for _ in _tensors(model, jnp.dtype(dtype))[1]:
            pass
        return
    with vacant(folder) as aside:
        write_tensors(aside, *_tensors(model, jnp.dtype(dtype)), max_file_bytes)
        write_whole(aside / "config.json", config_json(model.config, dtype).encode())
        write_whole(aside / "README.md", readme(model.config).encode())
        if keep_from is not None:
            copy_files(KEPT_FILES, keep_from, aside)


def readme(config: DecoderConfig) -> str:
    """Return a page about a saved model: its architecture, and how to load it."""
    architecture = ", ".join(json.loads(config.source).get("architectures") or ["a mixture-of-experts model"])
    per_token = config.router.num_experts_per_tok
    return (
        f"# {architecture}\n\n"
        f"{config.num_layers} layers, {config.num_experts} experts of which {per_token} serve a token. "
        "Written by jax_moe_lb in the format of `transformers`:\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder")\n```\n'
    )


@contextmanager
def vacant(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `folder` at the end of the context, or deleted after an error.

    Args:
        folder: final path; it must be absent or an empty folder.

    Raises:
        ValueError: the folder is not empty.
    """
    check_vacant(folder)
    aside = part(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        # A rename can replace an empty folder only.
        aside.replace(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def copy_files(names: Iterable[str], source: Path, to: Path) -> None:
    """Copy those of the files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def check_vacant(folder: Path) -> None:
    """Raise `ValueError` if the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out is {str(folder)!r}, which is not empty; expected a new or empty folder")


def config_json(config: DecoderConfig, dtype: str) -> str:
    """Return the `config.json` of a model: its source with the current dtype of the tensors."""
    raw = json.loads(config.source)
    raw.pop("torch_dtype", None)
    # Weights read in 8 or 4 bits are written as floats.
    raw.pop("quantization_config", None)
    return json.dumps(raw | {"dtype": dtype}, indent=2) + "\n"


def _tensors(model: Decoder | StackedDecoder, dtype: Any) -> tuple[dict[str, int], Iterator[np.ndarray]]:
    """Return the bytes of each tensor by name, and an iterator over the tensors, which all processes exhaust."""
    pieces = pieces_of(model.config)
    if isinstance(model, StackedDecoder):
        pieces = [piece.in_stack(model.places, model.config.num_layers) for piece in pieces]
    groups, values = _by_tensor(pieces), by_path(nnx.state(model))

    def dtype_of(name: str) -> Any:
        # Selection biases stay float32 for any model dtype, as in `transformers`.
        is_param = values[groups[name][0].path].dtype == jnp.dtype(model.config.param_dtype)
        return dtype if is_param and not name.endswith("e_score_correction_bias") else np.dtype(np.float32)

    sizes = {name: math.prod(pieces[0].shape) * dtype_of(name).itemsize for name, pieces in groups.items()}
    scale = model.adapter_scale if isinstance(model, StackedDecoder) else 0.0
    return sizes, (assembled(pieces, values, dtype_of(name), scale) for name, pieces in groups.items())


def write_tensors(
    folder: Path, sizes: dict[str, int], tensors: Iterable[np.ndarray], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors into one file, or into several with an index.

    Args:
        folder: output folder.
        sizes: bytes of each tensor, by name.
        tensors: the tensors, in the same order; taken as each file is written.
        max_file_bytes: maximum bytes of tensors per file (default 1 GiB), unless one tensor is larger.
    """
    files: list[list[str]] = [[]]
    for name in sizes:
        if files[-1] and sum(sizes[other] for other in files[-1]) + sizes[name] > max_file_bytes:
            files.append([])
        files[-1].append(name)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names, tensors = names if len(files) > 1 else [SINGLE], iter(tensors)
    for file, held in zip(names, files, strict=True):
        save_file(dict(zip(held, tensors, strict=False)), folder / file, {"format": "pt"})
    if len(files) > 1:
        places = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _by_tensor(pieces: list[ParameterSlice]) -> dict[str, list[ParameterSlice]]:
    groups: dict[str, list[ParameterSlice]] = {}
    for piece in pieces:
        groups.setdefault(piece.name, []).append(piece)
    return groups


def named_tensors(config: DecoderConfig, state: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield named checkpoint tensors of parameters, or of a tree with the same structure, such as gradients.

    Args:
        config: sizes of the model.
        state: `nnx.state` of a `Decoder`; tensors without a parameter in it are skipped.
    """
    values = by_path(state)
    for name, pieces in _by_tensor(pieces_of(config)).items():
        if all(piece.path in values for piece in pieces):
            yield name, assembled(pieces, values, values[pieces[0].path].dtype)


def assembled(
    pieces: list[ParameterSlice], values: dict[str, Any], dtype: Any, adapter_scale: float = 0.0
) -> np.ndarray:
    """Assemble a checkpoint tensor from its slices, in the given dtype, with adapters merged into it."""
    whole = np.empty(pieces[0].shape, dtype)
    for piece in pieces:
        place, homes = piece.place, values.get(f"{piece.path.rpartition('.')[0]}.homes")
        if homes is not None and piece.expert is not None:
            # Relocated experts are at other rows of the parameter.
            place = (int(homes[piece.expert]),)
        parts = [values[f"{piece.path}{suffix}"] for suffix in ("", "_a", "_b") if f"{piece.path}{suffix}" in values]
        value = _on_host(parts, place, adapter_scale)
        whole[piece.index] = np.swapaxes(value, -1, -2) if piece.transposed else value
    return whole


def _on_host(parts: list[Array], place: tuple[int, ...], adapter_scale: float) -> np.ndarray:
    """Copy a part of a parameter with its adapters to the host, from all processes with shards of it."""
    part = _merged(parts, place, adapter_scale) if place else parts[0]
    return np.asarray(part if part.is_fully_addressable else multihost_utils.process_allgather(part, tiled=True))


@partial(jax.jit, static_argnums=2)
def _merged(parts: list[Array], place: tuple[int, ...], adapter_scale: float) -> Array:
    for at in place:
        parts = [jax.lax.dynamic_index_in_dim(part, at, 0, keepdims=False) for part in parts]
    matrix, *adapters = parts
    return adapted(matrix, adapters[0], adapters[1], adapter_scale) if adapters else matrix

"""Writer of checkpoints in the format of `transformers`."""

import json
import math
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb.core.checks import checked_dtype
from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import pieces_of
from models.decoder.config import DecoderConfig
from models.decoder.layers import adapted
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.pretrained.loading import at_home, by_path, grouped
from models.pretrained.safetensors import FLOATS, INDEX, LENGTH_BYTES, NUMPY, SINGLE, copy_blocks
from models.run_folder.files import naming, temporary_folder, write_whole

MAX_FILE_BYTES = 2**30  # maximum bytes of tensors per file, unless one tensor is larger
SUMMED_WORDS = 2**20  # words of 4 bytes of a tensor to exchange between processes at a time

TensorShapes = dict[str, jax.ShapeDtypeStruct]  # shape and dtype of each tensor of a checkpoint, by name

SAVED = tuple(NUMPY[name] for name in FLOATS)  # dtypes of a written checkpoint

NAMES = {np.dtype(dtype): name for name, dtype in NUMPY.items()}  # name in safetensors of each dtype

# Optional checkpoint files, copied unchanged to a fine-tuned checkpoint.
KEPT_FILES: tuple[str, ...] = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "vocab.json",
)
KEPT_FILES += ("special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")

# Names of the files of saved models and adapters.
WRITTEN = (*KEPT_FILES, "README.md", "config.json", INDEX, "adapter_config.json")
TENSORS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|adapter_model\.safetensors", re.ASCII)


def save_pretrained(
    model: Decoder | StackedDecoder,
    folder: Path,
    *,
    dtype: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    keep_from: Path | None = None,
    packed: bool = False,
) -> None:
    """Write a model as `config.json` and safetensors into a new or empty folder, which appears once it is complete."""
    # All processes call this function, and process 0 writes. Tensors are copied to the host and written one after
    # another, so host memory holds at most two copies of the largest. Relocated experts have their own names. Without
    # `dtype`, every bit is kept. `keep_from` is a folder with tokenizer and generation settings to copy. `packed` uses
    # names and shapes of `transformers` 5 in memory, with all experts of a layer in two tensors.
    stored = checked_dtype("dtype", model.config.param_dtype if dtype is None else dtype, SAVED)
    if jax.process_index() != 0:
        # A loop would hold each tensor until the next one is there.
        deque(_tensors(model, stored, packed)[1], maxlen=0)
        return
    with vacant(folder) as aside:
        write_tensors(aside, *_tensors(model, stored, packed), max_file_bytes)
        write_whole(aside / "config.json", config_json(model.config, stored.name).encode())
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
    """Yield a temporary folder, renamed to `folder` at the end of the context, or deleted after an error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out is {str(folder)!r}, which is not empty; expected a new or empty folder")
    with temporary_folder(folder) as aside:
        yield aside
        # A rename can replace an empty folder only.
        aside.replace(folder)


def is_exported(name: str) -> bool:
    """Return whether a saved model, or saved adapters, may have a file of this name."""
    return name in WRITTEN or TENSORS.fullmatch(name) is not None


def copy_files(names: Iterable[str], source: Path, to: Path) -> None:
    """Copy those of the files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def config_json(config: DecoderConfig, dtype: str) -> str:
    """Return the `config.json` of a model: its source with the current dtype of the tensors."""
    raw = json.loads(config.source)
    raw.pop("torch_dtype", None)
    # Weights read in 8 or 4 bits are written as floats.
    raw.pop("quantization_config", None)
    return json.dumps(raw | {"dtype": dtype}, indent=2) + "\n"


def _tensors(model: Decoder | StackedDecoder, dtype: Any, packed: bool) -> tuple[TensorShapes, Iterator[np.ndarray]]:
    """Return the shape of each tensor by name, and an iterator over the tensors, which all processes exhaust."""
    pieces = pieces_of(model.config, packed=packed)
    if isinstance(model, StackedDecoder):
        pieces = [piece.in_stack(model.places, model.config.num_layers) for piece in pieces]
    groups, values = grouped(pieces, "name"), by_path(nnx.state(model))

    def dtype_of(name: str) -> Any:
        # Selection biases stay float32 for any model dtype, as in `transformers`.
        is_param = values[groups[name][0].path].dtype == jnp.dtype(model.config.param_dtype)
        return dtype if is_param and not name.endswith("e_score_correction_bias") else np.dtype(np.float32)

    shapes = {name: jax.ShapeDtypeStruct(pieces[0].shape, dtype_of(name)) for name, pieces in groups.items()}
    scale = model.adapter_scale if isinstance(model, StackedDecoder) else 0.0
    return shapes, (assembled(pieces, values, shapes[name].dtype, scale) for name, pieces in groups.items())


def write_tensors(
    folder: Path, shapes: TensorShapes, tensors: Iterable[np.ndarray], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors into one file, or into several with an index, each before the next is taken."""
    files: list[list[str]] = [[]]
    for name in shapes:
        if files[-1] and sum(_num_bytes(shapes[other]) for other in (*files[-1], name)) > max_file_bytes:
            files.append([])
        files[-1].append(name)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names, tensors = names if len(files) > 1 else [SINGLE], iter(tensors)
    for file, held in zip(names, files, strict=True):
        write_file(folder / file, {name: shapes[name] for name in held}, tensors)
    if len(files) > 1:
        places = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": sum(map(_num_bytes, shapes.values()))}, "weight_map": places}
        write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def write_file(path: Path, shapes: TensorShapes, tensors: Iterator[np.ndarray]) -> None:
    """Write a safetensors file; `safetensors.numpy.save_file` would hold all tensors in memory, and a copy of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    # The widest numbers come first, so that each tensor is aligned.
    for name in sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize):
        shape, starts[name], end = shapes[name], end, end + _num_bytes(shapes[name])
        offsets = [starts[name], end]
        header[name] = {"dtype": NAMES[shape.dtype], "shape": list(shape.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in shapes:
            file.seek(LENGTH_BYTES + len(text) + starts[name])
            # A variable would hold the tensor until the next one is there.
            file.write(next(tensors).reshape(-1).view(np.uint8))


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def named_tensors(config: DecoderConfig, state: Any, *, packed: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Yield named checkpoint tensors of parameters, or of a tree with the same structure, such as gradients."""
    values = by_path(state)
    for name, pieces in grouped(pieces_of(config, packed=packed), "name").items():
        if all(piece.path in values for piece in pieces):
            yield name, assembled(pieces, values, values[pieces[0].path].dtype)


def assembled(
    pieces: list[ParameterSlice], values: dict[str, Any], dtype: Any, adapter_scale: float = 0.0
) -> np.ndarray:
    """Assemble a checkpoint tensor from its slices, in the given dtype, with adapters merged into it."""
    whole = np.empty(pieces[0].shape, dtype)
    for piece in pieces:
        suffixes = (suffix for suffix in ("", "_a", "_b") if f"{piece.path}{suffix}" in values)
        parts = [stored_slice(piece, values, suffix) for suffix in suffixes]
        value = parts[0] if len(parts) == 1 else np.asarray(_merged(*parts, adapter_scale))
        if piece.transposed:
            copy_blocks(np.swapaxes(value, -1, -2), whole[piece.index])
        else:
            whole[piece.index] = value
    return whole


def stored_slice(piece: ParameterSlice, values: dict[str, Any], suffix: str = "") -> np.ndarray:
    """Return the values of a slice on the host, as stored in the parameter whose path has the suffix."""
    return _on_host(values[f"{piece.path}{suffix}"], at_home(piece, values).place)


_merged = jax.jit(adapted)


def _on_host(parameter: Array, place: tuple[int, ...]) -> np.ndarray:
    """Copy a slice of a parameter to the host, from the shards of all processes."""
    # A program for all devices would gather every expert of the layer to take one of them.
    depth, shape = len(place), parameter.shape[len(place) :]
    num_bytes = math.prod(shape) * parameter.dtype.itemsize
    words = np.zeros(-(-num_bytes // 4), np.uint32)
    value = words.view(np.uint8)[:num_bytes].view(parameter.dtype).reshape(shape)
    for shard in parameter.addressable_shards:
        leading = [range(size)[part] for size, part in zip(parameter.shape, shard.index[:depth], strict=False)]
        if shard.replica_id == 0 and all(at in part for at, part in zip(place, leading, strict=True)):
            local = tuple(part.index(at) for at, part in zip(place, leading, strict=True))
            value[shard.index[depth:]] = _line(shard.data, local)
    if not parameter.is_fully_addressable:
        for start in range(0, len(words), SUMMED_WORDS):
            block = words[start : start + SUMMED_WORDS]
            # Shards of other processes are zero here. If all are sources, the broadcast is the sum of their words.
            block[:] = multihost_utils.broadcast_one_to_all(block, is_source=True)
    return value


@jax.jit
def _line(shard: Array, at: tuple[int, ...]) -> Array:
    for index in at:
        shard = jax.lax.dynamic_index_in_dim(shard, index, 0, keepdims=False)
    return shard

"""Writer of checkpoints in the format of `transformers`."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from safetensors.numpy import save_file

from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import pieces_of
from models.decoder.config import DecoderConfig
from models.decoder.model import Decoder
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
    model: Decoder,
    folder: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    keep_from: Path | None = None,
) -> None:
    """Write a model as `config.json` and safetensors, in several files if it is large.

    The folder appears only once it is complete. All parameters must be on devices of this process.

    Args:
        model: a model loaded by `from_pretrained`.
        folder: output folder; it must be absent or empty.
        dtype: dtype of the tensors in the files; `None` (default) keeps the dtype of the parameters and every bit.
        max_file_bytes: maximum bytes of tensors per file (default 1 GiB), which host memory holds at once.
        keep_from: folder with tokenizer and generation settings to copy; `None` copies none.

    Raises:
        ValueError: the folder is not empty.
        OSError: a file cannot be written.
    """
    with vacant(folder) as aside:
        _write_model(model, aside, jnp.dtype(dtype or model.config.param_dtype), max_file_bytes)
        write_whole(aside / "config.json", config_json(model.config, dtype or model.config.param_dtype).encode())
        if keep_from is not None:
            copy_files(KEPT_FILES, keep_from, aside)


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


def _write_model(model: Decoder, folder: Path, dtype: Any, max_file_bytes: int) -> None:
    groups = _by_tensor(pieces_of(model.config))
    values = by_path(nnx.state(model))

    def dtype_of(name: str) -> Any:
        # Selection biases stay float32 for any model dtype, as in `transformers`.
        is_param = values[groups[name][0].path].dtype == jnp.dtype(model.config.param_dtype)
        return dtype if is_param and not name.endswith("e_score_correction_bias") else np.dtype(np.float32)

    sizes = {name: math.prod(pieces[0].shape) * dtype_of(name).itemsize for name, pieces in groups.items()}
    write_tensors(folder, sizes, lambda name: assembled(groups[name], values, dtype_of(name)), max_file_bytes)


def write_tensors(
    folder: Path, sizes: dict[str, int], make: Callable[[str], np.ndarray], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors into one file, or into several with an index.

    Args:
        folder: output folder.
        sizes: bytes of each tensor, by name.
        make: function returning a tensor by name, called when its file is written.
        max_file_bytes: maximum bytes of tensors per file (default 1 GiB), unless one tensor is larger.
    """
    files: list[list[str]] = [[]]
    for name in sizes:
        if files[-1] and sum(sizes[other] for other in files[-1]) + sizes[name] > max_file_bytes:
            files.append([])
        files[-1].append(name)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names = names if len(files) > 1 else [SINGLE]
    for file, held in zip(names, files, strict=True):
        save_file({name: make(name) for name in held}, folder / file, {"format": "pt"})
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


def assembled(pieces: list[ParameterSlice], values: dict[str, Any], dtype: Any) -> np.ndarray:
    """Assemble a checkpoint tensor from its slices, in the given dtype."""
    whole = np.empty(pieces[0].shape, dtype)
    for piece in pieces:
        homes = values.get(f"{piece.path.rpartition('.')[0]}.homes")
        # Relocated experts are at other rows of the parameter.
        line = piece.expert if homes is None or piece.expert is None else int(homes[piece.expert])
        value = _on_host(values[piece.path], line)
        whole[piece.index] = np.swapaxes(value, -1, -2) if piece.transposed else value
    return whole


def _on_host(value: Array, expert: int | None) -> np.ndarray:
    """Copy a parameter, or one row of it, to the host, from a device holding it."""
    if expert is None:
        return np.asarray(value)
    for shard in value.addressable_shards:
        lines = range(value.shape[0])[shard.index[0]]
        if expert in lines and shard.data.shape[1:] == value.shape[1:]:
            return np.asarray(shard.data[lines.index(expert)])
    return np.asarray(value[expert])

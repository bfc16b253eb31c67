"""`save_pretrained` writes a checkpoint that `transformers` loads."""

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
"""A file has at most so many bytes of tensors, unless one tensor has more: host memory holds one file at a time."""

KEPT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
"""What else a checkpoint may have, and a tuned one needs unchanged."""


def save_pretrained(
    model: Decoder,
    folder: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    keep_from: Path | None = None,
) -> None:
    """Write a model as `transformers` reads it: `config.json` and safetensors, in several files if they are large.

    The folder is there when it is whole, and not before. All parameters have to be on devices of this process.

    Args:
        model: what `from_pretrained` returned, trained or not.
        folder: where to; it does not exist yet, or is empty.
        dtype: that of the tensors in the files; `None`, the default, is that of the parameters, and keeps every bit.
        max_file_bytes: the bytes of tensors of a file, which host memory holds at once.
        keep_from: a folder whose tokenizer and generation settings are copied; `None` copies nothing.

    Raises:
        ValueError: the folder has something in it.
        OSError: it cannot be written.
    """
    with vacant(folder) as aside:
        _write_model(model, aside, jnp.dtype(dtype or model.config.param_dtype), max_file_bytes)
        write_whole(aside / "config.json", config_json(model.config, dtype or model.config.param_dtype).encode())
        if keep_from is not None:
            copy_files(KEPT_FILES, keep_from, aside)


@contextmanager
def vacant(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the name of another when all is written, and is removed otherwise.

    Args:
        folder: does not exist yet, or is empty.

    Raises:
        ValueError: it has something in it.
    """
    check_vacant(folder)
    aside = part(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        # A rename replaces an empty folder, and no other.
        aside.replace(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def copy_files(names: Iterable[str], source: Path, to: Path) -> None:
    """Copies those of the files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def check_vacant(folder: Path) -> None:
    """Refuse a folder that has something in it, with a `ValueError`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out is {str(folder)!r}, which has something in it; expected a new or an empty folder")


def config_json(config: DecoderConfig, dtype: str) -> str:
    """Write the `config.json` of a model: that which it was made from, with the dtype that its tensors have now."""
    raw = json.loads(config.source)
    raw.pop("torch_dtype", None)
    # Whatever was read in 8 or 4 bits is written as floats.
    raw.pop("quantization_config", None)
    return json.dumps(raw | {"dtype": dtype}, indent=2) + "\n"


def _write_model(model: Decoder, folder: Path, dtype: Any, max_file_bytes: int) -> None:
    groups = _by_tensor(pieces_of(model.config))
    values = by_path(nnx.state(model))

    def dtype_of(name: str) -> Any:
        # Biases of the choice stay wide in whatever model: `transformers` keeps them so, too.
        is_param = values[groups[name][0].path].dtype == jnp.dtype(model.config.param_dtype)
        return dtype if is_param and not name.endswith("e_score_correction_bias") else np.dtype(np.float32)

    sizes = {name: math.prod(pieces[0].shape) * dtype_of(name).itemsize for name, pieces in groups.items()}
    write_tensors(folder, sizes, lambda name: assembled(groups[name], values, dtype_of(name)), max_file_bytes)


def write_tensors(
    folder: Path, sizes: dict[str, int], make: Callable[[str], np.ndarray], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors into one file, or into several with an index.

    Args:
        folder: where to.
        sizes: the bytes of each tensor, by name.
        make: returns a tensor; it is called when its file is written.
        max_file_bytes: the bytes of tensors of a file, unless one tensor has more.
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
    """Yield the tensors of a checkpoint, by name, of parameters or of what is shaped like them, such as gradients.

    Args:
        config: the sizes.
        state: what `nnx.state` returned of a `Decoder`; tensors whose parameters it has not are left out.
    """
    values = by_path(state)
    for name, pieces in _by_tensor(pieces_of(config)).items():
        if all(piece.path in values for piece in pieces):
            yield name, assembled(pieces, values, values[pieces[0].path].dtype)


def assembled(pieces: list[ParameterSlice], values: dict[str, Any], dtype: Any) -> np.ndarray:
    """Make a tensor of a checkpoint, in that dtype, of its pieces."""
    whole = np.empty(pieces[0].shape, dtype)
    for piece in pieces:
        homes = values.get(f"{piece.path.rpartition('.')[0]}.homes")
        # Experts that have moved are at other lines of the parameter.
        line = piece.expert if homes is None or piece.expert is None else int(homes[piece.expert])
        value = _on_host(values[piece.path], line)
        whole[piece.index] = np.swapaxes(value, -1, -2) if piece.transposed else value
    return whole


def _on_host(value: Array, expert: int | None) -> np.ndarray:
    """Bring a parameter, or one line of it, to the host, from a device that has it."""
    if expert is None:
        return np.asarray(value)
    for shard in value.addressable_shards:
        lines = range(value.shape[0])[shard.index[0]]
        if expert in lines and shard.data.shape[1:] == value.shape[1:]:
            return np.asarray(shard.data[lines.index(expert)])
    return np.asarray(value[expert])

"""Reader of safetensors checkpoints, in one file or in several with an index."""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import open_regular
from models.architectures.parameter_map import Index
from models.run_folder.files import read_object

NUMPY: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NUMPY |= {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
NUMPY["F8_E4M3"] = ml_dtypes.float8_e4m3fn  # supported dtypes; others are rejected by name

DTYPES = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY.items()}  # bytes per number of each supported dtype
LENGTH_BYTES = 8
MOST_NAME = 160  # maximum number of characters of a tensor's name in a message


@dataclass(frozen=True)
class Header:
    """Locations of the tensors in a file."""

    path: Path  # path of the file
    shapes: dict[str, tuple[int, ...]]  # shape of each tensor
    dtypes: dict[str, str]  # dtype of each tensor, in the notation of the format
    starts: dict[str, int]  # byte offset of each tensor in the file

    def renamed(self, name_of: Callable[[str], str | None]) -> "Header":
        """Return the header with other names, without the tensors named `None`."""
        names = {name: new for name in self.shapes if (new := name_of(name)) is not None}
        shapes = {new: self.shapes[name] for name, new in names.items()}
        dtypes = {new: self.dtypes[name] for name, new in names.items()}
        return Header(self.path, shapes, dtypes, {new: self.starts[name] for name, new in names.items()})


# Prefixes of the tensors of the text part of a multimodal checkpoint, and those of a checkpoint of its own.
TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model."}
TEXT_PREFIXES |= {"language_model.lm_head.": "lm_head.", "lm_head.": "lm_head."}


def text_name(name: str) -> str | None:
    """Return the name of a tensor of the text part in a checkpoint of its own; `None` for another tensor."""
    found = (own + name.removeprefix(prefix) for prefix, own in TEXT_PREFIXES.items() if name.startswith(prefix))
    return next(found, None)


def read_header(path: Path, limits: FileLimits = FileLimits()) -> Header:
    """Read the header of a file, without its tensors."""
    try:
        with open_regular(path) as file:
            most = max(os.fstat(file.fileno()).st_size - LENGTH_BYTES, 0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > most:
                raise ValueError(f"{path}: the header has {length} bytes; expected at most {most}, as the file ends")
            limits.check("text_bytes", length, f"{path}: a header of {{}} bytes")
            text = file.read(length)
        values = 1 + sum(map(text.count, (b",", b":", b"[", b"{")))
        limits.check("values", values, f"{path}: a JSON text of {{}} values")
        # The package checks that tensors follow each other without gaps, with the sizes of their shapes, to the end.
        with safe_open(path, "numpy") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
            dtypes = {name: part.get_dtype() for name, part in parts.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"{path}: {shown(reason)[1:-1]}") from error
    starts, end = {}, LENGTH_BYTES + length
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {short(name)} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        starts[name], end = end, end + math.prod(shapes[name]) * DTYPES[dtype]
    return Header(path, shapes, dtypes, starts)


def short(name: str) -> str:
    """Return the name of a tensor for a message, with escapes and without the middle of a long one."""
    text = repr(name)[1:-1]
    return text if len(text) <= MOST_NAME else f"{text[: MOST_NAME // 2]} ... {text[-MOST_NAME // 4 :]}"


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"  # dtype of 8-bit floats, which are stored with scales: see `quantized.py`


BLOCK = 128  # rows and columns to copy at a time to another order of the dimensions
FINGERPRINT_BYTES = 64  # bytes of each tensor in the fingerprint of a checkpoint
READ_BYTES = 2**24  # bytes to read at a time if only some columns of a tensor are needed


class TensorFolder:
    """Reader of the tensors of a checkpoint folder."""

    # The constructor validates the header of every file. Only safetensors are read, as loading a pickle can execute
    # arbitrary code.

    def __init__(
        self, folder: Path, limits: FileLimits = FileLimits(), name_of: Callable[[str], str | None] | None = None
    ) -> None:
        # `name_of` renames tensors, and leaves those with the name `None` out.
        self.folder, self.limits = folder, limits
        self.headers = [read_header(path, limits) for path in self._files()]
        self.home: dict[str, Header] = {}
        for header in self.headers:
            for name in header.shapes:
                if name in self.home:
                    raise ValueError(
                        f"{header.path}: {short(name)} is in {self.home[name].path.name}, too; expected it once"
                    )
                self.home[name] = header
        self._check_index()
        if name_of is not None:
            headers = [header.renamed(name_of) for header in self.headers]
            self.home = {name: header for header in headers for name in header.shapes}

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Read a tensor, or only the part of it given by an index with positive steps."""
        # Besides the result, host memory holds at most `READ_BYTES` or one row of it.
        header = self.home[name]
        dtype, shape, start = np.dtype(NUMPY[header.dtypes[name]]), header.shapes[name], header.starts[name]
        while index and isinstance(index[0], int):
            start += index[0] * math.prod(shape[1:]) * dtype.itemsize
            shape, index = shape[1:], index[1:]
        with open_regular(header.path) as file:
            found = _read_rows(file, start, shape or (1,), dtype, index)
        return found if shape else found.reshape(())

    @property
    def fingerprint(self) -> str:
        """Hash of the name, dtype, shape and first bytes of each tensor, independent of the files with them."""
        parts = {}
        for header in {id(header): header for header in self.home.values()}.values():
            with open_regular(header.path) as file:
                for name, shape in header.shapes.items():
                    file.seek(header.starts[name])
                    num_bytes = math.prod(shape) * DTYPES[header.dtypes[name]]
                    parts[name] = header.dtypes[name], shape, file.read(min(num_bytes, FINGERPRINT_BYTES)).hex()
        return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()

    def _files(self) -> list[Path]:
        if not (self.folder / INDEX).exists():
            if not (self.folder / SINGLE).exists():
                raise ValueError(f"checkpoint is {str(self.folder)!r}; expected {SINGLE} or {INDEX} in it")
            return [self.folder / SINGLE]
        names, present = sorted(set(self._weight_map().values())), {path.name for path in self.folder.iterdir()}
        for name in names:
            if Path(name).name != name or name in (".", ".."):
                raise ValueError(f"{self.folder / INDEX}: {shown(name)} is outside the folder; expected a file in it")
            if name not in present:
                raise ValueError(f"{self.folder / INDEX}: {shown(name)} is missing; expected all files of the index")
        return [self.folder / name for name in names]

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            places = read_object(path, self.limits).get("weight_map")
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError(f"{path}: weight_map is {shown(places)}; expected an object of names and files")
        return places

    def _check_index(self) -> None:
        if (self.folder / INDEX).exists():
            for name, file in self._weight_map().items():
                header = self.home.get(name)
                if header is None or header.path.name != file:
                    raise ValueError(f"{self.folder / INDEX}: {short(name)} is not in {shown(file)}; expected it there")


def _read_rows(file: BufferedReader, start: int, shape: tuple[int, ...], dtype: np.dtype, index: Index) -> np.ndarray:
    """Read rows of an array that begins at byte `start`, and of these the part given by the rest of the index."""
    chosen = np.arange(shape[0])[index[:1]]
    rest, row_bytes = index[1:], math.prod(shape[1:]) * dtype.itemsize
    found = np.empty((len(chosen), *np.broadcast_to(np.int8(0), shape[1:])[rest].shape), dtype)
    step = int(chosen[1] - chosen[0]) if len(chosen) > 1 else 1
    is_whole = found.shape[1:] == shape[1:] and step == 1
    most = max(1, len(chosen) if is_whole else READ_BYTES // max(row_bytes * step, 1))
    for first in range(0, len(chosen), most):
        part = chosen[first : first + most]
        lines = found if is_whole else np.empty((int(part[-1] + 1 - part[0]), *shape[1:]), dtype)
        file.seek(start + int(part[0]) * row_bytes)
        # The header has been checked against the size of the file.
        file.readinto(lines.reshape(-1).view(np.uint8))
        if not is_whole:
            found[first : first + most] = lines[::step][(slice(None), *rest)]
    return found


def copy_blocks(value: np.ndarray, to: np.ndarray) -> None:
    """Copy matrices with another order of their dimensions in memory, as for a transposed matrix."""
    # A copy by rows reads another cache line for each number; blocks take less than half the time.
    for row in range(0, value.shape[-2], BLOCK):
        for column in range(0, value.shape[-1], BLOCK):
            part = (..., slice(row, row + BLOCK), slice(column, column + BLOCK))
            to[part] = value[part]

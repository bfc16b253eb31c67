"""Reader of safetensors checkpoints, in one file or in several with an index.

`read_header` rejects a header that describes more bytes than the file contains.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError, open_regular, parse_json, read_bytes
from jax_moe_lb.recordings.yaml_file import shown
from models.architectures.parameter_map import Index

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
DTYPES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes per number of each supported dtype; other dtypes are rejected by name."""

LENGTH_BYTES = 8

MOST_NAME = 160
"""Maximum number of characters of a tensor's name in a message."""


@dataclass(frozen=True)
class Header:
    """Locations of the tensors in a file.

    Args:
        path: path of the file.
        shapes: shape of each tensor.
        dtypes: dtype of each tensor, in the notation of the format.
        starts: byte offset of each tensor in the file.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    starts: dict[str, int]


def read_header(path: Path, limits: FileLimits = FileLimits()) -> Header:
    """Read the header of a file, without its tensors.

    Args:
        path: a safetensors file.
        limits: limits of the header; the size of the file limits the tensors.

    Raises:
        ValueError: the file is truncated, or its header is inconsistent or violates the format. The message contains
            the file and, if applicable, the tensor.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            most = max(size - LENGTH_BYTES, 0)
            if length > most:
                raise ValueError(f"{path}: the header has {length} bytes; expected at most {most}, as the file ends")
            limits.check("text_bytes", length, f"{path}: a header of {{}} bytes")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    entries = _entries(path, text, limits)
    spans = []
    for name, entry in entries.items():
        start, stop = _span(path, name, entry)
        if stop > size - LENGTH_BYTES - length:
            raise ValueError(
                f"{path}: {short(name)} ends at byte {stop}; expected at most {size - LENGTH_BYTES - length}"
            )
        spans.append((start, stop, name))
    _check_apart(path, spans, size - LENGTH_BYTES - length)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    starts = {name: LENGTH_BYTES + length + start for start, _, name in spans}
    return Header(path, shapes, {name: entry["dtype"] for name, entry in entries.items()}, starts)


def _entries(path: Path, text: bytes, limits: FileLimits) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        read = dict(pairs)
        if len(read) != len(pairs):
            raise ValueError("a name occurs twice")
        return read

    try:
        entries = parse_json(text, limits, once)
    except LimitError as error:
        raise LimitError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: the header is not a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Validate the entry of one tensor, and return its start and end offsets."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"{path}: {short(name)} is {shown(entry)}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: {short(name)} has dtype {shown(dtype)}; expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise ValueError(f"{path}: {short(name)} has shape {shown(shape)}; expected sizes of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: {short(name)} has offsets {shown(offsets)}; expected a start and an end")
    if offsets[1] - offsets[0] != (nbytes := math.prod(shape) * DTYPES[dtype]):
        raise ValueError(
            f"{path}: {short(name)} has {offsets[1] - offsets[0]} bytes; "
            f"expected {shown(nbytes)} of {dtype} {shown(shape)}"
        )
    return offsets[0], offsets[1]


def short(name: str) -> str:
    """Return the name of a tensor for a message, with escapes and without the middle of a long one."""
    text = repr(name)[1:-1]
    return text if len(text) <= MOST_NAME else f"{text[: MOST_NAME // 2]} ... {text[-MOST_NAME // 4 :]}"


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_apart(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    end, before = 0, "the header"
    for start, stop, name in sorted(spans):
        if start != end:
            how = "overlaps" if start < end else "leaves a gap after"
            raise ValueError(
                f"{path}: {short(name)} begins at byte {start} and {how} {short(before)}; expected byte {end}"
            )
        end, before = stop, name
    if end != size:
        raise ValueError(f"{path}: {size} bytes follow the header; expected {end}, the size of its tensors")


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

FLOATS = ("F64", "F32", "F16", "BF16")

FP8 = "F8_E4M3"
"""Dtype of 8-bit floats, which are stored with scales: see `quantized.py`."""


class TensorFolder:
    """Reader of the tensors of a checkpoint folder, and a context manager closing its files.

    The constructor validates the header of every file. Only safetensors are read, as loading a pickle can execute
    arbitrary code.

    Args:
        folder: folder of the checkpoint.
        limits: limits of the index and of each header.

    Raises:
        ValueError: there are no tensors, or a file is missing, outside the folder or invalid.
    """

    def __init__(self, folder: Path, limits: FileLimits = FileLimits()) -> None:
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
        self.open: dict[Path, Any] = {}

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self.open.values():
            file.__exit__(kind, error, trace)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Read a tensor, or only the part of it given by an index.

        Args:
            name: name of the tensor.
            index: part to read; strides apply in memory.
        """
        header = self.home[name]
        if header.dtypes[name] == FP8:
            return _float8(header, name)[index]
        if header.path not in self.open:
            self.open[header.path] = safe_open(header.path, framework="numpy").__enter__()
        if not index:
            return self.open[header.path].get_tensor(name)
        # Read whole rows, then apply the rest of the index in memory.
        first, *rest = index
        lines = slice(first, first + 1) if isinstance(first, int) else first
        read = self.open[header.path].get_slice(name)[lines]
        return read[(0 if isinstance(first, int) else slice(None), *rest)]

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
            places = parse_json(read_bytes(path, self.limits), self.limits)["weight_map"]
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise ValueError("expected weight_map to map names to files")
        except LimitError as error:
            raise LimitError(f"{path}: {error}") from error
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not an index: {error}") from error
        return places

    def _check_index(self) -> None:
        if (self.folder / INDEX).exists():
            for name, file in self._weight_map().items():
                header = self.home.get(name)
                if header is None or header.path.name != file:
                    raise ValueError(f"{self.folder / INDEX}: {short(name)} is not in {shown(file)}; expected it there")


def _float8(header: Header, name: str) -> np.ndarray:
    """Read 8-bit floats, for which safetensors has no NumPy dtype."""
    shape = header.shapes[name]
    bits = np.fromfile(header.path, np.uint8, math.prod(shape), offset=header.starts[name])
    return bits.reshape(shape).view(ml_dtypes.float8_e4m3fn)

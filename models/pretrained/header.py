"""`read_header` reads what a safetensors file says of itself, and believes nothing that the file does not hold."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
DTYPES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The bytes of a number of each dtype that is read; other floats of 8 and 4 bits are refused by name."""

MOST_HEADER_BYTES = 100_000_000
"""A header has at most so many bytes, as the format says."""

LENGTH_BYTES = 8


@dataclass(frozen=True)
class Header:
    """A header says where the tensors of a file are.

    Args:
        path: the file.
        shapes: the shape of each tensor.
        dtypes: the dtype of each, in the words of the format.
        starts: the byte of the file at which each begins.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    starts: dict[str, int]


def read_header(path: Path) -> Header:
    """Reads the header of a file, and no tensor.

    Args:
        path: a safetensors file.

    Raises:
        ValueError: the file is truncated, or its header contradicts itself or the format; the line names the file and,
            where one is to blame, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            most = min(size - LENGTH_BYTES, MOST_HEADER_BYTES)
            if length > most:
                raise ValueError(f"{path}: the header has {length} bytes; expected at most {most}, as the file ends")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    entries = _entries(path, text)
    spans = []
    for name, entry in entries.items():
        start, stop = _span(path, name, entry)
        if stop > size - LENGTH_BYTES - length:
            raise ValueError(f"{path}: {name} ends at byte {stop}; expected at most {size - LENGTH_BYTES - length}")
        spans.append((start, stop, name))
    _check_apart(path, spans, size - LENGTH_BYTES - length)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    starts = {name: LENGTH_BYTES + length + start for start, _, name in spans}
    return Header(path, shapes, {name: entry["dtype"] for name, entry in entries.items()}, starts)


def _entries(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        read = dict(pairs)
        if len(read) != len(pairs):
            raise ValueError("it has a name twice")
        return read

    try:
        entries = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: the header is no JSON object")
    entries.pop("__metadata__", None)
    return entries


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Checks what is said of one tensor, and returns where it begins and ends."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"{path}: {name} is {str(entry)[:80]!r}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: {name} has dtype {str(dtype)[:40]!r}; expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise ValueError(f"{path}: {name} has shape {str(shape)[:80]}; expected sizes of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: {name} has offsets {str(offsets)[:80]}; expected a beginning and an end")
    if offsets[1] - offsets[0] != (nbytes := math.prod(shape) * DTYPES[dtype]):
        raise ValueError(f"{path}: {name} has {offsets[1] - offsets[0]} bytes; expected {nbytes} of {dtype} {shape}")
    return offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_apart(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    end, before = 0, "the header"
    for start, stop, name in sorted(spans):
        if start != end:
            how = "overlaps" if start < end else "leaves a gap after"
            raise ValueError(f"{path}: {name} begins at byte {start} and {how} {before}; expected byte {end}")
        end, before = stop, name
    if end != size:
        raise ValueError(f"{path}: {size} bytes follow the header; expected {end}, those of its tensors")

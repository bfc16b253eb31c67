"""Checks of the sizes declared by a checkpoint, before Orbax and TensorStore allocate memory for them.

TensorStore decodes at most the bytes of a declared chunk, so checked shapes and chunks bound the memory of a read.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError, parse_json, read_bytes

# Patterns of the JSON files read by Orbax, relative to the folder of a checkpoint.
JSON_FILES = ("_*", "run/*", "*/_*", "*/array_metadatas/*")

# Data types of Zarr with at most 16 bytes per entry.
NUMBERS = r"[<|>][biufc](1|2|4|8|16)|bfloat16|float8_\w{,16}|u?int[24]"


def check_texts(checkpoint: Path, limits: FileLimits) -> None:
    """Check the sizes of the JSON files of a checkpoint."""
    for path in sorted({path for pattern in JSON_FILES for path in checkpoint.glob(pattern) if not path.is_dir()}):
        try:
            text = read_bytes(path, limits)
            limits.check("values", sum(map(text.count, (b",", b":", b"[", b"{"))), "a JSON text of {} values")
        except LimitError as error:
            raise LimitError(f"{str(path)!r}: {error}") from error


def check_arrays(item: Path, wanted: Mapping[str, Any], limits: FileLimits) -> None:
    """Check the declared shapes, chunks and encodings of the arrays of an item against those of a state."""
    form = parse_json(read_bytes(item / "_METADATA", limits), limits)
    # Other forms have their declarations elsewhere.
    if not isinstance(form, dict) or form.get("use_ocdbt") is not True or form.get("use_zarr3") is not False:
        raise ValueError(f"{str(item)!r} has another form; expected arrays in OCDBT and Zarr 2")
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item.absolute()}/"}).result()
    for name, leaf in wanted.items():
        found = store.read(f"{name}/.zarray").result()
        if found.state != "value":
            continue
        try:
            _check_declaration(parse_json(found.value, limits), list(leaf.shape))
        except ValueError as error:
            kind = LimitError if isinstance(error, LimitError) else ValueError
            raise kind(f"{str(item)!r}: {shown(name)} has {error}") from error


def _check_declaration(declared: Any, want: list[int]) -> None:
    fields = declared if isinstance(declared, dict) else {}
    shape, chunks = fields.get("shape"), fields.get("chunks")
    if shape != want:
        raise ValueError(f"shape {shown(shape)}; expected {want}")
    if (
        not isinstance(chunks, list)
        or len(chunks) != len(want)
        or any(type(size) is not int or not 1 <= size <= most for size, most in zip(chunks, want, strict=True))
    ):
        raise ValueError(f"chunks {shown(chunks)}; expected at most {want}")
    # Other compressors allocate memory of a size taken from the file.
    compressor = fields.get("compressor")
    if compressor is not None and (not isinstance(compressor, dict) or compressor.get("id") != "zstd"):
        raise ValueError(f"compressor {shown(compressor)}; expected zstd")
    if fields.get("filters"):
        raise ValueError(f"filters {shown(fields['filters'])}; expected none")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or re.fullmatch(NUMBERS, dtype) is None:
        raise ValueError(f"dtype {shown(dtype)}; expected a number type")

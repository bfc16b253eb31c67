"""Plans in .npz files, written atomically and validated on reading.

`read_named` reads untrusted .npz and .npy files within the limits of `FileLimits`.
"""

import io
import math
import os
import secrets
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from jax_moe_lb.core.file_limits import BinaryFile, FileLimits, LimitError, check_member, open_archive, open_regular
from jax_moe_lb.core.split import Tier

ARRAYS = ("placement", "quota", "relay", "rails")
"""Array fields of a plan. A file omits fields with value `None`."""

_SETTINGS = {
    "domain": (np.integer, "an integer"),
    "split_tier": (np.str_, "a word"),
    "split_locality": (np.bool_, "a bool"),
}
"""Scalar fields of a plan file, each with the dtype and the description for error messages."""


def write_arrays(path: Path, parts: dict[str, Any]) -> None:
    """Write the fields of a plan."""
    buffer = io.BytesIO()
    # NumPy's stub types every keyword as an option, so the dict is untyped.
    arrays: dict[str, Any] = {name: np.asarray(part) for name, part in parts.items()}
    np.savez_compressed(buffer, **arrays)
    with whole_file(path) as part:
        part.write_bytes(buffer.getvalue())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success and deleted on error."""
    if path.exists() and not path.is_file():
        # A rename would replace a device or a pipe by a file. For a folder, writing raises the right error.
        yield path
        return
    path = path.resolve()  # replace the target of a symbolic link, not the link
    # A rename is atomic inside one file system only, so the temporary file is beside the final one. It keeps the
    # suffix, which some writers inspect.
    part = path.with_name(f".part-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield part
        with part.open("rb") as file:
            # Without fsync, a machine crash can leave an empty file under the final name.
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_arrays(path: Path, limits: FileLimits) -> dict[str, np.ndarray]:
    """Read a file written by `write_arrays` and check its dtypes and shapes."""
    arrays = _arrays_of(path, limits)
    _check_arrays(path, arrays)
    return arrays


def read_named(path: Path, names: Sequence[str], limits: FileLimits) -> tuple[dict[str, np.ndarray], list[str]]:
    """Read arrays of an .npz file by name, or the array of an .npy file under the first name."""
    # It decompresses the named arrays only, and reads the headers of all of them first: a small file may declare, or
    # decompress to, terabytes.
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(2) != b"PK":
            file.seek(0)
            _check_sizes([read_header(file)], [size], limits)
            file.seek(0)
            # Unpickling can run arbitrary code from an untrusted file.
            return {names[0]: np.lib.format.read_array(file, allow_pickle=False)}, []
        with open_archive(file, limits) as archive:
            members = {name.removesuffix(".npy"): archive.getinfo(name) for name in archive.namelist()}
            wanted = {name: members[name] for name in names if name in members}
            headers = [_header_of(archive, info, size) for info in wanted.values()]
            _check_sizes(headers, [info.file_size for info in wanted.values()], limits)
            return {name: _array_of(archive, info) for name, info in wanted.items()}, list(members)


class Header(NamedTuple):
    """Declared size of an array."""

    start: int  # bytes of the header
    num_entries: int  # number of entries
    itemsize: int  # bytes of an entry


def read_header(file: BinaryFile) -> Header:
    """Read the header of an array."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    length = file.read(4 if version == (2, 0) else 2)
    # A version 2 header can be up to 4 GiB, and NumPy reads it before rejecting more than 10000 characters.
    if int.from_bytes(length, "little") > 2**16:
        raise ValueError("a long header")
    # Version 3 differs in the encoding of field names only; plain numeric dtypes have no fields.
    rest = io.BytesIO(length + file.read(int.from_bytes(length, "little")))
    shape, _, dtype = readers[version](rest)
    if min(shape, default=0) < 0:
        raise ValueError("a negative dimension")
    return Header(np.lib.format.MAGIC_LEN + len(rest.getvalue()), math.prod(shape), dtype.itemsize)


def _header_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo, archive_bytes: int) -> Header:
    check_member(info, archive_bytes)
    with archive.open(info) as file:
        return read_header(file)


def _array_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_sizes(headers: Sequence[Header], sizes: Sequence[int], limits: FileLimits) -> None:
    """Check the declared sizes of arrays against the limit, and against the bytes that contain them."""
    # Entries of zero bytes count as one byte each.
    num_bytes = sum(header.num_entries * max(header.itemsize, 1) for header in headers)
    limits.check("array_bytes", num_bytes, "arrays of {} bytes")
    for header, size in zip(headers, sizes, strict=True):
        if header.start + header.num_entries * header.itemsize > size:
            raise ValueError("an array with fewer bytes than its header declares")


def _arrays_of(path: Path, limits: FileLimits) -> dict[str, np.ndarray]:
    """Read the known arrays of an .npz file without validation, ignoring unknown names."""
    try:
        found, members = read_named(path, (*ARRAYS, *_SETTINGS), limits)
    except (OSError, MemoryError):
        raise
    except LimitError as error:
        raise LimitError(f"{path}: {error}") from error
    except Exception as error:  # NumPy and zipfile raise many types for a damaged file
        raise ValueError(f"{path}: damaged or not an .npz file; expected a file written by Plan.save") from error
    # An .npy file holds one unnamed array, hence no plan.
    found = found if members else {}
    for name in ("placement", "quota", *_SETTINGS):
        if name not in found:
            raise ValueError(f"{path}: {name} is missing; expected a file written by Plan.save")
    return found


def _check_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    for name, (kind, wanted) in _SETTINGS.items():
        if arrays[name].ndim or not np.issubdtype(arrays[name].dtype, kind):
            raise ValueError(f"{path}: {name} is {_described(arrays[name])}; expected {wanted} without dimensions")
    if str(arrays["split_tier"]) not in get_args(Tier):
        tiers = " or ".join(map(repr, get_args(Tier)))
        raise ValueError(f"{path}: split_tier is {str(arrays['split_tier'])!r}; expected {tiers}")
    for name in ARRAYS:
        if name in arrays and not np.issubdtype(arrays[name].dtype, np.integer):
            raise ValueError(f"{path}: {name} is {_described(arrays[name])}; expected integers")
    if arrays["placement"].ndim < 2:
        raise ValueError(f"{path}: placement is {_described(arrays['placement'])}; expected [..., R, S]")
    *leading, num_ranks, slots = arrays["placement"].shape
    # `placement` does not determine E.
    num_experts = arrays["quota"].shape[-2] if arrays["quota"].ndim > 1 else 0
    num_rails = arrays["rails"].shape[-1] if "rails" in arrays and arrays["rails"].ndim else 0
    shapes = {
        "quota": (num_experts, num_ranks),
        "relay": (num_ranks, slots),
        "rails": (num_ranks, num_ranks, num_rails),
    }
    words = {"quota": "[..., E, R]", "relay": "[..., R, S]", "rails": "[..., R, R, N]"}
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != (*leading, *shape):
            raise ValueError(
                f"{path}: {name} is {_described(arrays[name])}; expected {words[name]} "
                f"beside placement {list(arrays['placement'].shape)}"
            )


def _described(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"

"""Plans in .npz files, written atomically and validated on reading.

`read_named` reads untrusted .npz and .npy files. It checks declared sizes before allocating memory.
"""

import io
import math
import os
import secrets
import stat
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jax_moe_lb.core.split import Tier

ARRAYS = ("placement", "quota", "relay", "rails")
"""Array fields of a plan. A file omits fields with value `None`."""

_SETTINGS = {
    "domain": (np.integer, "an integer"),
    "split_tier": (np.str_, "a word"),
    "split_locality": (np.bool_, "a bool"),
}
"""Scalar fields of a plan file, each with its dtype and the description for error messages."""

BinaryFile = Any
"""File open for reading bytes. Archive members match none of the file types of `typing`."""

MOST_PLAN_BYTES = 2**32
"""Maximum size of one array of a plan, in bytes."""

MOST_MEMBERS = 1000
"""Maximum number of arrays in an archive; usual archives have two to seven."""

MOST_DIRECTORY_BYTES = 2**19
"""Maximum size of the directory of an archive, in bytes: 46 per member, plus its name."""


class LimitError(ValueError):
    """Error for a valid file exceeding a size limit, with actual and expected size."""


def write_arrays(path: Path, parts: dict[str, Any]) -> None:
    """Write the fields of a plan.

    Args:
        path: path of the file; an existing file is replaced.
        parts: values under the names in `ARRAYS` and `_SETTINGS`.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    # NumPy's stub types every keyword as an option, so the dict is untyped.
    arrays: dict[str, Any] = {name: np.asarray(part) for name, part in parts.items()}
    np.savez_compressed(buffer, **arrays)
    with whole_file(path) as part:
        part.write_bytes(buffer.getvalue())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success and deleted on error.

    Args:
        path: path of the file. A device or a pipe is written directly.

    Yields:
        The path to write to.

    Raises:
        OSError: the file cannot be written.
    """
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


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a file written by `write_arrays` and check its dtypes and shapes.

    Args:
        path: path of the file.

    Returns:
        The arrays by field name.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged or is not a plan; the message names the file and the fault.
    """
    arrays = _arrays_of(path)
    _check_arrays(path, arrays)
    return arrays


def read_named(path: Path, names: Sequence[str], most_bytes: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Read arrays of an .npz file by name, or the array of an .npy file under the first name.

    It decompresses the named arrays only, and reads the header of each array first: a small file may declare, or
    decompress to, terabytes.

    Args:
        path: path of the file.
        names: names of the arrays to read; names missing from the archive are omitted.
        most_bytes: maximum size of one array, in bytes.

    Returns:
        The arrays by name, and the names of all arrays in the file (empty for an .npy file).

    Raises:
        OSError: the file cannot be read.
        LimitError: the file is not a regular file, or exceeds a limit.
        Exception: the file is damaged; NumPy and zipfile raise many types.
    """
    # Check the file type first: opening a pipe waits for a writer, and a device may never end.
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise LimitError("not a regular file; expected one")
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            _check_header(file, most_bytes)
            file.seek(0)
            # Unpickling can run arbitrary code from an untrusted file.
            return {names[0]: np.lib.format.read_array(file, allow_pickle=False)}, []
        _check_directory(file)
        with zipfile.ZipFile(file) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            wanted = [name for name in names if name in members]
            return {name: _member(archive, members[name], most_bytes) for name in wanted}, list(members)


def _member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> np.ndarray:
    # NumPy writes only these two methods. Others may allocate memory of a size taken from the file.
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("another compression")
    with archive.open(name) as file:
        _check_header(file, most_bytes)
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_header(file: BinaryFile, most_bytes: int) -> None:
    """Check the shape and dtype in the header of an array."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    start = file.tell()
    # A version 2 header can be up to 4 GiB, and NumPy reads it before rejecting more than 10000 characters.
    if version == (2, 0) and int.from_bytes(file.read(4), "little") > 2**16:
        raise ValueError("a long header")
    file.seek(start)
    # Version 3 differs in the encoding of field names only; plain numeric dtypes have no fields.
    shape, _, dtype = readers[version](file)
    # Entries of zero bytes count as one byte each.
    num_bytes = math.prod(shape) * max(dtype.itemsize, 1)
    if min(shape, default=0) < 0:
        raise ValueError("a negative dimension")
    if num_bytes > most_bytes:
        raise LimitError(f"an array of {num_bytes / 2**30:.3g} GiB; expected at most {most_bytes / 2**30:.3g} GiB")


def directory_end(file: BinaryFile) -> tuple[bytes, int]:
    """Read the end of an archive.

    Returns:
        The last bytes of the file, and the offset of the end-of-directory record in them; -1 if there is none. The
        bytes include the 76 bytes before the record for a 64-bit directory, if the archive is large enough.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 2**16 - 22 - 76, 0))
    tail = file.read()
    # Only a comment can follow the last end-of-directory signature.
    at = tail.rfind(b"PK\5\6")
    return tail, at if len(tail) - at >= 22 else -1


def _check_directory(file: BinaryFile) -> None:
    """Check the size of an archive's directory, because zipfile reads it whole."""
    tail, at = directory_end(file)
    if at < 0:
        raise ValueError("no end of a directory")
    members, num_bytes = struct.unpack_from("<HL", tail, at + 10)
    # A 64-bit directory has its own end record before this one. Only archives of 65536 members or 4 GiB need it.
    if members > MOST_MEMBERS or tail[max(at - 20, 0) :].startswith(b"PK\6\7"):
        raise LimitError(f"an archive of {members} arrays or more; expected at most {MOST_MEMBERS}")
    if num_bytes > MOST_DIRECTORY_BYTES:
        raise LimitError(f"an archive with a directory of {num_bytes} bytes; expected at most {MOST_DIRECTORY_BYTES}")


def _arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Read the known arrays of an .npz file without validation, ignoring unknown names."""
    try:
        found, members = read_named(path, (*ARRAYS, *_SETTINGS), MOST_PLAN_BYTES)
    except OSError:
        raise
    except LimitError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # NumPy and zipfile raise many types for a damaged file
        raise ValueError(f"{path}: damaged or not an .npz file; expected a file written by Plan.save") from error
    # An .npy file holds one unnamed array, hence no plan.
    found = found if members else {}
    for name in ("placement", "quota", *_SETTINGS):
        if name not in found:
            raise ValueError(f"{path}: {name} is missing; expected a file written by Plan.save")
    return found


def _check_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Check the dtypes and shapes of the arrays of a plan."""
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

"""A plan in a file: an .npz archive of named arrays, which is written whole and checked when it is read.

`read_named` reads such files, and .npy files, of anybody: it looks at what a file promises before anything is made.
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
"""The fields of a plan that are arrays; a file lacks those that are `None`."""

_SETTINGS = {
    "domain": (np.integer, "an integer"),
    "split_tier": (np.str_, "a word"),
    "split_locality": (np.bool_, "a bool"),
}
"""A file of a plan also holds these, each without dimensions; beside them stand dtype, and dtype in words."""

BinaryFile = Any
"""A file that is open for bytes; a member of an archive is none of those that `typing` knows."""

MOST_PLAN_BYTES = 2**32
"""An array of a plan has at most so many bytes."""

MOST_MEMBERS = 1000
"""An archive has at most so many arrays; usual are two to seven."""

MOST_DIRECTORY_BYTES = 2**19
"""The directory of an archive has at most so many: 46 for each member, beside its name."""


class LimitError(ValueError):
    """A file is no damaged one, but beyond what is read; the message says what it has and what was expected."""


def write_arrays(path: Path, parts: dict[str, Any]) -> None:
    """Writes what a plan consists of, by the names in `ARRAYS` and `_SETTINGS`.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    # NumPy's stub takes every keyword for an option, so the dict is untyped.
    arrays: dict[str, Any] = {name: np.asarray(part) for name, part in parts.items()}
    np.savez_compressed(buffer, **arrays)
    with whole_file(path) as part:
        part.write_bytes(buffer.getvalue())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write a file to, which is renamed once it is whole; after an error all is as it was.

    Args:
        path: the file. A device or a pipe is written to itself.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        # A device or a pipe must not be replaced by a file, and for a folder this raises what is wrong.
        yield path
        return
    path = path.resolve()  # so that a link stays one, and what it points to is replaced
    # Only inside one file system is a rename atomic: the temporary file lies beside the final one. Who writes it may
    # look at the suffix.
    part = path.with_name(f".part-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield part
        with part.open("rb") as file:
            # Without it a crash of the machine could leave the name with an empty file behind it.
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote, with the dtypes and shapes of a plan.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or holds no plan; the message names the file and what is wrong in it.
    """
    arrays = _arrays_of(path)
    _check_arrays(path, arrays)
    return arrays


def read_named(path: Path, names: Sequence[str], most_bytes: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads arrays of an .npz file by their names, or the array of an .npy file under the first of them.

    Of an archive only these are unpacked, and of every array the header is read first: a small file may promise
    terabytes, or unpack to them.

    Args:
        path: the file.
        names: the arrays to read; those that an archive lacks are left out.
        most_bytes: an array has at most so many bytes.

    Returns:
        The arrays by their names, and the names of all arrays that the file has: none for an .npy file.

    Raises:
        OSError: the file cannot be read.
        LimitError: it is no regular file, or too large.
        Exception: it is damaged, which makes NumPy and zipfile raise nearly anything.
    """
    # Opening a pipe waits for a writer, and a device may never end, so that what it is must be known before.
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise LimitError("no regular file; expected one")
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            _check_header(file, most_bytes)
            file.seek(0)
            # Pickles run code of whoever wrote them: a file of a stranger must not.
            return {names[0]: np.lib.format.read_array(file, allow_pickle=False)}, []
        _check_directory(file)
        with zipfile.ZipFile(file) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            wanted = [name for name in names if name in members]
            return {name: _member(archive, members[name], most_bytes) for name in wanted}, list(members)


def _member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> np.ndarray:
    # NumPy writes no others, and some of them take memory by what the file asks for.
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("another compression")
    with archive.open(name) as file:
        _check_header(file, most_bytes)
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_header(file: BinaryFile, most_bytes: int) -> None:
    """Refuses an array by the shape and dtype at the start of its file."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    start = file.tell()
    # Version 2 may promise a header of 4 GiB, which NumPy reads before it refuses more than 10000 characters.
    if version == (2, 0) and int.from_bytes(file.read(4), "little") > 2**16:
        raise ValueError("a long header")
    file.seek(start)
    # Version 3 has other letters in names of fields, and numbers have no fields.
    shape, _, dtype = readers[version](file)
    # An entry may have no bytes at all, and then the entries are counted.
    num_bytes = math.prod(shape) * max(dtype.itemsize, 1)
    if min(shape, default=0) < 0:
        raise ValueError("a negative dimension")
    if num_bytes > most_bytes:
        raise LimitError(f"an array of {num_bytes / 2**30:.3g} GiB; expected at most {most_bytes / 2**30:.3g} GiB")


def directory_end(file: BinaryFile) -> tuple[bytes, int]:
    """Reads the end of an archive: its last bytes, and where in them the record of its directory begins; -1 for none.

    In front of the record are as many bytes as that of a directory of 64-bit numbers takes, if the archive has them.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 2**16 - 22 - 76, 0))
    tail = file.read()
    # The directory's end is the last that looks so, behind which there is but a comment.
    at = tail.rfind(b"PK\5\6")
    return tail, at if len(tail) - at >= 22 else -1


def _check_directory(file: BinaryFile) -> None:
    """Refuses an archive by the size of its directory, which zipfile reads whole."""
    tail, at = directory_end(file)
    if at < 0:
        raise ValueError("no end of a directory")
    members, num_bytes = struct.unpack_from("<HL", tail, at + 10)
    # A directory of 64-bit numbers has its own end before this one; only archives of 65536 members or 4 GiB need it.
    if members > MOST_MEMBERS or tail[max(at - 20, 0) :].startswith(b"PK\6\7"):
        raise LimitError(f"an archive of {members} arrays or more; expected at most {MOST_MEMBERS}")
    if num_bytes > MOST_DIRECTORY_BYTES:
        raise LimitError(f"an archive with a directory of {num_bytes} bytes; expected at most {MOST_DIRECTORY_BYTES}")


def _arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Reads the known arrays of an .npz file, unchecked; names that nobody knows are left out."""
    try:
        found, members = read_named(path, (*ARRAYS, *_SETTINGS), MOST_PLAN_BYTES)
    except OSError:
        raise
    except LimitError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file makes NumPy and zipfile raise nearly anything
        raise ValueError(f"{path}: damaged, or no .npz file of numbers; expected one that Plan.save wrote") from error
    # An .npy file holds one array without a name.
    found = found if members else {}
    for name in ("placement", "quota", *_SETTINGS):
        if name not in found:
            raise ValueError(f"{path}: {name} is missing; expected a file that Plan.save wrote")
    return found


def _check_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Refuses dtypes and shapes that no plan has."""
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
    # E is the one size that placement does not say.
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

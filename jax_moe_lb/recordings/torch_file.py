"""Reader of `torch.save` files, without torch and without executing their contents.

Such a file is an archive of a pickle and the bytes of its tensors. A pickle is a program. This reader accepts only
instructions for lists, dictionaries, text, numbers and tensors. It rejects all others before execution.
"""

import io
import math
import pickle
import pickletools
import stat
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_moe_lb.core.plan_file import directory_end

MOST_FILE_BYTES, MOST_PICKLE_BYTES, MOST_DIRECTORY_BYTES = 2**32, 2**24, 2**23
"""Maximum sizes of a file, its pickle and its directory, in bytes."""

MOST_TENSOR_BYTES = 2**30
"""Maximum size of a tensor as an array, in bytes."""

INSTRUCTIONS = """
    PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
    BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE BINPUT LONG_BINPUT BINGET LONG_BINGET
    GLOBAL REDUCE BINPERSID
"""
ALLOWED = frozenset(INSTRUCTIONS.split())
"""Accepted pickle instructions: those written by `torch.save` for plain data."""

DTYPES = {
    "BoolStorage": "?",
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
}


@dataclass(frozen=True)
class Storage:
    """Unread bytes of one or more tensors.

    Args:
        file: path of the archive.
        name: name of the member with the bytes.
        dtype: dtype of the elements.
        size: number of elements.
    """

    file: Path
    name: str
    dtype: np.dtype
    size: int


@dataclass(frozen=True)
class Tensor:
    """Tensor with its bytes in the file; `array` reads them.

    Args:
        storage: storage of the elements.
        offset: index of the first element in the storage.
        shape: dimensions.
        strides: distance between the entries of each dimension, in elements.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> np.ndarray:
        """Read the tensor.

        Returns:
            The elements as a NumPy array.

        Raises:
            ValueError: the tensor is too large, or its storage is missing or has a wrong size.
        """
        storage, itemsize = self.storage, self.storage.dtype.itemsize
        if max(math.prod(self.shape), storage.size) * itemsize > MOST_TENSOR_BYTES:
            raise ValueError(f"a tensor of shape {self.shape}; expected at most {MOST_TENSOR_BYTES} bytes")
        try:
            with zipfile.ZipFile(storage.file) as archive:
                if archive.getinfo(storage.name).file_size != storage.size * itemsize:
                    raise ValueError(
                        f"storage {storage.name} has {archive.getinfo(storage.name).file_size} bytes; "
                        f"expected {storage.size * itemsize}, the size of its tensors"
                    )
                numbers = np.frombuffer(_content(archive, storage.name), storage.dtype)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"damaged: {storage.name} cannot be read") from error
        strides = tuple(stride * itemsize for stride in self.strides)
        # The checks in `_tensor` keep this view inside `numbers`.
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides).copy()


def read_torch(path: Path) -> Any:
    """Read a file written by `torch.save`.

    Args:
        path: path of the file.

    Returns:
        Lists, dictionaries, numbers and text, with a `Tensor` in place of each tensor.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, too large, or contains other objects than plain data.
    """
    if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"not a regular file of at most {MOST_FILE_BYTES} bytes")
    try:
        with path.open("rb") as file:
            _check_directory(file)
            with zipfile.ZipFile(file) as archive:
                name = next(
                    (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")), ""
                )
                folder = name.removesuffix("data.pkl")
                if not name or archive.getinfo(name).file_size > MOST_PICKLE_BYTES:
                    raise ValueError(f"data.pkl is missing or too large; expected at most {MOST_PICKLE_BYTES} bytes")
                if f"{folder}byteorder" in archive.namelist() and _content(archive, f"{folder}byteorder") != b"little":
                    raise ValueError("tensors are not little-endian; expected little-endian")
                program = _content(archive, name)
        _check_program(program)
        return _Reader(path, folder, program).load()
    except (OSError, ValueError):
        raise
    except Exception as error:  # pickle and zipfile raise many types for a damaged file
        raise ValueError(f"damaged ({type(error).__name__})") from error


class _Reader(pickle.Unpickler):
    """Unpickler constructing storages and tensors only."""

    def __init__(self, path: Path, folder: str, program: bytes) -> None:
        super().__init__(io.BytesIO(program))
        self.path, self.folder = path, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise ValueError(f"its pickle uses {module[:40]}.{name[:40]}; expected plain data")

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or dtype not in DTYPES.values() or not isinstance(key, str) or not _is_size(size):
            raise ValueError("a storage reference is malformed")
        return Storage(self.path, f"{self.folder}data/{key}", np.dtype(dtype), size)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    sizes_fit = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= 32
    if not isinstance(storage, Storage) or not sizes_fit or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor is malformed")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if (0 not in shape and last >= storage.size) or offset > storage.size:
        raise ValueError(f"a tensor of shape {shape[:8]} is outside its storage")
    return Tensor(storage, offset, shape, strides)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        # torch.save does not compress. The size of a stored member is limited by the size of the file.
        raise ValueError(f"{name} is compressed; expected an uncompressed member")
    return archive.read(name)


def _check_program(program: bytes) -> None:
    """Check the instructions of a pickle before execution."""
    argument: Any
    for instruction, argument, _ in pickletools.genops(program):
        if instruction.name not in ALLOWED:
            raise ValueError(f"its pickle has {instruction.name}; expected plain data")
        # The unpickler allocates memory up to this index.
        if instruction.name == "LONG_BINPUT" and argument > len(program):
            raise ValueError("its pickle has a memo index beyond its length")


def _check_directory(file: Any) -> None:
    """Check the size of an archive's directory, because zipfile reads it whole."""
    tail, at = directory_end(file)
    if at < 0:
        raise ValueError("no archive found; expected a file written by torch.save")
    sizes = [struct.unpack_from("<L", tail, at + 12)[0]]
    if at >= 76 and tail[at - 20 : at - 16] == b"PK\6\7":
        # The 64-bit record repeats the size, and takes precedence.
        sizes.append(struct.unpack_from("<Q", tail, at - 76 + 40)[0])
    if max(sizes) > MOST_DIRECTORY_BYTES:
        raise ValueError(f"a directory of {max(sizes)} bytes; expected at most {MOST_DIRECTORY_BYTES}")
    file.seek(0)

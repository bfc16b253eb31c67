"""Reads what `torch.save` wrote, without torch, and without running any of it.

Such a file is an archive of a pickle and of the bytes of its tensors. A pickle is a program; here it may make lists,
dictionaries, text, numbers and tensors, and whatever else it asks for is refused before it runs.
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
"""A file has at most so many bytes, its pickle and its directory, too: beyond them nothing is read."""

MOST_TENSOR_BYTES = 2**30
"""A tensor has at most so many bytes, as an array."""

INSTRUCTIONS = """
    PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
    BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE BINPUT LONG_BINPUT BINGET LONG_BINGET
    GLOBAL REDUCE BINPERSID
"""
ALLOWED = frozenset(INSTRUCTIONS.split())
"""What a pickle may do: those instructions that `torch.save` writes for plain data."""

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
    """The bytes of one or more tensors, which nobody has read yet.

    Args:
        file: the archive.
        name: the member that holds them.
        dtype: that of their numbers.
        size: how many numbers there are.
    """

    file: Path
    name: str
    dtype: np.dtype
    size: int


@dataclass(frozen=True)
class Tensor:
    """A tensor whose bytes are in the file; `array` reads them.

    Args:
        storage: its bytes.
        offset: the number at which it begins.
        shape: its dimensions.
        strides: how many numbers apart the entries of each dimension stand.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> np.ndarray:
        """Reads the tensor.

        Raises:
            ValueError: it is too large, or not where the file says.
        """
        storage, itemsize = self.storage, self.storage.dtype.itemsize
        if max(math.prod(self.shape), storage.size) * itemsize > MOST_TENSOR_BYTES:
            raise ValueError(f"a tensor of shape {self.shape}; expected at most {MOST_TENSOR_BYTES} bytes")
        try:
            with zipfile.ZipFile(storage.file) as archive:
                if archive.getinfo(storage.name).file_size != storage.size * itemsize:
                    raise ValueError(f"{storage.name} has another size than its tensors")
                numbers = np.frombuffer(_content(archive, storage.name), storage.dtype)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"damaged, {storage.name} cannot be read") from error
        strides = tuple(stride * itemsize for stride in self.strides)
        # What was checked when it was made keeps this inside of the numbers.
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides).copy()


def read_torch(path: Path) -> Any:
    """Reads a file of `torch.save`: lists, dictionaries, numbers and text, with a `Tensor` in the place of each tensor.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, too large, or wants to do more than hold data; the message says what.
    """
    if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"no regular file of at most {MOST_FILE_BYTES} bytes")
    try:
        with path.open("rb") as file:
            _check_directory(file)
            with zipfile.ZipFile(file) as archive:
                name = next(
                    (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")), ""
                )
                folder = name.removesuffix("data.pkl")
                if not name or archive.getinfo(name).file_size > MOST_PICKLE_BYTES:
                    raise ValueError(f"no data.pkl of at most {MOST_PICKLE_BYTES} bytes")
                if f"{folder}byteorder" in archive.namelist() and _content(archive, f"{folder}byteorder") != b"little":
                    raise ValueError("its byte order is not little")
                program = _content(archive, name)
        _check_program(program)
        return _Reader(path, folder, program).load()
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged file makes pickle and zipfile raise nearly anything
        raise ValueError(f"damaged ({type(error).__name__})") from error


class _Reader(pickle.Unpickler):
    """It makes storages and tensors of what a pickle names, and nothing else."""

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
        raise ValueError(f"it asks for {module[:40]}.{name[:40]}, which is no data")

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or dtype not in DTYPES.values() or not isinstance(key, str) or not _is_size(size):
            raise ValueError("a storage is none")
        return Storage(self.path, f"{self.folder}data/{key}", np.dtype(dtype), size)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    sizes_fit = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= 32
    if not isinstance(storage, Storage) or not sizes_fit or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor is none")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if (0 not in shape and last >= storage.size) or offset > storage.size:
        raise ValueError(f"a tensor of shape {shape[:8]} is outside of its storage")
    return Tensor(storage, offset, shape, strides)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        # torch compresses nothing, and what is stored is no larger than the file.
        raise ValueError(f"{name} is compressed")
    return archive.read(name)


def _check_program(program: bytes) -> None:
    """Refuses a pickle by its instructions, before any runs."""
    argument: Any
    for instruction, argument, _ in pickletools.genops(program):
        if instruction.name not in ALLOWED:
            raise ValueError(f"its pickle has {instruction.name}, which data does not need")
        # Room is made for so many objects as the number says.
        if instruction.name == "LONG_BINPUT" and argument > len(program):
            raise ValueError("its pickle numbers an object that it does not have")


def _check_directory(file: Any) -> None:
    """Refuses an archive by the size of its directory, which zipfile reads whole."""
    tail, at = directory_end(file)
    if at < 0:
        raise ValueError("no archive, as torch.save writes one")
    sizes = [struct.unpack_from("<L", tail, at + 12)[0]]
    if at >= 76 and tail[at - 20 : at - 16] == b"PK\6\7":
        # The same once more in 64 bits, which then counts.
        sizes.append(struct.unpack_from("<Q", tail, at - 76 + 40)[0])
    if max(sizes) > MOST_DIRECTORY_BYTES:
        raise ValueError(f"a directory of {max(sizes)} bytes; expected at most {MOST_DIRECTORY_BYTES}")
    file.seek(0)

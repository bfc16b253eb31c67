"""Reader of `torch.save` files, without torch and without executing the contents.

Such a file is an archive of a pickle and the bytes of the tensors. A pickle is a program. This reader does not execute
it by `pickle`. Its own interpreter has only the instructions for lists, dictionaries, text, numbers and tensors.
"""

import math
import os
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import FileLimits, check_member, open_archive, open_regular

LOCAL_HEADER = "<4s22x2H"
"""Signature, length of the name and length of the extra field of a member."""

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


class Archive:
    """Members of an uncompressed archive; bytes are read on request, up to the limit."""

    def __init__(self, path: Path, limits: FileLimits) -> None:
        self.path, self.limits, self.num_bytes = path, limits, 0
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            with open_archive(file, limits) as archive:
                self.members = {info.filename: info for info in archive.infolist()}
        for info in self.members.values():
            check_member(info, size)

    def charge(self, num_bytes: int) -> None:
        """Add bytes of arrays to those already read; raise `LimitError` above the limit."""
        self.num_bytes += num_bytes
        self.limits.check("array_bytes", self.num_bytes, "tensors of {} bytes")

    def read(self, name: str) -> bytes:
        """Return the content of a member; raise `ValueError` if it is absent, compressed or damaged."""
        info = self.members.get(name)
        if info is None:
            raise ValueError(f"damaged: {shown(name)} is missing")
        if info.compress_type != zipfile.ZIP_STORED:
            # torch.save does not compress. The size of a stored member is limited by the size of the file.
            raise ValueError(f"{shown(name)} is compressed; expected an uncompressed member")
        with open_regular(self.path) as file:
            file.seek(info.header_offset)
            header = file.read(30)
            signature, name_bytes, extra_bytes = (
                struct.unpack(LOCAL_HEADER, header) if len(header) == 30 else (b"", 0, 0)
            )
            file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
            content: bytes = file.read(info.file_size)
        if signature != b"PK\3\4" or len(content) != info.file_size or zlib.crc32(content) != info.CRC:
            raise ValueError(f"damaged: {shown(name)} cannot be read")
        return content


@dataclass(frozen=True, eq=False)
class Storage:
    """Unread bytes of one or more tensors."""

    archive: Archive  # archive with the bytes
    name: str  # name of the member with the bytes
    dtype: np.dtype  # dtype of the elements
    size: int  # number of elements


@dataclass(frozen=True, eq=False)
class Tensor:
    """Tensor with a place in the file; `array` reads them."""

    storage: Storage  # storage of the elements
    offset: int  # index of the first element in the storage
    shape: tuple[int, ...]  # dimensions
    strides: tuple[int, ...]  # distance between the entries of each dimension, in elements

    def array(self) -> np.ndarray:
        """Read the tensor."""
        storage, itemsize = self.storage, self.storage.dtype.itemsize
        # Readers convert elements to 8 bytes.
        storage.archive.charge(storage.size * itemsize + math.prod(self.shape) * 8)
        content = storage.archive.read(storage.name)
        if len(content) != storage.size * itemsize:
            raise ValueError(
                f"storage {shown(storage.name)} has {len(content)} bytes; expected {storage.size * itemsize}, "
                "the size of its tensors"
            )
        numbers = np.frombuffer(content, storage.dtype)
        strides = tuple(stride * itemsize for stride in self.strides)
        # The checks in `_tensor` keep this view inside `numbers`.
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides).copy()


def read_torch(path: Path, limits: FileLimits = FileLimits()) -> Any:
    """Read a file written by `torch.save`."""
    try:
        archive = Archive(path, limits)
        name = next((name for name in archive.members if name.count("/") == 1 and name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("data.pkl is missing; expected a file written by torch.save")
        limits.check("text_bytes", archive.members[name].file_size, "data.pkl of {} bytes")
        folder = name.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.members and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("tensors are not little-endian; expected little-endian")
        program = archive.read(name)
        return _Interpreter(archive, folder).run(program)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # zipfile, the list of instructions and the stack raise many types for a damaged file
        raise ValueError(f"damaged ({type(error).__name__})") from error


class _Interpreter:
    """Interpreter of the pickle instructions written by `torch.save` for plain data."""

    # Its results are made of `None`, numbers, text, lists, tuples, dictionaries, and `Tensor`s.

    def __init__(self, archive: Archive, folder: str) -> None:
        self.archive, self.folder = archive, folder
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """Return the value of a pickle."""
        limits: FileLimits = self.archive.limits
        argument: Any
        for number, (instruction, argument, _) in enumerate(pickletools.genops(program)):
            if number >= limits.values:
                limits.check("values", len(program), "a pickle of up to {} values")
            name = instruction.name
            if name in PUSHED:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in EMPTY:
                self.stack.append(EMPTY[name]())
            elif name in CALLS:
                CALLS[name](self, argument)
            else:
                raise ValueError(f"its pickle has {name}; expected plain data")
        return self.stack.pop()

    def put(self, index: int) -> None:
        """Store the top of the stack."""
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        """Push a stored value."""
        self.stack.append(self.memo[index])

    def mark(self, _: None) -> None:
        """Store the height of the stack."""
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Pop and return the values above the last mark."""
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def append(self, values: list[Any]) -> None:
        """Append values to the list on top of the stack."""
        if type(self.stack[-1]) is not list:
            raise ValueError("its pickle appends to another type; expected a list")
        self.stack[-1].extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        """Set items of the dictionary on top of the stack, given as keys and values in turn."""
        keys = pairs[::2]
        # The hash of a nested tuple recurses without a limit, and hashes of larger integers may all be equal.
        if type(self.stack[-1]) is not dict or not all(
            type(k) is str or (type(k) is int and _is_size(k)) for k in keys
        ):
            raise ValueError("its pickle sets an item of another type; expected a dictionary with texts or integers")
        self.stack[-1].update(zip(keys, pairs[1::2], strict=True))

    def tuple_of(self, size: int) -> None:
        """Replace the last values by a tuple."""
        values = self.stack[-size:]
        if len(values) < size:
            raise ValueError("its pickle ends early; expected more values")
        self.stack[-size:] = [tuple(values)]

    def find(self, name: str) -> None:
        """Push one of the known types and functions."""
        if name not in GLOBALS:
            raise ValueError(f"its pickle uses {name.replace(' ', '.')[:80]}; expected plain data")
        self.stack.append(GLOBALS[name])

    def call(self, _: None) -> None:
        """Replace a function and arguments by the result."""
        function, arguments = self.stack[-2:]
        if function not in (_tensor, dict) or type(arguments) is not tuple or (function is dict and arguments):
            raise ValueError("its pickle calls data; expected a tensor or an empty dictionary")
        self.stack[-2:] = [function(*arguments)]

    def load_storage(self, _: None) -> None:
        """Replace a reference by the storage."""
        kind, dtype, key, _, size = self.stack.pop()
        if kind != "storage" or dtype not in DTYPES.values() or not isinstance(key, str) or not _is_size(size):
            raise ValueError("a storage reference is malformed; expected dtype, name and size")
        self.stack.append(Storage(self.archive, f"{self.folder}data/{key}", np.dtype(dtype), size))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    sizes_fit = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= 32
    if not isinstance(storage, Storage) or not sizes_fit or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor is malformed")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if (0 not in shape and last >= storage.size) or offset > storage.size:
        raise ValueError(f"a tensor of shape {shape[:8]} is outside its storage")
    if math.prod(shape) > storage.size:
        raise ValueError(f"a tensor of shape {shape[:8]} repeats its storage of {storage.size} elements")
    return Tensor(storage, offset, shape, strides)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


PUSHED = frozenset({"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
"""Instructions with a value."""

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}

GLOBALS = {f"torch {name}": dtype for name, dtype in DTYPES.items()} | {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "collections OrderedDict": dict,
}
"""Names that a pickle may use. A dictionary keeps the order of items."""

CALLS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "STOP": lambda machine, _: None,
    "MARK": _Interpreter.mark,
    "BINPUT": _Interpreter.put,
    "LONG_BINPUT": _Interpreter.put,
    "BINGET": _Interpreter.get,
    "LONG_BINGET": _Interpreter.get,
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "GLOBAL": _Interpreter.find,
    "REDUCE": _Interpreter.call,
    "BINPERSID": _Interpreter.load_storage,
}
"""Instructions working on the stack."""

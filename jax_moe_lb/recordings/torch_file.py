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
        return _value(program, archive, folder)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # zipfile, the list of instructions and the stack raise many types for a damaged file
        raise ValueError(f"damaged ({type(error).__name__})") from error


def _value(program: bytes, archive: Archive, folder: str) -> Any:
    """Return the value of a pickle: `None`, numbers, text, lists, tuples, dictionaries, and `Tensor`s."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    limits: FileLimits = archive.limits
    argument: Any
    for number, (instruction, argument, _) in enumerate(pickletools.genops(program)):
        if number >= limits.values:
            limits.check("values", len(program), "a pickle of up to {} values")
        match instruction.name:
            case "PROTO" | "STOP":
                continue
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND":
                _append(stack, [stack.pop()])
            case "APPENDS":
                _append(stack, _since(marks, stack))
            case "SETITEM":
                _set_items(stack, [stack.pop(-2), stack.pop()])
            case "SETITEMS":
                _set_items(stack, _since(marks, stack))
            case "TUPLE":
                stack.append(tuple(_since(marks, stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(instruction.name[-1])
                if len(stack) < size:
                    raise ValueError("its pickle ends early; expected more values")
                stack[-size:] = [tuple(stack[-size:])]
            case "GLOBAL":
                if argument not in GLOBALS:
                    raise ValueError(f"its pickle uses {argument.replace(' ', '.')[:80]}; expected plain data")
                stack.append(GLOBALS[argument])
            case "REDUCE":
                stack[-2:] = [_called(stack[-2:])]
            case "BINPERSID":
                stack.append(_storage(archive, folder, stack.pop()))
            case name:
                raise ValueError(f"its pickle has {name}; expected plain data")
    return stack.pop()


def _since(marks: list[int], stack: list[Any]) -> list[Any]:
    """Pop and return the values above the last mark."""
    height = marks.pop()
    values = stack[height:]
    del stack[height:]
    return values


def _append(stack: list[Any], values: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError("its pickle appends to another type; expected a list")
    stack[-1].extend(values)


def _set_items(stack: list[Any], pairs: list[Any]) -> None:
    keys = pairs[::2]
    # The hash of a nested tuple recurses without a limit, and hashes of larger integers may all be equal.
    if type(stack[-1]) is not dict or not all(type(k) is str or (type(k) is int and _is_size(k)) for k in keys):
        raise ValueError("its pickle sets an item of another type; expected a dictionary with texts or integers")
    stack[-1].update(zip(keys, pairs[1::2], strict=True))


def _called(call: list[Any]) -> Any:
    function, arguments = call
    if function not in (_tensor, dict) or type(arguments) is not tuple or (function is dict and arguments):
        raise ValueError("its pickle calls data; expected a tensor or an empty dictionary")
    return function(*arguments)


def _storage(archive: Archive, folder: str, reference: Any) -> Storage:
    kind, dtype, key, _, size = reference
    if kind != "storage" or dtype not in DTYPES.values() or not isinstance(key, str) or not _is_size(size):
        raise ValueError("a storage reference is malformed; expected dtype, name and size")
    return Storage(archive, f"{folder}data/{key}", np.dtype(dtype), size)


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


GLOBALS = {f"torch {name}": dtype for name, dtype in DTYPES.items()} | {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "collections OrderedDict": dict,
}
"""Names that a pickle may use. A dictionary keeps the order of items."""

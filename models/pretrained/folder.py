"""`TensorFolder` finds the tensors of a checkpoint, in one file or in many with an index."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from models.architectures.names import Index
from models.pretrained.header import Header, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MOST_INDEX_BYTES = 2**28

FLOATS = ("F64", "F32", "F16", "BF16")

FP8 = "F8_E4M3"
"""The dtype of 8-bit floats, which have scales beside them: see `quantized.py`."""


class TensorFolder:
    """This reads tensors, or parts of them, one after the other; it is a context that closes the files.

    It checks the header of every file first. Nothing but safetensors is read: a pickle would run what it likes.

    Args:
        folder: the folder of a checkpoint.

    Raises:
        ValueError: there are no tensors, a file is missing, outside the folder, or not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers = [read_header(path) for path in self._files()]
        self.home: dict[str, Header] = {}
        for header in self.headers:
            for name in header.shapes:
                if name in self.home:
                    raise ValueError(f"{header.path}: {name} is in {self.home[name].path.name}, too; expected it once")
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
        """Reads a tensor, or a part of it and no more than that from the disk.

        Args:
            name: the tensor.
            index: the part; strides are taken in memory.
        """
        header = self.home[name]
        if header.dtypes[name] == FP8:
            return _float8(header, name)[index]
        if header.path not in self.open:
            self.open[header.path] = safe_open(header.path, framework="numpy").__enter__()
        if not index:
            return self.open[header.path].get_tensor(name)
        # Whole lines are read, of which the rest of the index takes its part.
        first, *rest = index
        lines = slice(first, first + 1) if isinstance(first, int) else first
        read = self.open[header.path].get_slice(name)[lines]
        return read[(0 if isinstance(first, int) else slice(None), *rest)]

    def _files(self) -> list[Path]:
        if not (self.folder / INDEX).exists():
            if not (self.folder / SINGLE).exists():
                raise ValueError(f"checkpoint is {str(self.folder)!r}; expected {SINGLE} or {INDEX} in it")
            return [self.folder / SINGLE]
        names = sorted(set(self._weight_map().values()))
        for name in names:
            path = self.folder / name
            if Path(name).name != name or name in (".", ".."):
                raise ValueError(f"{self.folder / INDEX}: {name!r} is outside the folder; expected the name of a file")
            if not path.is_file():
                raise ValueError(f"{self.folder / INDEX}: {name!r} is missing; expected all files that it names")
        return [self.folder / name for name in names]

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            if path.stat().st_size > MOST_INDEX_BYTES:
                raise ValueError(f"it has more than {MOST_INDEX_BYTES} bytes")
            places = json.loads(path.read_bytes().decode())["weight_map"]
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise ValueError("weight_map maps names to files")
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no index: {error}") from error
        return places

    def _check_index(self) -> None:
        if (self.folder / INDEX).exists():
            for name, file in self._weight_map().items():
                header = self.home.get(name)
                if header is None or header.path.name != file:
                    raise ValueError(f"{self.folder / INDEX}: {name} is not in {file!r}; expected it there")


def _float8(header: Header, name: str) -> np.ndarray:
    """Reads 8-bit floats, which safetensors has no NumPy dtype for."""
    shape = header.shapes[name]
    bits = np.fromfile(header.path, np.uint8, math.prod(shape), offset=header.starts[name])
    return bits.reshape(shape).view(ml_dtypes.float8_e4m3fn)

"""`read_streams` reads what a path holds: text, lines of JSON with a text in each, and arrays of tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.data.stream import Stream, joined
from models.data.tokenizers import Tokenizer

TEXT_FIELD = "text"
"""The usual field of a JSON object with a document."""


def read_streams(paths: list[Path], tokenizer: Tokenizer, text_field: str = TEXT_FIELD) -> tuple[list[Stream], int]:
    """Reads files, and all in folders that are not hidden, sorted by name.

    A file is an array of tokens if its name ends with `.npy`, one document per line if it ends with `.jsonl`, and a
    document of text otherwise. An array `[tokens]` is one document, of `[documents, tokens]` every row is one. Arrays
    are not read but mapped, each a stream; all else is one stream, in memory.

    Args:
        paths: files and folders.
        tokenizer: splits text.
        text_field: the field of a line's JSON object that is a document, usually "text".

    Returns:
        The streams that hold anything, and the number of files.

    Raises:
        ValueError: a file cannot be read, or does not hold what its name says.
    """
    files = [file for path in paths for file in _files(path)]
    documents, mapped = [], []
    for file in files:
        if file.suffix == ".npy":
            mapped.append(_mapped(file))
        elif file.suffix == ".jsonl":
            documents += [tokenizer.tokens(text) for text in _texts(file, text_field)]
        else:
            documents.append(tokenizer.tokens(_bytes(file)))
    streams = [joined(documents), *mapped]
    return [stream for stream in streams if len(stream.tokens)], len(files)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data is {str(path)!r}, which does not exist; expected a file or folder")
    if not path.is_dir():
        return [path]
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    # Sorted, as the order of a folder differs between machines, and the text must not.
    return [path / file for file in sorted(inside) if not any(part.startswith(".") for part in file.parts)]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ValueError:
    return ValueError(f"data is {str(file)!r}; expected a readable file: {error.strerror}")


def _texts(file: Path, field: str) -> Iterator[bytes]:
    """Yields the document of each line; empty lines are none."""
    for number, line in enumerate(_bytes(file).split(b"\n"), 1):
        if line.strip():
            yield _text(line, field, f"data is {str(file)!r}, whose line {number}")


def _text(line: bytes, field: str, where: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON; expected an object with the field {field!r}") from error
    if not isinstance(value, dict) or field not in value:
        raise ValueError(f"{where} lacks the field {field!r}; expected an object with it, or another text_field")
    if not isinstance(value[field], str):
        raise ValueError(f"{where} has {json.dumps(value[field])[:40]} in {field!r}; expected a text")
    # JSON can name halves of characters, which are no text.
    return value[field].encode(errors="replace")


def _mapped(file: Path) -> Stream:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise _unreadable(file, error) from error
    except (EOFError, ValueError) as error:
        raise ValueError(f"data is {str(file)!r}, which is no array of NumPy; expected one of integers") from error
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"data is {str(file)!r}, whose dtype is {array.dtype}; expected integers")
    if array.ndim not in (1, 2):
        raise ValueError(
            f"data is {str(file)!r}, whose shape is {array.shape}; expected [tokens] or [documents, tokens]"
        )
    starts = np.arange(1, len(array), dtype=np.int64) * array.shape[1] if array.ndim == 2 else np.zeros(0, np.int64)
    return Stream(array.reshape(-1), starts)

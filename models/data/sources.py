"""Readers of text files, JSON lines, tables and token arrays, and the default corpus of Python's own text."""

import importlib
import importlib.util
import itertools
import json
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import grain
import numpy as np

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError, open_regular, parse_json
from jax_moe_lb.core.plan_file import read_header
from models.data.chat import MESSAGES_FIELD, ChatTemplate, Example, conversation_in
from models.data.corpus import Conversations, Corpus, Documents, Part, Stream, check_tokens, joined
from models.data.tokenizers import Bytes, Tokenizer

SUFFIXES = (".parquet", ".arrow")  # ends of the names of files with rows
ROWS_AT_ONCE = 1024  # rows of an Arrow file to decode at a time
TEXT_FIELD = "text"  # default JSON field containing a document


def read_streams(
    paths: list[Path],
    tokenizer: Tokenizer,
    text_field: str = TEXT_FIELD,
    limits: FileLimits = FileLimits(),
    chat: ChatTemplate | None = None,
) -> tuple[list[Documents], int]:
    """Read files, and all non-hidden files of folders, sorted by name."""
    # A `.npy` file is an array of tokens; a `.jsonl` file has one document or conversation per line, and a `.parquet`
    # or `.arrow` file per row; any other file is one document of text. Of a folder with Parquet files, or one saved by
    # `datasets`, these files alone are read. Of a conversation only the answers are predicted. An array `[tokens]` is
    # one document; each row of an array `[documents, tokens]` is one. Arrays are memory-mapped, one stream each. All
    # other documents form one stream in memory, and all conversations are packed together; both have no limit.
    files = [file for path in paths for file in _files(path)]
    texts: list[np.ndarray] = []
    conversations: list[list[Example]] = []
    mapped = []
    for file in files:
        if file.suffix == ".npy":
            mapped.append(_mapped(file, limits))
        elif file.suffix in (".jsonl", *SUFFIXES) or file.is_dir():
            for line in _documents(file, text_field, limits, tokenizer, chat):
                # A conversation is a list of its examples.
                conversations.append(line) if isinstance(line, list) else texts.append(line)
        else:
            texts.append(tokenizer.tokens(_bytes(file)))
    streams: list[Documents] = [joined(texts), Conversations.of(conversations), *mapped]
    num_files = sum(len(list(file.glob("*.arrow"))) if file.is_dir() else 1 for file in files)
    return [stream for stream in streams if len(stream.tokens)], num_files


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data is {str(path)!r}, which does not exist; expected a file or folder")
    if not path.is_dir():
        return [path]
    if tables := table_files(path):
        return tables
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    # Directory order differs between machines; sorting makes the text reproducible.
    return [path / file for file in sorted(inside) if not any(part.startswith(".") for part in file.parts)]


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the path to errors of reading a file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"data is {str(file)!r}; expected a readable file: {error.strerror}") from error
    except LimitError as error:
        raise LimitError(f"data is {str(file)!r}: {error}") from error


def _bytes(file: Path) -> bytes:
    with _naming(file), open_regular(file) as content:
        return content.read()


def _documents(
    file: Path, field: str, limits: FileLimits, tokenizer: Tokenizer, chat: ChatTemplate | None
) -> Iterator[np.ndarray | list[Example]]:
    """Yield the document, or the examples of the conversation, of each row or non-empty line."""
    for where, value in _rows(file, field, limits):
        if MESSAGES_FIELD in value and field not in value and chat is not None:
            try:
                yield chat.examples(*conversation_in(value))
            except ValueError as error:
                raise ValueError(f"{where} is no conversation: {error}") from error
        else:
            yield tokenizer.tokens(_text(value, field, where))


def _rows(file: Path, field: str, limits: FileLimits) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields of each row of a table, or of each non-empty line of JSON, with its place for messages."""
    if file.suffix in SUFFIXES or file.is_dir():
        for number, row in enumerate(table_rows(file, limits), 1):
            yield f"data is {str(file)!r}, whose row {number}", row
        return
    for number, line in enumerate(_bytes(file).split(b"\n"), 1):
        if line.strip():
            where = f"data is {str(file)!r}, whose line {number}"
            yield where, _object(line, field, where, limits)


def _object(line: bytes, field: str, where: str, limits: FileLimits) -> Any:
    try:
        value = parse_json(line, limits)
    except LimitError as error:
        raise LimitError(f"{where} is {error}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON; expected an object with the field {field!r}") from error
    return value if isinstance(value, dict) else {}


def _text(value: Any, field: str, where: str) -> bytes:
    if field not in value:
        chats = f"; {MESSAGES_FIELD} need a chat template" if MESSAGES_FIELD in value else ""
        raise ValueError(f"{where} lacks the field {field!r}; expected an object with it, or another text_field{chats}")
    if not isinstance(value[field], str):
        raise ValueError(f"{where} has {json.dumps(value[field])[:40]} in {field!r}; expected a string")
    # JSON strings may contain unpaired surrogates, which UTF-8 cannot encode.
    return value[field].encode(errors="replace")


def _mapped(file: Path, limits: FileLimits) -> Stream:
    with _naming(file):
        try:
            with open_regular(file) as content:
                header, size = read_header(content), os.fstat(content.fileno()).st_size
            if header.start + header.num_entries * header.itemsize > size:
                raise ValueError("fewer bytes than its header declares")
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, LimitError, MemoryError):
            raise
        except Exception as error:  # NumPy raises many types for a damaged header
            raise ValueError(f"data is {str(file)!r}, which is not a NumPy array; expected one of integers") from error
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"data is {str(file)!r}, whose dtype is {array.dtype}; expected integers")
    if array.ndim not in (1, 2):
        raise ValueError(
            f"data is {str(file)!r}, whose shape is {array.shape}; expected [tokens] or [documents, tokens]"
        )
    # An array without tokens may declare any number of documents.
    num_documents = len(array) if array.ndim == 2 and array.size else 1
    limits.check("array_bytes", 8 * num_documents, f"data is {str(file)!r}, whose starts of documents have {{}} bytes")
    return Stream(array.reshape(-1), np.arange(1, num_documents, dtype=np.int64) * array.shape[-1])


def default_corpus(max_bytes: int) -> Corpus:
    """Return Python's own documentation and sources of its standard library, up to `max_bytes`."""
    prose = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    documents, left = [], max_bytes
    for text in itertools.chain([prose], map(Path.read_bytes, files)):
        documents.append(Bytes().tokens(text[:left]))
        left -= len(documents[-1])
        if not left:
            break
    source = f"help topics and standard library of Python {sysconfig.get_python_version()}"
    return Corpus((Part((joined(documents),), 1.0, source),))


def corpus_from(
    sources: Sequence[Path | str],
    tokenizer: Tokenizer = Bytes(),
    *,
    vocab_size: int | None = None,
    text_field: str = TEXT_FIELD,
    limits: FileLimits = FileLimits(),
    chat: ChatTemplate | None = None,
) -> Corpus:
    """Read a corpus from files and folders in the formats of `read_streams`."""
    named = [_weighed(str(source)) for source in sources]
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; expected at least the {tokenizer.vocab_size} of the tokenizer")
    parts = []
    for paths, weight in _grouped(named):
        streams, num_files = read_streams(paths, tokenizer, text_field, limits, chat)
        names = ", ".join(str(path) for path in paths)
        if not streams:
            raise ValueError(f"data is {names!r}, which contains no {tokenizer.unit}s; expected text")
        for stream in streams:
            check_tokens(stream.tokens, vocab_size, names)
        parts.append(Part(streams, weight, f"{num_files} file{'s' * (num_files != 1)} of {names}"))
    has_arrays = any(isinstance(stream.tokens, np.memmap) for part in parts for stream in part.streams)
    return Corpus(tuple(parts), "token" if has_arrays else tokenizer.unit, vocab_size)


def check_held_out(sources: Sequence[Path | str], validation: str) -> None:
    """Raise `ValueError` if a file of the validation data is one of the training data, too."""
    trained = {leaf for source in sources for leaf in _leaves(_weighed(str(source))[0])}
    if shared := trained.intersection(_leaves(_weighed(validation)[0])):
        raise ValueError(
            f"data.validation is {validation!r}; expected held-out files, but {str(min(shared))!r} is training data"
        )


def _leaves(path: Path) -> list[Path]:
    """Return the resolved files of a path, of which `_files` has a folder saved by `datasets` as one."""
    files = (list(file.glob("*.arrow")) if file.is_dir() else [file] for file in _files(path))
    return [file.resolve() for file in itertools.chain.from_iterable(files)]


def _grouped(named: list[tuple[Path, float | None]]) -> list[tuple[list[Path], float]]:
    """Return the paths of each part and its weight; without weights all paths are one part."""
    if all(weight is None for _, weight in named):
        return [([path for path, _ in named], 1.0)]
    groups = [([path], weight) for path, weight in named if weight is not None]
    if len(groups) < len(named):
        missing = next(path for path, weight in named if weight is None)
        raise ValueError(f"data is {str(missing)!r}, without a weight; expected one for all paths or for none")
    return groups


def _weighed(source: str) -> tuple[Path, float | None]:
    """Split PATH:WEIGHT; an existing path has no weight."""
    path, colon, text = source.rpartition(":")
    if source == "":
        raise ValueError("data is ''; expected a file or folder")
    if not colon or Path(source).exists():
        return Path(source), None
    try:
        weight = float(text)
    except ValueError:
        return Path(source), None
    if not 0 < weight < math.inf:
        raise ValueError(f"data is {path!r} with weight {text}; expected a finite number above 0")
    return Path(path), weight


def table_files(folder: Path) -> list[Path]:
    """Return the folder itself if `datasets` saved it, else its Parquet files by name; neither, no files."""
    if (folder / "dataset_dict.json").exists():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"data is {str(folder)!r}, which has the splits {splits}; expected the folder of one")
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return [folder]
    return sorted(file for file in folder.rglob("*.parquet") if file.is_file())


def table_rows(path: Path, limits: FileLimits) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, or of a folder saved by `datasets`, without null fields."""
    # Arrow stores the fields of all rows in each of them, so that null and absent are the same.
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"data is {str(path)!r}, which requires datasets; run pip install '.[data]'")
    try:
        yield from map(_plain, _arrow(path) if path.is_dir() or path.suffix == ".arrow" else _parquet(path, limits))
    except (LimitError, MemoryError):
        raise
    except Exception as error:  # pyarrow raises its own types and those of Python for a damaged file
        reason = " ".join(str(error).split())[:80]
        raise ValueError(f"data is {str(path)!r}, which is damaged; expected rows: {reason}") from error


def _parquet(file: Path, limits: FileLimits) -> Iterable[Any]:
    # The reader decodes one group of rows at a time.
    metadata = importlib.import_module("pyarrow.parquet").read_metadata(file)
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        limits.check("array_bytes", size, f"data is {str(file)!r}, with a group of rows of {{}} bytes")
    return grain.experimental.ParquetIterDataset(str(file)) if metadata.num_row_groups else ()


def _arrow(path: Path) -> Iterator[Any]:
    datasets = importlib.import_module("datasets")
    whole = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
    rows = whole.with_format("arrow")  # of rows alone, each takes 100 times as long
    for table in grain.MapDataset.range(0, len(rows), ROWS_AT_ONCE).map(lambda i: rows[i : i + ROWS_AT_ONCE]):
        table.validate(full=True)  # offsets beyond the file
        yield from table.to_pylist()


def _plain(value: Any) -> Any:
    """Return a value without arrays of NumPy and null fields."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return [_plain(one) for one in value] if isinstance(value, list) else value

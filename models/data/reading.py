"""`corpus_from` reads what a user names, `default_corpus` text that every machine with Python has."""

import itertools
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from models.data.corpus import Corpus, Part
from models.data.sources import TEXT_FIELD, read_streams
from models.data.stream import joined
from models.data.tokenizers import Bytes, Tokenizer


def default_corpus(max_bytes: int) -> Corpus:
    """Reads Python's own documentation, then sources of its standard library, up to `max_bytes`."""
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
) -> Corpus:
    """Reads files and folders; see `read_streams` for what they may hold.

    Args:
        sources: PATH or PATH:WEIGHT. Paths without weights are one part: each sequence is seen once in an epoch. With
            weights, which are relative, each path is a part that makes up its share of all batches.
        tokenizer: splits text; bytes by default.
        vocab_size: how many words there are; `None`, the usual choice, takes those of the tokenizer.
        text_field: the field of JSON lines that is a document, usually "text".

    Raises:
        ValueError: a path does not exist or cannot be read, there is no token in it, a token is no word, or a weight is
            not above 0.
    """
    named = [_weighed(str(source)) for source in sources]
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; expected at least the {tokenizer.vocab_size} of the tokenizer")
    if all(weight is None for _, weight in named):
        groups = [([path for path, _ in named], 1.0)]
    else:
        groups = [([path], weight) for path, weight in named if weight is not None]
        if len(groups) < len(named):
            missing = next(path for path, weight in named if weight is None)
            raise ValueError(f"data is {str(missing)!r}, without a weight; expected one for all paths or for none")
    parts = tuple(_part(paths, weight, tokenizer, vocab_size, text_field) for paths, weight in groups)
    has_arrays = any(path.suffix == ".npy" or any(path.rglob("*.npy")) for path, _ in named)
    return Corpus(parts, "token" if has_arrays else tokenizer.unit, vocab_size)


def _part(paths: list[Path], weight: float, tokenizer: Tokenizer, vocab_size: int, text_field: str) -> Part:
    streams, num_files = read_streams(paths, tokenizer, text_field)
    names = ", ".join(str(path) for path in paths)
    if not streams:
        raise ValueError(f"data is {names!r}, which holds no {tokenizer.unit}s; expected text")
    for stream in streams:
        stream.check(vocab_size, names)
    return Part(streams, weight, f"{num_files} file{'s' * (num_files != 1)} of {names}")


def _weighed(source: str) -> tuple[Path, float | None]:
    """Splits PATH:WEIGHT; what is a path as a whole has no weight."""
    path, colon, text = source.rpartition(":")
    if not colon or Path(source).exists():
        return Path(source), None
    try:
        weight = float(text)
    except ValueError:
        return Path(source), None
    if not 0 < weight < math.inf:
        raise ValueError(f"data is {path!r} with weight {text}; expected a finite number above 0")
    return Path(path), weight

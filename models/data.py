"""`Corpus` has bytes to learn from: text that every machine with Python has, or the user's own files."""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

CHUNK_BYTES = 32_768
CHUNKS_PER_SPLIT = 16
"""Of so many chunks the last is held out."""

CHUNKS_OF_SHORT_TEXT = 10
"""A text too short for that is cut into so many smaller ones."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus is text, of which one chunk in every so many is held out.

    Args:
        train: uint8 `[bytes]`, the chunks to learn from, end to end.
        validation: uint8 `[bytes]`, the chunks that are held out.
        source: where the text is from, for a reader.
    """

    train: np.ndarray
    validation: np.ndarray
    source: str

    @classmethod
    def split(cls, text: bytes, source: str) -> "Corpus":
        """Holds out the last chunk of every sixteen, so that both sides see all kinds of text.

        Args:
            text: all bytes.
            source: where they are from, for a reader.
        """
        every, chunk_bytes = CHUNKS_PER_SPLIT, CHUNK_BYTES
        if len(text) < every * chunk_bytes:
            every, chunk_bytes = CHUNKS_OF_SHORT_TEXT, max(1, len(text) // CHUNKS_OF_SHORT_TEXT)
        values = np.frombuffer(text, np.uint8)
        held_out = np.arange(len(values)) // chunk_bytes % every == every - 1
        return cls(values[~held_out], values[held_out], source)

    @cached_property
    def fingerprint(self) -> str:
        """Makes a word that changes when the text does."""
        return hashlib.sha256(self.train.tobytes() + b"|" + self.validation.tobytes()).hexdigest()[:16]

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Counts the nats per byte of the validation text for a model that knows only how often each byte occurs."""
        counts = np.bincount(self.validation, minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def batch(self, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
        """Draws training windows `[batch_size, sequence_length + 1]` int32, a pure function of `seed` and `step`.

        So a run that resumes sees the batches that it would have seen.
        """
        # Nothing is remembered between steps, so a run that resumes needs no state of this.
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(0, len(self.train) - sequence_length, batch_size)
        return _windows(self.train, starts, sequence_length)

    def validation_batches(self, num_batches: int, batch_size: int, sequence_length: int) -> list[np.ndarray]:
        """Cuts the same windows every time, evenly spaced over the validation text."""
        last_start = len(self.validation) - sequence_length - 1
        starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
        return [_windows(self.validation, s, sequence_length) for s in np.split(starts, num_batches)]

    def check_length(self, sequence_length: int) -> None:
        """Refuses sequences that are too long, with a `ValueError` unless both parts hold a window."""
        shortest = min(len(self.train), len(self.validation))
        if shortest <= sequence_length:
            raise ValueError(
                f"data has {len(self.train)} training and {len(self.validation)} validation bytes "
                f"({self.source}); expected more than sequence_length {sequence_length} in each"
            )


def default_corpus(max_bytes: int) -> Corpus:
    """Reads Python's own documentation, then sources of its standard library, up to `max_bytes`."""
    prose = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    sources = _read(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    source = f"help topics and standard library of Python {sysconfig.get_python_version()}"
    return Corpus.split((prose + sources)[:max_bytes], source)


def corpus_from(paths: list[Path]) -> Corpus:
    """Reads the files in `paths`, and all in its folders that are not hidden, sorted by name.

    Args:
        paths: files and folders of text.

    Raises:
        ValueError: a path does not exist or cannot be read, or there is no byte in any.
    """
    files = [file for path in paths for file in _files(path)]
    text, names = _read(files), ", ".join(str(path) for path in paths)
    if not text:
        raise ValueError(f"data is {names!r}, which holds no bytes; expected text")
    return Corpus.split(text, f"{len(files)} file{'s' * (len(files) != 1)} of {names}")


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data is {str(path)!r}, which does not exist; expected a file or folder")
    if not path.is_dir():
        return [path]
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    # Sorted, as the order of a folder differs between machines, and the text must not.
    return [path / file for file in sorted(inside) if not any(part.startswith(".") for part in file.parts)]


def _read(files: list[Path]) -> bytes:
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            raise ValueError(f"data is {str(file)!r}; expected a readable file: {error.strerror}") from error
    return b"".join(parts)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)[None]].astype(np.int32)

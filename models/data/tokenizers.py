"""Tokenizers: bytes, a tokenizer file, or the tokenizer of a checkpoint."""

import abc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer as FromFile

from models.architectures.config_json import read_fields
from models.config import NUM_BYTES

MOST_BYTES = 2**28
"""Maximum size of a `tokenizer.json`, in bytes."""


class CheckpointTokenizer:
    """Tokenizer of a checkpoint, read from its `tokenizer.json`.

    Args:
        folder: folder of the checkpoint.

    Raises:
        ValueError: the file is missing or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = read_tokenizer(folder / "tokenizer.json")
        end = read_fields(folder).raw.get("eos_token_id")
        ends = end if isinstance(end, list) else [end]
        self.end_tokens = tuple(token for token in ends if type(token) is int)

    def tokens(self, text: str) -> list[int]:
        """Encode a text, including the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(text).ids

    def text(self, tokens: list[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return self.tokenizer.decode(tokens)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        ValueError: the file is missing or cannot be read; the message contains its path.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES} bytes")
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a tokenizer") from error
    except Exception as error:
        # The Rust parser raises `Exception` itself.
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


class Tokenizer(abc.ABC):
    """Abstract tokenizer: splits text into tokens."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Size of the vocabulary; tokens are numbered from 0."""

    @property
    @abc.abstractmethod
    def unit(self) -> str:
        """Name of a token, for units such as nats per byte."""

    @abc.abstractmethod
    def tokens(self, text: bytes) -> np.ndarray:
        """Encode a document as `[tokens]` integers."""


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """Byte tokenizer (default): every byte is a token, so it needs no file and accepts any input."""

    @property
    def vocab_size(self) -> int:
        """Number of byte values, 256."""
        return NUM_BYTES

    @property
    def unit(self) -> str:
        """Name of a token, "byte"."""
        return "byte"

    def tokens(self, text: bytes) -> np.ndarray:
        """Return the bytes unchanged, uint8."""
        return np.frombuffer(text, np.uint8)


@dataclass(frozen=True)
class TokenizerFile(Tokenizer):
    """Tokenizer read from a `tokenizer.json` of Hugging Face's `tokenizers`.

    Args:
        path: path of the file, read on first use.
    """

    path: Path

    @cached_property
    def _read(self) -> FromFile:
        return read_tokenizer(self.path)

    @property
    def vocab_size(self) -> int:
        """Largest token number plus 1, including special tokens."""
        return max(self._read.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def unit(self) -> str:
        """Name of a token, "token"."""
        return "token"

    def tokens(self, text: bytes) -> np.ndarray:
        """Encode a document, int32, with the special tokens of the file; invalid UTF-8 is replaced."""
        return np.array(self._read.encode(text.decode(errors="replace")).ids, np.int32)

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
"""A `tokenizer.json` has at most so many bytes."""


class CheckpointTokenizer:
    """This is the tokenizer of a checkpoint, read from its `tokenizer.json`.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        ValueError: there is none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = read_tokenizer(folder / "tokenizer.json")
        end = read_fields(folder).raw.get("eos_token_id")
        ends = end if isinstance(end, list) else [end]
        self.end_tokens = tuple(token for token in ends if type(token) is int)

    def tokens(self, text: str) -> list[int]:
        """Split a text into tokens, with those that the tokenizer puts around every text."""
        return self.tokenizer.encode(text).ids

    def text(self, tokens: list[int]) -> str:
        """Join tokens to a text; special ones are left out."""
        return self.tokenizer.decode(tokens)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        ValueError: there is none, or it cannot be read; the message names the file.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a tokenizer") from error
    except Exception as error:
        # Its parser, written in Rust, raises nothing narrower.
        raise ValueError(f"{path} is no tokenizer: {error}") from error


class Tokenizer(abc.ABC):
    """A tokenizer splits text into tokens.

    Args of subclasses say where its words are from.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Count the words, which are numbered from 0."""

    @property
    @abc.abstractmethod
    def unit(self) -> str:
        """Name a token for a reader, who is told of nats per byte or per token."""

    @abc.abstractmethod
    def tokens(self, text: bytes) -> np.ndarray:
        """Split a document into tokens, `[tokens]` integers."""


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """Every byte is a token, so there is no file, and no text that it cannot split. It is the default."""

    @property
    def vocab_size(self) -> int:
        """Count all bytes."""
        return NUM_BYTES

    @property
    def unit(self) -> str:
        """Name a token: it is a byte."""
        return "byte"

    def tokens(self, text: bytes) -> np.ndarray:
        """Take the bytes as they are, uint8."""
        return np.frombuffer(text, np.uint8)


@dataclass(frozen=True)
class TokenizerFile(Tokenizer):
    """The tokens are those of a `tokenizer.json`, as Hugging Face's `tokenizers` writes it.

    Args:
        path: the file. It is read when it is asked for the first time.
    """

    path: Path

    @cached_property
    def _read(self) -> FromFile:
        return read_tokenizer(self.path)

    @property
    def vocab_size(self) -> int:
        """Count the words up to the largest number of one, special ones among them."""
        return max(self._read.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def unit(self) -> str:
        """Name a token."""
        return "token"

    def tokens(self, text: bytes) -> np.ndarray:
        """Split a document, int32, with what the file puts around every text; bytes that are no UTF-8 are replaced."""
        return np.array(self._read.encode(text.decode(errors="replace")).ids, np.int32)

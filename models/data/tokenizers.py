"""A tokenizer splits text into tokens: its bytes, or what a file says."""

import abc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as FromFile

from models.presets import NUM_BYTES
from models.words import read_tokenizer


class Tokenizer(abc.ABC):
    """A tokenizer splits text into tokens.

    Args of subclasses say where its words are from.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Counts the words, which are numbered from 0."""

    @property
    @abc.abstractmethod
    def unit(self) -> str:
        """Names a token for a reader, who is told of nats per byte or per token."""

    @abc.abstractmethod
    def tokens(self, text: bytes) -> np.ndarray:
        """Splits a document into tokens, `[tokens]` integers."""


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """Every byte is a token, so there is no file, and no text that it cannot split. It is the default."""

    @property
    def vocab_size(self) -> int:
        """Counts all bytes."""
        return NUM_BYTES

    @property
    def unit(self) -> str:
        """Names a token: it is a byte."""
        return "byte"

    def tokens(self, text: bytes) -> np.ndarray:
        """Takes the bytes as they are, uint8."""
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
        """Counts the words up to the largest number of one, special ones among them."""
        return max(self._read.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def unit(self) -> str:
        """Names a token."""
        return "token"

    def tokens(self, text: bytes) -> np.ndarray:
        """Splits a document, int32, with what the file puts around every text; bytes that are no UTF-8 are replaced."""
        return np.array(self._read.encode(text.decode(errors="replace")).ids, np.int32)

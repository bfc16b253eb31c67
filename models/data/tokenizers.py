"""Tokenizers: bytes, a tokenizer file, or the tokenizer of a checkpoint."""

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import DEFAULT_LIMITS, LimitError, read_bytes
from models.architectures.config_json import read_fields, read_settings
from models.config import NUM_BYTES


def end_tokens(folder: Path, limits: FileLimits = FileLimits()) -> tuple[int, ...]:
    """Return the tokens that end a text: those of `generation_config.json`, or of `config.json`."""
    end = read_settings(folder / "generation_config.json", limits).get("eos_token_id")
    end = read_fields(folder, limits).raw.get("eos_token_id") if end is None else end
    return tuple(token for token in (end if isinstance(end, list) else [end]) if type(token) is int)


def encoded(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encode a text."""
    with _rust_errors("tokenizer.json cannot encode a text"):
        return tokenizer.encode(text).ids


def decoded(tokenizer: tokenizers.Tokenizer, tokens: list[int]) -> str:
    """Decode tokens to text, without special tokens."""
    with _rust_errors("tokenizer.json cannot decode tokens"):
        return tokenizer.decode(tokens)


def encoded_with_offsets(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text with its special tokens; return tokens, and their first and last character offsets."""
    with _rust_errors("tokenizer.json cannot encode a text"):
        found = tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets


@contextmanager
def _rust_errors(message: str) -> Iterator[None]:
    """Convert errors and panics of the tokenizers package into `ValueError`."""
    try:
        yield
    except (OSError, LimitError, MemoryError):
        raise
    except BaseException as error:
        # Rust raises `Exception` itself, and for a panic a class derived from `BaseException`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {shown(str(error))[1:-1]}") from error


def read_tokenizer(path: Path, limits: FileLimits = FileLimits()) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`."""
    # Texts are neither padded nor truncated, independent of the file.
    try:
        with _rust_errors(f"{path} is not a tokenizer"):
            tokenizer = tokenizers.Tokenizer.from_buffer(read_bytes(path, limits))
            # Padding may declare any length.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            words = _vocab_size(tokenizer)
        if not words:
            raise ValueError(f"{path}: its vocabulary is empty; expected at least one token")
        limits.check("values", words, "a vocabulary of {} tokens")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a tokenizer") from error
    except LimitError as error:
        raise LimitError(f"{path}: {error}") from error
    return tokenizer


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the largest token plus 1, including special tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class Tokenizer(abc.ABC):
    """Tokenizer of documents."""

    vocab_size: int  # size of the vocabulary; tokens are numbered from 0
    unit: str  # name of a token, for units such as nats per byte

    @abc.abstractmethod
    def tokens(self, text: bytes) -> np.ndarray:
        """Encode a document as `[tokens]` integers."""


class Bytes(Tokenizer):
    """Byte tokenizer (default): every byte is a token, so it needs no file and accepts any input."""

    vocab_size, unit = NUM_BYTES, "byte"

    def tokens(self, text: bytes) -> np.ndarray:
        """Return the bytes unchanged, uint8."""
        return np.frombuffer(text, np.uint8)


class TokenizerFile(Tokenizer):
    """Tokenizer read from a `tokenizer.json`; `end` is a token appended to every document."""

    unit = "token"

    def __init__(self, path: Path, limits: FileLimits = DEFAULT_LIMITS, end: int | None = None) -> None:
        self.tokenizer, self.end = read_tokenizer(path, limits), end
        self.vocab_size = _vocab_size(self.tokenizer)

    def tokens(self, text: bytes) -> np.ndarray:
        """Encode a document, int32, with the special tokens of the file; invalid UTF-8 is replaced."""
        tokens = encoded(self.tokenizer, text.decode(errors="replace"))
        if self.end is not None and tokens[-1:] != [self.end]:
            tokens.append(self.end)
        return np.array(tokens, np.int32)

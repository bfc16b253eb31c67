"""`Words` turns text into the tokens of a checkpoint, and back."""

from pathlib import Path

from tokenizers import Tokenizer

from models.architectures.fields import read_fields

MOST_BYTES = 2**28
"""A `tokenizer.json` has at most so many bytes."""


class Words:
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
        """Splits a text into tokens, with those that the tokenizer puts around every text."""
        return self.tokenizer.encode(text).ids

    def text(self, tokens: list[int]) -> str:
        """Joins tokens to a text; special ones are left out."""
        return self.tokenizer.decode(tokens)


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`.

    Raises:
        ValueError: there is none, or it cannot be read; the message names the file.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a tokenizer") from error
    except Exception as error:
        # Its parser, written in Rust, raises nothing narrower.
        raise ValueError(f"{path} is no tokenizer: {error}") from error

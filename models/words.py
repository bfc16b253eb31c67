"""`Words` turns text into the tokens of a checkpoint, and back."""

from pathlib import Path

from models.architectures.fields import read_fields
from models.data.tokenizers import read_tokenizer


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

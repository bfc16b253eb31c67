"""A `Stream` is tokens end to end, of which one chunk in every so many is held out."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

CHUNK_TOKENS = 32_768
CHUNKS_PER_CYCLE = 16
"""Of so many chunks the last is held out."""

CHUNKS_OF_SHORT_TEXT = 10
"""A stream too short for that is cut into so many smaller ones."""

TOKENS_AT_ONCE = 2**24
"""So many tokens of a mapped file are in memory when all of them are read."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream is documents end to end. Its last chunk of every sixteen is held out, so both sides see all kinds.

    Either side is read as if its chunks were end to end. A window marks where it does not go on in the same document,
    so that nobody is asked to guess how a text begins: such a token `t` is `~t`, which is below 0.

    Args:
        tokens: `[tokens]` integers, which may lie in a mapped file.
        starts: int64 `[documents - 1]`, where documents begin, ascending, without the first, which begins at 0.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @cached_property
    def _chunks(self) -> tuple[int, int]:
        """Tells the tokens of a chunk, and the chunks of a cycle."""
        if len(self.tokens) < CHUNKS_PER_CYCLE * CHUNK_TOKENS:
            return max(1, len(self.tokens) // CHUNKS_OF_SHORT_TEXT), CHUNKS_OF_SHORT_TEXT
        return CHUNK_TOKENS, CHUNKS_PER_CYCLE

    def length(self, held_out: bool) -> int:
        """Counts the tokens to learn from, or those that are held out."""
        chunk, per_cycle = self._chunks
        cycles, rest = divmod(len(self.tokens), chunk * per_cycle)
        train = (per_cycle - 1) * chunk
        learned = cycles * train + min(rest, train)
        return len(self.tokens) - learned if held_out else learned

    def window(self, held_out: bool, start: int, length: int) -> np.ndarray:
        """Cuts tokens of one side, int32 `[length]`, with marks.

        Args:
            held_out: the side: what is held out, or what is to be learned from.
            start: the first token, counted on this side.
            length: how many.
        """
        if not length:
            return np.zeros(0, np.int32)
        places = self._places(held_out, np.arange(start, start + length))
        tokens = self.tokens[places].astype(np.int32)
        begins = np.zeros(length, bool)
        begins[1:] = places[1:] != places[:-1] + 1
        # A document that begins where the window does is no surprise: its first token is not predicted.
        first, last = np.searchsorted(self.starts, (places[0], places[-1] + 1))
        begins |= np.isin(places, self.starts[first:last])
        return np.where(begins, ~tokens, tokens)

    def _places(self, held_out: bool, offsets: np.ndarray) -> np.ndarray:
        chunk, per_cycle = self._chunks
        train = (per_cycle - 1) * chunk
        cycle, within = np.divmod(offsets, chunk if held_out else train)
        return cycle * per_cycle * chunk + within + (train if held_out else 0)

    def check(self, vocab_size: int, name: str) -> None:
        """Reads all tokens, and refuses those that are no words.

        Args:
            vocab_size: how many words there are.
            name: of what the stream is from, for the message.

        Raises:
            ValueError: a token is below 0, or not below `vocab_size`.
        """
        for start in range(0, len(self.tokens), TOKENS_AT_ONCE):
            part = self.tokens[start : start + TOKENS_AT_ONCE]
            if part.min() < 0 or part.max() >= vocab_size:
                place = start + int(np.argmax((part < 0) | (part >= vocab_size)))
                raise ValueError(
                    f"data is {name!r}, whose token {place} is {self.tokens[place]}; "
                    f"expected 0 to {vocab_size - 1}, as the vocabulary has {vocab_size} words"
                )

    @cached_property
    def fingerprint(self) -> str:
        """Makes a word of all tokens and of where documents begin; it does not depend on the dtype of a file."""
        digest = hashlib.sha256(self.starts.astype("<i8").tobytes())
        for start in range(0, len(self.tokens), TOKENS_AT_ONCE):
            digest.update(self.tokens[start : start + TOKENS_AT_ONCE].astype("<i4").tobytes())
        return digest.hexdigest()


def joined(documents: list[np.ndarray]) -> Stream:
    """Puts documents `[tokens]` end to end in memory; empty ones are passed over."""
    documents = [document for document in documents if len(document)]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Stream(np.concatenate(documents or [np.zeros(0, np.uint8)]), ends[:-1])

"""Training and validation data: text or token arrays, mixed by weight.

A `Stream` is a sequence of tokens of which one chunk in every so many is held out.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import grain
import numpy as np

from models.data.tokenizers import Bytes

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
        """Count the tokens to learn from, or those that are held out."""
        chunk, per_cycle = self._chunks
        cycles, rest = divmod(len(self.tokens), chunk * per_cycle)
        train = (per_cycle - 1) * chunk
        learned = cycles * train + min(rest, train)
        return len(self.tokens) - learned if held_out else learned

    def window(self, held_out: bool, start: int, length: int) -> np.ndarray:
        """Cut tokens of one side, int32 `[length]`, with marks.

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
        """Read all tokens, and refuses those that are no words.

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
        """Make a word of all tokens and of where documents begin; it does not depend on the dtype of a file."""
        digest = hashlib.sha256(self.starts.astype("<i8").tobytes())
        for start in range(0, len(self.tokens), TOKENS_AT_ONCE):
            digest.update(self.tokens[start : start + TOKENS_AT_ONCE].astype("<i4").tobytes())
        return digest.hexdigest()


def joined(documents: list[np.ndarray]) -> Stream:
    """Put documents `[tokens]` end to end in memory; empty ones are passed over."""
    documents = [document for document in documents if len(document)]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Stream(np.concatenate(documents or [np.zeros(0, np.uint8)]), ends[:-1])


COUNTED_TOKENS = 2**24
"""The words of so many held-out tokens are counted, at most."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a corpus has a share of every batch.

    Args:
        streams: its tokens.
        weight: its share, beside the weights of other parts.
        source: where it is from, for a reader.
    """

    streams: Sequence[Stream]
    weight: float
    source: str

    def length(self, held_out: bool) -> int:
        """Count the tokens to learn from, or those that are held out."""
        return sum(stream.length(held_out) for stream in self.streams)


@dataclass(frozen=True, eq=False)
class Windows:
    """These are the sequences of one side of a part, side by side; Grain takes them by their number.

    A sequence has `length + 1` tokens, since each is to be predicted from those before; the last of one is the first of
    the next. What is left over at the end of a stream is not used.

    Args:
        part: has the tokens.
        held_out: the side.
        length: the tokens of a sequence.
    """

    part: Part
    held_out: bool
    length: int

    @cached_property
    def _ends(self) -> np.ndarray:
        tokens = [stream.length(self.held_out) for stream in self.part.streams]
        return np.cumsum([max(0, (count - 1) // self.length) for count in tokens])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, index, side="right"))
        within = int(index) - (int(self._ends[number - 1]) if number else 0)
        return self.part.streams[number].window(self.held_out, within * self.length, self.length + 1)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus is one part, or several that are mixed.

    Args:
        parts: where sequences are drawn from.
        unit: what a token is called, such as "byte".
        vocab_size: how many words there are; no token is larger.
    """

    parts: tuple[Part, ...]
    unit: str = "byte"
    vocab_size: int = Bytes().vocab_size

    @classmethod
    def of_text(cls, text: bytes, source: str) -> "Corpus":
        """Make a corpus of bytes, one document.

        Args:
            text: all bytes.
            source: where they are from, for a reader.
        """
        return cls((Part((joined([Bytes().tokens(text)]),), 1.0, source),))

    def length(self, held_out: bool) -> int:
        """Count the tokens to learn from, or those that are held out."""
        return sum(part.length(held_out) for part in self.parts)

    @property
    def source(self) -> str:
        """Says where the tokens are from, for a reader."""
        if len(self.parts) == 1:
            return self.parts[0].source
        shares = self._shares()
        return ", ".join(f"{share:.0%} {part.source}" for share, part in zip(shares, self.parts, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """Make a word that changes when a token, a border or a share does. It reads everything."""
        described = [[stream.fingerprint for stream in part.streams] for part in self.parts]
        return hashlib.sha256(repr((described, self._shares())).encode()).hexdigest()[:16]

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Count the nats per token of held-out text for a model that knows only how often each word occurs."""
        entropy, counted = 0.0, COUNTED_TOKENS // len(self.parts)
        for share, part in zip(self._shares(), self.parts, strict=True):
            counts = np.zeros(self.vocab_size, np.int64)
            for stream in part.streams:
                tokens = stream.window(True, 0, min(stream.length(True), counted // len(part.streams)))
                counts += np.bincount(np.where(tokens < 0, ~tokens, tokens), minlength=self.vocab_size)
            shares = counts[counts > 0] / counts.sum()
            entropy -= share * float((shares * np.log(shares)).sum())
        return entropy

    def sequences(self, seed: int, length: int) -> grain.MapDataset:
        """List the sequences of a run without end, int32 `[length + 1]` each.

        Every part is shuffled anew in each of its epochs, and parts take turns by weight. The list is a pure function
        of its arguments, so that a run can go on at any place, on any number of hosts.

        Args:
            seed: of the shuffles.
            length: the tokens to predict in a sequence.
        """
        # Grain's seeds have 32 bits.
        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts))
        parts = [
            grain.MapDataset.source(Windows(part, False, length)).shuffle(int(seeds[i])).repeat(None)
            for i, part in enumerate(self.parts)
        ]
        return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, self._shares())

    def batch(self, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
        """Draw all sequences of one step, int32 `[batch_size, sequence_length + 1]`; steps count from 1."""
        sequences = self.sequences(seed, sequence_length)
        return np.stack([sequences[(step - 1) * batch_size + row] for row in range(batch_size)])

    def validation_batches(self, num_batches: int, batch_size: int, sequence_length: int) -> list[np.ndarray]:
        """Cut the same windows every time, evenly spaced over what is held out of each part, as many as its share."""
        ends = np.round(np.cumsum(self._shares()) * num_batches * batch_size).astype(int)
        rows = []
        for part, count in zip(self.parts, np.diff(ends, prepend=0), strict=True):
            windows = Windows(part, True, sequence_length)
            rows += [windows[i] for i in np.linspace(0, len(windows) - 1, count).astype(int)]
        return np.split(np.stack(rows), num_batches)

    def check_length(self, sequence_length: int) -> None:
        """Refuse sequences that are too long, with a `ValueError` unless both sides of all parts hold one."""
        for part in self.parts:
            if min(len(Windows(part, held_out, sequence_length)) for held_out in (False, True)) < 1:
                raise ValueError(
                    f"data has {part.length(False)} training and {part.length(True)} validation {self.unit}s "
                    f"({part.source}); expected more than sequence_length {sequence_length} in each"
                )

    def _shares(self) -> list[float]:
        total = math.fsum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

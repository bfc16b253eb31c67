"""`Corpus` is what a model learns from, and what it is tested on: text, or arrays of tokens, mixed by weight."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import grain
import numpy as np

from models.data.stream import Stream, joined
from models.data.tokenizers import Bytes

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
        """Counts the tokens to learn from, or those that are held out."""
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
        """Makes a corpus of bytes, one document.

        Args:
            text: all bytes.
            source: where they are from, for a reader.
        """
        return cls((Part((joined([Bytes().tokens(text)]),), 1.0, source),))

    def length(self, held_out: bool) -> int:
        """Counts the tokens to learn from, or those that are held out."""
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
        """Makes a word that changes when a token, a border or a share does. It reads everything."""
        described = [[stream.fingerprint for stream in part.streams] for part in self.parts]
        return hashlib.sha256(repr((described, self._shares())).encode()).hexdigest()[:16]

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Counts the nats per token of held-out text for a model that knows only how often each word occurs."""
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
        """Lists the sequences of a run without end, int32 `[length + 1]` each.

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
        """Draws all sequences of one step, int32 `[batch_size, sequence_length + 1]`; steps count from 1."""
        sequences = self.sequences(seed, sequence_length)
        return np.stack([sequences[(step - 1) * batch_size + row] for row in range(batch_size)])

    def validation_batches(self, num_batches: int, batch_size: int, sequence_length: int) -> list[np.ndarray]:
        """Cuts the same windows every time, evenly spaced over what is held out of each part, as many as its share."""
        ends = np.round(np.cumsum(self._shares()) * num_batches * batch_size).astype(int)
        rows = []
        for part, count in zip(self.parts, np.diff(ends, prepend=0), strict=True):
            windows = Windows(part, True, sequence_length)
            rows += [windows[i] for i in np.linspace(0, len(windows) - 1, count).astype(int)]
        return np.split(np.stack(rows), num_batches)

    def check_length(self, sequence_length: int) -> None:
        """Refuses sequences that are too long, with a `ValueError` unless both sides of all parts hold one."""
        for part in self.parts:
            if min(len(Windows(part, held_out, sequence_length)) for held_out in (False, True)) < 1:
                raise ValueError(
                    f"data has {part.length(False)} training and {part.length(True)} validation {self.unit}s "
                    f"({part.source}); expected more than sequence_length {sequence_length} in each"
                )

    def _shares(self) -> list[float]:
        total = math.fsum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

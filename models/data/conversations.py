"""Conversations as rows of a batch: each row has whole conversations, and padding."""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from models.data.chat import Example
from models.data.corpus import CHUNK_TOKENS, CHUNKS_OF_SHORT_TEXT, CHUNKS_PER_CYCLE, Documents, Packing
from models.data.marks import marked


@dataclass(frozen=True, eq=False)
class Conversations(Documents):
    """Conversations in memory, of which the last of every sixteen is held out, or of every ten if they are short."""

    # A row has whole conversations by best fit. Padding repeats tokens of the row: they are neither predicted nor
    # routed, and the conversations do not attend to them.

    tokens: np.ndarray  # int32 `[tokens]` of all examples
    starts: np.ndarray  # int64 `[examples]`, offset of the first token of each example, ascending from 0
    context: np.ndarray  # bool `[tokens]`, True for tokens that are not predicted, such as questions
    # Int64 `[examples]`, the number of each example's conversation, ascending from 0. Examples of one conversation are
    # on the same side.
    sources: np.ndarray
    endless: np.ndarray  # int64 `[examples]`, number of answers of each example without an end token
    has_padding: ClassVar[bool] = True

    @classmethod
    def of(cls, conversations: Sequence[Sequence[Example]]) -> "Conversations":
        """Concatenate the examples of conversations."""
        examples = [example for conversation in conversations for example in conversation]
        sizes = np.array([0, *(len(example.tokens) for example in examples)], np.int64)
        return cls(
            np.concatenate([example.tokens for example in examples] + [np.zeros(0, np.int32)]),
            np.cumsum(sizes)[:-1],
            np.concatenate([example.context for example in examples] + [np.zeros(0, bool)]),
            np.repeat(np.arange(len(conversations)), [len(conversation) for conversation in conversations]),
            np.array([example.num_endless for example in examples], np.int64),
        )

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.diff(self.starts, append=len(self.tokens))

    def _side(self, held_out: bool) -> np.ndarray:
        """Return the numbers of the examples of one split."""
        if not self.is_split:
            return np.arange(len(self.starts))
        is_long = len(self.tokens) >= CHUNKS_PER_CYCLE * CHUNK_TOKENS
        per_cycle = CHUNKS_PER_CYCLE if is_long else CHUNKS_OF_SHORT_TEXT
        per_cycle = min(per_cycle, int(self.sources.max(initial=0)) + 1)
        return np.flatnonzero((self.sources % per_cycle == per_cycle - 1) == held_out)

    def length(self, held_out: bool) -> int:
        """Return the number of training tokens, or of held-out tokens."""
        return int(self._sizes[self._side(held_out)].sum())

    def head(self, held_out: bool, length: int) -> np.ndarray:
        """Return the first tokens of one split, int32 of at most `[length]`, without marks."""
        parts = [self.tokens[start:] for start in self.starts[self._side(held_out)]]
        sizes = self._sizes[self._side(held_out)]
        whole = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return np.concatenate([*whole, np.zeros(0, np.int32)])[:length]

    def rows(self, held_out: bool, length: int) -> "PackedRows":
        """Pack one split into rows of `length` tokens to predict, without conversations whose answers do not fit."""
        if (held_out, length) not in self._packed:
            self._packed[held_out, length] = self._pack(self._side(held_out), length + 1)
        return self._packed[held_out, length]

    @cached_property
    def _packed(self) -> "dict[tuple[bool, int], PackedRows]":
        """Rows by split and length."""
        return {}

    def _pack(self, side: np.ndarray, width: int) -> "PackedRows":
        first, sizes = self.starts[side], np.minimum(self._sizes[side], width)
        num_predicted = np.append(0, np.cumsum(~self.context))
        # The first token of a conversation has no tokens before it to predict it from.
        is_used = num_predicted[first + sizes] > num_predicted[first + np.minimum(1, sizes)]
        members = best_fit(sizes[is_used], width)
        packing = Packing(
            conversations=len(np.unique(self.sources[side])),
            truncated=int((sizes < self._sizes[side]).sum()),
            unused=int((~is_used).sum()),
            tokens=int(sizes[is_used].sum()),
            rows=len(members),
            once=int(self._sizes[side][np.diff(self.sources[side], append=-1) != 0].sum()),
            repeated=int(self._sizes[side].sum()),
            endless=int(self.endless[side].sum()),
        )
        return PackedRows(self, np.stack([first, first + sizes], 1)[is_used], members, width, packing)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens, starts, contexts and conversations."""
        digest = hashlib.sha256(b"conversations")
        for numbers in (self.starts, self.sources, self.tokens):
            digest.update(numbers.astype("<i8").tobytes())
        digest.update(np.packbits(self.context).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of one split, by index."""

    conversations: Conversations  # tokens of the rows
    # Int64 `[examples, 2]`, offsets of the first token of each example and of the one after its last
    places: np.ndarray
    members: list[list[int]]  # numbers of the examples of each row
    width: int  # tokens per row
    packing: Packing  # numbers of the conversations and rows

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> np.ndarray:
        places = self.places[self.members[index]]
        offsets = np.concatenate([np.arange(*place) for place in places])
        # Padding repeats tokens of the row. If attention is not within documents, it is routed like them.
        is_padding = np.arange(self.width) >= len(offsets)
        offsets = np.resize(offsets, self.width)
        starts = np.isin(offsets, places[:, 0])
        starts[np.flatnonzero(is_padding)[:1]] = True
        return marked(self.conversations.tokens[offsets], starts, self.conversations.context[offsets], is_padding)


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack items into rows, the largest first, each into the row with the least room that is enough."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    rows_with: dict[int, list[int]] = {}
    for item in np.argsort(-sizes, kind="stable").tolist():
        size, room = int(sizes[item]), capacity
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row = len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[at], rows_with[room]
        rows[row].append(item)
        if room - size not in rows_with:
            bisect.insort(rooms, room - size)
        rows_with.setdefault(room - size, []).append(row)
    return rows

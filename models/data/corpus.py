"""Training and validation data: text or token arrays, mixed by weight, in batches.

Every `CHUNKS_PER_CYCLE`-th chunk of a `Stream` is held out for validation.
"""

import bisect
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from models.data.chat import Example
from models.data.marks import marked
from models.data.tokenizers import Bytes

CHUNK_TOKENS = 32_768
CHUNKS_PER_CYCLE = 16  # chunks per cycle; the last chunk of each cycle is held out
CHUNKS_OF_SHORT_TEXT = 10  # number of smaller chunks of a stream shorter than one cycle
TOKENS_AT_ONCE = 2**24  # tokens of a memory-mapped file to read into memory at a time


class Packing(NamedTuple):
    """Numbers of packed conversations."""

    conversations: int  # number of conversations
    truncated: int  # number of examples longer than a row
    unused: int  # number of examples without a predicted token in a row
    tokens: int  # tokens in rows, without padding
    rows: int  # number of rows
    once: int  # tokens of the last example of each conversation
    repeated: int  # tokens of all examples
    endless: int  # number of answers without an end token


@dataclass(frozen=True, eq=False)
class Stream:
    """Concatenated documents, of which the last chunk of every sixteen is held out."""

    # Holding out chunks throughout the stream gives both splits text of all kinds. Each split concatenates its chunks.
    # A window marks the starts of documents, and the tokens after a gap between chunks; see `marks`.

    tokens: np.ndarray  # `[tokens]` integers, possibly memory-mapped
    starts: np.ndarray  # int64 `[documents - 1]`, start offsets of the documents, ascending, without the first (0)
    is_split: bool = True  # if False, both splits contain all documents
    has_padding: ClassVar[bool] = False  # whether rows may end with padding

    @cached_property
    def _chunks(self) -> tuple[int, int]:
        """Tokens per chunk, and chunks per cycle."""
        if len(self.tokens) < CHUNKS_PER_CYCLE * CHUNK_TOKENS:
            return max(1, len(self.tokens) // CHUNKS_OF_SHORT_TEXT), CHUNKS_OF_SHORT_TEXT
        return CHUNK_TOKENS, CHUNKS_PER_CYCLE

    def length(self, held_out: bool) -> int:
        """Return the number of training tokens, or of held-out tokens."""
        if not self.is_split:
            return len(self.tokens)
        chunk, per_cycle = self._chunks
        cycles, rest = divmod(len(self.tokens), chunk * per_cycle)
        train = (per_cycle - 1) * chunk
        learned = cycles * train + min(rest, train)
        return len(self.tokens) - learned if held_out else learned

    def window(self, held_out: bool, start: int, length: int) -> np.ndarray:
        """Return a window of one split, int32 `[length]`, with marks."""
        if not length:
            return np.zeros(0, np.int32)
        places = self._places(held_out, np.arange(start, start + length))
        tokens = self.tokens[places].astype(np.int32)
        begins = np.zeros(length, bool)
        begins[1:] = places[1:] != places[:-1] + 1
        # Mark all document starts in the window; the first token of a document is not predicted.
        first, last = np.searchsorted(self.starts, (places[0], places[-1] + 1))
        begins |= np.isin(places, self.starts[first:last])
        return marked(tokens, begins, np.zeros(length, bool))

    def head(self, held_out: bool, length: int) -> np.ndarray:
        """Return the first tokens of one split, int32 of at most `[length]`, without marks."""
        return self.tokens[self._places(held_out, np.arange(min(length, self.length(held_out))))].astype(np.int32)

    def rows(self, held_out: bool, length: int) -> "StreamRows":
        """Return the windows of one split with `length` tokens to predict each, without an incomplete last one."""
        return StreamRows(self, held_out, length)

    def _places(self, held_out: bool, offsets: np.ndarray) -> np.ndarray:
        if not self.is_split:
            return offsets
        chunk, per_cycle = self._chunks
        train = (per_cycle - 1) * chunk
        cycle, within = np.divmod(offsets, chunk if held_out else train)
        return cycle * per_cycle * chunk + within + (train if held_out else 0)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens and document starts, independent of the dtype of the file."""
        digest = hashlib.sha256(self.starts.astype("<i8").tobytes())
        for start in range(0, len(self.tokens), TOKENS_AT_ONCE):
            digest.update(self.tokens[start : start + TOKENS_AT_ONCE].astype("<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class StreamRows:
    """Windows of one split of a stream."""

    # A window has `length + 1` tokens, as each token is predicted from those before. Its last token is the first of the
    # next window.

    stream: Stream  # stream to cut
    held_out: bool  # if True, read held-out tokens; otherwise training tokens
    length: int  # tokens to predict per window
    packing: None = None  # `None`, as these are no conversations

    def __len__(self) -> int:
        return max(0, (self.stream.length(self.held_out) - 1) // self.length)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.stream.window(self.held_out, index * self.length, self.length + 1)


def joined(documents: list[np.ndarray]) -> Stream:
    """Concatenate documents in memory, without empty ones."""
    documents = [document for document in documents if len(document)]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Stream(np.concatenate(documents or [np.zeros(0, np.uint8)]), ends[:-1])


@dataclass(frozen=True, eq=False)
class Conversations:
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
    is_split: bool = True  # if False, both splits contain all conversations
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


Documents = Stream | Conversations


def check_tokens(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Raise `ValueError` unless all tokens are in the vocabulary."""
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        part = tokens[start : start + TOKENS_AT_ONCE]
        if part.min() < 0 or part.max() >= vocab_size:
            place = start + int(np.argmax((part < 0) | (part >= vocab_size)))
            raise ValueError(
                f"data is {name!r}, whose token {place} is {tokens[place]}; "
                f"expected 0 to {vocab_size - 1}, as the vocabulary has {vocab_size} words"
            )


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


COUNTED_TOKENS = 2**24  # maximum number of held-out tokens in the unigram statistics


@dataclass(frozen=True, eq=False)
class Part:
    """Component of a corpus with a fixed share of every batch."""

    streams: Sequence[Documents]  # documents of the part
    weight: float  # relative weight of the part
    source: str  # description of the source for messages

    def length(self, held_out: bool) -> int:
        """Return the number of training tokens, or of held-out tokens."""
        return sum(stream.length(held_out) for stream in self.streams)

    def rows(self, held_out: bool, length: int) -> list[StreamRows | PackedRows]:
        """Return the sequences of each document or group of documents, with `length` tokens to predict each."""
        return [stream.rows(held_out, length) for stream in self.streams]

    def sequences(self, held_out: bool, length: int) -> grain.MapDataset:
        """Return all sequences, of which there is at least one."""
        sources = [grain.MapDataset.source(rows) for rows in self.rows(held_out, length) if len(rows)]
        return grain.MapDataset.concatenate(sources)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Mixture of one or more parts."""

    parts: tuple[Part, ...]  # parts to sample from
    unit: str = "byte"  # name of a token, such as "byte"
    vocab_size: int = Bytes().vocab_size  # size of the vocabulary; every token is below it
    # Parts of the validation data; `None` (default) for the held-out tokens of `parts`
    held_out: tuple[Part, ...] | None = None

    @classmethod
    def of_text(cls, text: bytes, source: str) -> "Corpus":
        """Build a corpus of bytes from one document."""
        return cls((Part((joined([Bytes().tokens(text)]),), 1.0, source),))

    def validated_by(self, other: "Corpus") -> "Corpus":
        """Return a corpus that trains on all tokens of this one and validates on all tokens of another."""
        return replace(self, parts=_unsplit(self.parts), held_out=_unsplit(other.parts))

    def _split(self, held_out: bool) -> tuple[Part, ...]:
        return self.held_out if held_out and self.held_out is not None else self.parts

    def length(self, held_out: bool) -> int:
        """Return the number of training tokens, or of held-out tokens."""
        return sum(part.length(held_out) for part in self._split(held_out))

    @property
    def has_padding(self) -> bool:
        """Whether sequences may end with padding."""
        return any(stream.has_padding for part in (*self.parts, *(self.held_out or ())) for stream in part.streams)

    @property
    def source(self) -> str:
        """Description of the source, with the share of each part."""
        if len(self.parts) == 1:
            return self.parts[0].source
        shares = _shares(self.parts)
        return ", ".join(f"{share:.0%} {part.source}" for share, part in zip(shares, self.parts, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens, document starts and shares; computing it reads the whole corpus."""
        described = [
            ([[stream.fingerprint for stream in part.streams] for part in parts], _shares(parts))
            for parts in (self.parts, *([] if self.held_out is None else [self.held_out]))
        ]
        return hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Unigram entropy of held-out text, in nats per token."""
        parts, entropy = self._split(held_out=True), 0.0
        counted = COUNTED_TOKENS // len(parts)
        for share, part in zip(_shares(parts), parts, strict=True):
            counts = np.zeros(self.vocab_size, np.int64)
            for stream in part.streams:
                tokens = stream.head(True, counted // len(part.streams))
                counts += np.bincount(tokens, minlength=self.vocab_size)
            shares = counts[counts > 0] / counts.sum()
            entropy -= share * float((shares * np.log(shares)).sum())
        return entropy

    def num_sequences(self, length: int) -> int:
        """Return the number of training sequences of an epoch."""
        # With weights, an epoch has as many sequences as all parts together; some of them occur several times.
        return sum(len(rows) for part in self.parts for rows in part.rows(False, length))

    def sequences(self, seed: int, length: int) -> grain.MapDataset:
        """Return the endless sequence of training examples, int32 `[length + 1]` each."""
        # Each epoch of a part is shuffled anew, and parts are mixed by weight. The order is a pure function of the
        # arguments, so a run can resume at any position and on any number of hosts.
        # Grain accepts 32-bit seeds.
        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts))
        parts = [part.sequences(False, length).shuffle(int(seeds[i])).repeat(None) for i, part in enumerate(self.parts)]
        return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, _shares(self.parts))

    def batch(self, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
        """Return all sequences of one step, int32 `[batch_size, sequence_length + 1]`; the first step is 1."""
        sequences = self.sequences(seed, sequence_length)
        return np.stack([sequences[(step - 1) * batch_size + row] for row in range(batch_size)])

    def validation_batches(self, num_batches: int, batch_size: int, sequence_length: int) -> list[np.ndarray]:
        """Return fixed validation batches: windows evenly spaced over the held-out text of each part, by share."""
        parts = self._split(held_out=True)
        ends = np.round(np.cumsum(_shares(parts)) * num_batches * batch_size).astype(int)
        rows = []
        for part, count in zip(parts, np.diff(ends, prepend=0), strict=True):
            held_out = part.sequences(True, sequence_length)
            rows += [held_out[int(i)] for i in np.arange(count) * len(held_out) // count]
        return np.split(np.stack(rows), num_batches)

    def check_length(self, sequence_length: int) -> None:
        """Raise `ValueError` unless both splits of all parts contain at least one sequence."""
        for held_out in (False, True):
            for part in self._split(held_out):
                rows = part.rows(held_out, sequence_length)
                if not any(map(len, rows)):
                    kind = "validation" if held_out else "training"
                    other = ""
                    if any(one.packing for one in rows):
                        other = f", or a conversation with an answer in its first {sequence_length + 1}"
                    raise ValueError(
                        f"data has {part.length(held_out)} {kind} {self.unit}s ({part.source}); "
                        f"expected more than sequence_length {sequence_length}{other}"
                    )

    def notes(self, sequence_length: int) -> list[str]:
        """Return lines about the conversations, if there are any, for the user."""
        parts = [(part, held_out) for held_out in (False, True) for part in self._split(held_out)]
        found = [rows.packing for part, side in parts for rows in part.rows(side, sequence_length) if rows.packing]
        if not found:
            return []
        total = Packing(*map(sum, zip(*found, strict=True)))
        return _lines(total, sequence_length + 1, self.unit)


def _lines(total: Packing, width: int, unit: str) -> list[str]:
    padding = 1 - total.tokens / max(1, total.rows * width)
    line = f"{total.conversations:,} conversations in {total.rows:,} sequences, {padding:.1%} padding"
    if total.truncated:
        line += f"; {total.truncated:,} truncated to {width} {unit}s"
    if total.unused:
        line += f"; {total.unused:,} without an answer in these left out"
    lines = [line]
    if total.repeated > total.once:
        counts = f"{total.repeated:,} {unit}s in place of {total.once:,}, {total.repeated / total.once:.1f} x"
        lines.append(f"the chat template changes earlier answers: {counts}; data.answers=last learns the last alone")
    if total.endless:
        lines.append(
            f"{total.endless:,} answers end without an end token of the checkpoint; see generation_config.json"
        )
    return lines


def _shares(parts: Sequence[Part]) -> list[float]:
    total = math.fsum(part.weight for part in parts)
    return [part.weight / total for part in parts]


def _unsplit(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(replace(part, streams=[replace(stream, is_split=False) for stream in part.streams]) for part in parts)


STEPS_AHEAD = 4  # number of batches to prefetch
THREADS = 2  # Reader threads. Packing is cheap; threads hide the latency of memory-mapped files.
NO_END = 2**50  # number of steps of the endless data set, above the length of any run


class Batches(Iterator[np.ndarray], AbstractContextManager["Batches"]):
    """Resumable iterator over the batches of a run, and a context manager closing its reader threads."""

    # Sequence `row` of step `s` does not depend on the number of processes. Each process reads its own rows only.

    def __init__(
        self, corpus: Corpus, *, seed: int, batch_size: int, sequence_length: int, rows: Sequence[int]
    ) -> None:
        self.batch_size, self.rows = batch_size, tuple(rows)
        self.sequences = corpus.sequences(seed, sequence_length)
        self._start(0)

    def _start(self, first: int) -> None:
        self.first, self.steps = first, 0
        batches = grain.MapDataset.range(NO_END).map(lambda step: self._rows(first + step * self.batch_size))
        ahead = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=STEPS_AHEAD)
        self.iterator = iter(batches.to_iter_dataset(ahead))

    def _rows(self, first: int) -> np.ndarray:
        return np.stack([self.sequences[first + row] for row in self.rows])

    def __next__(self) -> np.ndarray:
        """Return the next batch, int32 `[rows, sequence_length + 1]`."""
        batch: np.ndarray = next(self.iterator)
        self.steps += 1
        return batch

    def __exit__(self, *_: object) -> None:
        self.iterator.close()

    def state(self) -> dict[str, int]:
        """Return the position of the iterator as JSON: the number of sequences read by all processes."""
        return {"sequences": self.first + self.steps * self.batch_size}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a saved position, possibly with another number of processes."""
        sequences = state.get("sequences")
        if type(sequences) is not int or sequences < 0:
            raise ValueError(f"data state is {state!r}; expected a number of sequences")
        self.iterator.close()
        self._start(sequences)


def rows_here(sharding: Sharding, batch_size: int) -> list[int]:
    """Return the batch rows on devices of this process, ascending."""
    here = sharding.addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in here for row in range(batch_size)[(index or (slice(None),))[0]]})


def place_rows(rows: np.ndarray, sharding: Sharding, batch_size: int) -> jax.Array:
    """Assemble a global batch from the rows of each process."""
    return jax.make_array_from_process_local_data(sharding, rows, (batch_size, *rows.shape[1:]))

"""`Batches` reads the sequences of one process, ahead of the step that needs them."""

from collections.abc import Sequence
from types import TracebackType

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from models.data.corpus import Corpus

STEPS_AHEAD = 4
"""So many batches are read before they are asked for."""

THREADS = 2
"""Threads that read; packing is cheap, and files that are mapped may have to be waited for."""

NO_END = 2**50
"""More steps than any run has."""


class Batches:
    """An iterator over the batches of a run, which can go on where another stopped.

    It is a context, which ends its threads. Sequence `row` of step `s` is the same for any number of processes, each of
    which reads its own rows alone.

    Args:
        corpus: what is read.
        seed: of the shuffles.
        batch_size: the sequences of a step, over all processes.
        sequence_length: the tokens to predict in a sequence.
        rows: those of this process, ascending; `rows_here` finds them.
    """

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
        """Read the next batch, int32 `[rows, sequence_length + 1]`."""
        batch: np.ndarray = next(self.iterator)
        self.steps += 1
        return batch

    def __iter__(self) -> "Batches":
        return self

    def __enter__(self) -> "Batches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.iterator.close()

    def state(self) -> dict[str, int]:
        """Says where the next batch begins, as JSON: how many sequences all processes have had."""
        return {"sequences": self.first + self.steps * self.batch_size}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where `state` was asked for, maybe on another number of processes.

        Args:
            state: what `state` returned.

        Raises:
            ValueError: it is no such thing.
        """
        sequences = state.get("sequences")
        if type(sequences) is not int or sequences < 0:
            raise ValueError(f"the state of the data is {state!r}; expected a number of sequences")
        self.iterator.close()
        self._start(sequences)


def rows_here(sharding: Sharding, batch_size: int) -> list[int]:
    """List the rows of a batch that lie on devices of this process, ascending.

    Args:
        sharding: of a batch over all devices.
        batch_size: its rows.
    """
    here = sharding.addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in here for row in range(batch_size)[(index or (slice(None),))[0]]})


def place_rows(rows: np.ndarray, sharding: Sharding, batch_size: int) -> jax.Array:
    """Make a batch of the rows of all processes, each of which gives its own.

    Args:
        rows: int32 `[rows, ...]`, in the order of `rows_here`.
        sharding: of the batch over all devices.
        batch_size: the rows of all processes.
    """
    return jax.make_array_from_process_local_data(sharding, rows, (batch_size, *rows.shape[1:]))

"""Iterator over training batches, with prefetching."""

from collections.abc import Sequence
from types import TracebackType

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from models.data.corpus import Corpus

STEPS_AHEAD = 4
"""Number of batches to prefetch."""

THREADS = 2
"""Reader threads. Packing is cheap; threads hide the latency of memory-mapped files."""

NO_END = 2**50
"""Number of steps of the endless data set, above the length of any run."""


class Batches:
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

    def __iter__(self) -> "Batches":
        return self

    def __enter__(self) -> "Batches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

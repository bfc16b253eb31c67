"""`CountsTrace` collects the routing of steps, in the format that `jax-moe-lb replay` reads."""

import io
from pathlib import Path

import numpy as np

from jax_moe_lb import Stats
from models.files import write_whole


class CountsTrace:
    """It keeps the counts of each step, of the first expert-parallel group."""

    def __init__(self) -> None:
        self.counts: list[np.ndarray] = []

    def add(self, stats: Stats) -> None:
        """Adds a step, whose statistics have the shape `[layers, D, ...]`."""
        self.counts.append(np.asarray(stats.counts)[:, 0].astype(np.int32))

    def write(self, path: Path) -> None:
        """Writes an npz file with `steps` `[steps]`, from 1, and `counts` `[steps, layers, R, E]`.

        Raises:
            OSError: it cannot be written.
        """
        packed = io.BytesIO()
        steps = np.arange(1, len(self.counts) + 1, dtype=np.int32)
        np.savez_compressed(packed, steps=steps, counts=np.stack(self.counts))
        write_whole(path, packed.getvalue())

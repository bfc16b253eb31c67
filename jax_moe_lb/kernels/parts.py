"""Choice of an array in Pallas kernels, whose matrices or sums are in several arrays."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.experimental import pallas as pl
from jaxtyping import Array


def for_part_of(index: Array, parts: Sequence[Any], run: Callable[[Any, Array], None], axis: int = 0) -> None:
    """Run a function of the array that contains an index, and of the index in it."""
    if len(parts) == 1:
        run(parts[0], index)
        return
    before = 0
    for part in parts:
        size = part.shape[axis]
        pl.when((index >= before) & (index < before + size))(partial(run, part, index - before))
        before += size

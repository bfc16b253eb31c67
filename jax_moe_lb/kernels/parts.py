"""Choice of an array in Pallas kernels, whose matrices or sums are in several arrays."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.experimental import pallas as pl
from jaxtyping import Array


def for_part_of(index: Array, parts: Sequence[Any], run: Callable[[Any, Array], None], axis: int = 0) -> None:
    """Run a function of the array that contains an index, and of the index in it."""
    for_part(index, [part.shape[axis] for part in parts], lambda n, at: run(parts[n], at))


def for_part(index: Array, sizes: Sequence[int], run: Callable[[int, Array], None]) -> None:
    """Run a function of the number of the part that contains an index, and of the index in it."""
    if len(sizes) == 1:
        run(0, index)
        return
    for n, (before, size) in enumerate(zip(starts(sizes), sizes, strict=True)):
        pl.when((index >= before) & (index < before + size))(partial(run, n, index - before))


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the first index of each part."""
    return list(itertools.accumulate(sizes[:-1], initial=0))

"""Readers of recorded counts and a writer of plans, with one-line errors naming the file."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import FileLimits, LimitError
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.plan_file import read_named
from jax_moe_lb.core.topology import home_experts_per_rank
from jax_moe_lb.core.validation import check_counts

MOST_LAYERS = 2**17
"""Maximum number of layers of a trace, summed over all steps: 1000 steps of a model with 131 layers."""

MOST_ENTRIES = 2**24
"""Maximum number of counts per layer, one per rank and expert: 4096 of both."""

OTHERS = (".pt", ".jsonl")
"""Suffixes of recordings readable by `jax-moe-lb convert`."""

NAMES_SHOWN = 3
"""Maximum number of array names listed in the error for a missing array."""


class Trace(NamedTuple):
    """Counts of several steps."""

    steps: list[int]  # number of each step in the training run
    counts: Int[np.ndarray, "steps layers R E"]  # the token copies by source rank and expert


def read_counts(
    path: Path, limits: FileLimits = FileLimits(), argument: str = "COUNTS"
) -> Int[np.ndarray, "layers R E"]:
    """Read the counts of one step, `[R, E]` or `[layers, R, E]`."""
    counts = _load(argument, path, limits, (2, 3), "[R, E] or [layers, R, E]")["counts"]
    return checked(argument, path, counts.reshape(-1, *counts.shape[-2:]) if counts.size else counts, limits)


def read_trace(path: Path, limits: FileLimits = FileLimits()) -> Trace:
    """Read the counts of several steps, `[steps, layers, R, E]`, and the step numbers."""
    return _numbered("TRACE", path, _load("TRACE", path, limits, (4,), "[steps, layers, R, E]"), limits)


def read_routing(path: Path, limits: FileLimits = FileLimits()) -> Trace:
    """Read the counts of one step, `[R, E]` or `[layers, R, E]`, or those of `read_trace`."""
    arrays = _load("--trace", path, limits, (2, 3, 4), "[R, E], [layers, R, E] or [steps, layers, R, E]")
    return _numbered("--trace", path, arrays, limits)


def _numbered(argument: str, path: Path, arrays: dict[str, np.ndarray], limits: FileLimits) -> Trace:
    counts = arrays["counts"]
    counts = counts.reshape((1,) * (4 - counts.ndim) + counts.shape)
    # Empty counts may declare any number of steps.
    found = checked(argument, path, counts, limits)
    # Without `steps`, steps are numbered from 0.
    steps = arrays.get("steps", np.arange(len(counts)))
    if steps.shape != counts.shape[:1] or not np.issubdtype(steps.dtype, np.integer):
        raise ValueError(
            f"{argument} {path}: steps has shape {steps.shape} and dtype {steps.dtype}; "
            f"expected an integer for each of the {len(counts)} steps of counts"
        )
    return Trace(steps.tolist(), found)


def write_plans(path: Path, plans: Sequence[Plan], leading_shape: tuple[int, ...]) -> None:
    """Write plans to one file, which `Plan.load` reads as one plan with leading dimensions."""
    stacked: Plan = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*leading_shape, *leaves[0].shape), *plans)
    with naming("--out", path):
        stacked.save(path)


@contextmanager
def naming(argument: str, path: Path) -> Iterator[None]:
    """Convert errors of writing a file to a ValueError naming the argument and the file."""
    # The operating system's error for a full disk, for example, lacks the file name.
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{argument} is {path}: {reason}; expected a writable file") from error


def _load(
    argument: str, path: Path, limits: FileLimits, dimensions: tuple[int, ...], expected: str
) -> dict[str, np.ndarray]:
    """Read `counts` and, if present, `steps` of an .npz file, or the array of an .npy file as `counts`."""
    if path.suffix in OTHERS:
        raise ValueError(
            f"{argument} is {path}; expected a .npy or .npz file. Convert recordings of SGLang or Megatron-LM with "
            "jax-moe-lb convert."
        )
    try:
        arrays, names = read_named(path, ("counts", "steps"), limits)
    except OSError as error:
        raise ValueError(f"{argument} is {path}: {error.strerror or error}; expected a .npy or .npz file") from error
    except LimitError as error:
        raise LimitError(f"{argument} is {path}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # NumPy and zipfile raise many types for a damaged file
        raise ValueError(
            f"{argument} is {path}: damaged or not a NumPy file of numbers; expected .npy or .npz"
        ) from error
    if "counts" not in arrays:
        raise ValueError(f"{argument} {path} has arrays {_listed(names)}; expected an array named 'counts'")
    if (counts := arrays["counts"]).ndim not in dimensions:
        raise ValueError(f"{argument} {path}: counts has shape {counts.shape}; expected {expected}")
    return arrays


def _listed(names: list[str]) -> str:
    """Return names for a message, truncated after the first few."""
    first = ", ".join(map(shown, names[:NAMES_SHOWN]))
    return f"[{first}]" if len(names) <= NAMES_SHOWN else f"[{first}, and {len(names) - NAMES_SHOWN} more]"


def checked(argument: str, path: Path, counts: np.ndarray, limits: FileLimits) -> Int[np.ndarray, "... R E"]:
    """Check the counts of every layer and step, and return them in int32."""
    if counts.size == 0:
        raise ValueError(f"{argument} {path}: counts has shape {counts.shape}; expected no empty dimension")
    if math.prod(counts.shape[:-2]) > MOST_LAYERS or math.prod(counts.shape[-2:]) > MOST_ENTRIES:
        raise ValueError(
            f"{argument} {path}: counts has shape {counts.shape}; expected at most {MOST_LAYERS} layers in all "
            f"steps and {MOST_ENTRIES} entries per layer"
        )
    limits.check("array_bytes", counts.size * 4, f"{argument} {path}: counts of {{}} bytes in int32")
    for index in np.ndindex(counts.shape[:-2]):
        try:
            check_counts(counts[index])
            home_experts_per_rank(counts.shape[-1], counts.shape[-2])
        except ValueError as error:
            raise ValueError(f"{argument} {path}, {_where(index)}: {error}") from error
    return counts.astype(np.int32)


def _where(index: tuple[int, ...]) -> str:
    names = ("step", "layer")[-len(index) :]
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))

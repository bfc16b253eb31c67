"""These functions read recorded counts and write plans; what is wrong with a file becomes one line that names it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.plan_file import LimitError, read_named
from jax_moe_lb.core.topology import home_experts_per_rank
from jax_moe_lb.core.validation import check_counts
from jax_moe_lb.recordings.yaml_file import MOST_ENTRIES, shown

MOST_BYTES = 2**30
"""An array of recorded counts has at most so many bytes, unpacked."""

MOST_LAYERS = 2**17
"""A trace has at most so many layers, of all steps together: 1000 steps of a model with 131 layers."""

OTHERS = (".pt", ".jsonl")
"""How names of recordings end that `convert` reads."""

NAMES_SHOWN = 3
"""A message lists so many arrays of a file that lacks the wanted one."""


class Trace(NamedTuple):
    """A trace holds the counts of several steps.

    Args:
        steps: the number of each step, as the training run called it.
        counts: `[steps, layers, R, E]` int32, the token copies that each rank routed to each expert.
    """

    steps: list[int]
    counts: Int[np.ndarray, "steps layers R E"]


def read_counts(path: Path) -> Int[np.ndarray, "layers R E"]:
    """Reads the counts of one step, `[R, E]` or `[layers, R, E]`.

    Args:
        path: an .npy file of integers, or an .npz file with an array `counts`.

    Returns:
        `[layers, R, E]` int32, with one layer where the file has no such dimension.

    Raises:
        ValueError: the file cannot be read, or no plan can be made from what it holds.
    """
    counts = _load("COUNTS", path)["counts"]
    if counts.ndim not in (2, 3):
        raise ValueError(f"COUNTS {path}: counts has shape {counts.shape}; expected [R, E] or [layers, R, E]")
    return checked("COUNTS", path, counts.reshape(-1, *counts.shape[-2:]) if counts.size else counts)


def read_trace(path: Path) -> Trace:
    """Reads the counts of several steps, `[steps, layers, R, E]`, and their numbers where the file has them.

    Args:
        path: an .npy file of integers, or an .npz file with `counts` and perhaps `steps`, as `models.train` writes it.

    Raises:
        ValueError: the file cannot be read, or no plan can be made from what it holds.
    """
    arrays = _load("TRACE", path)
    counts = arrays["counts"]
    if counts.ndim != 4:
        raise ValueError(f"TRACE {path}: counts has shape {counts.shape}; expected [steps, layers, R, E]")
    steps = arrays.get("steps", np.arange(len(counts)))
    if steps.shape != counts.shape[:1] or not np.issubdtype(steps.dtype, np.integer):
        raise ValueError(
            f"TRACE {path}: steps has shape {steps.shape} and dtype {steps.dtype}; "
            f"expected an integer for each of the {len(counts)} steps of counts"
        )
    return Trace(steps.tolist(), checked("TRACE", path, counts))


def read_routing(path: Path) -> Int[np.ndarray, "steps layers R E"]:
    """Reads the counts of one step, `[R, E]` or `[layers, R, E]`, or of several, `[steps, layers, R, E]`.

    Args:
        path: an .npy file of integers, or an .npz file with an array `counts`.

    Returns:
        `[steps, layers, R, E]` int32, with one step or layer where the file has no such dimension.

    Raises:
        ValueError: the file cannot be read, or no plan can be made from what it holds.
    """
    counts = _load("--trace", path)["counts"]
    if counts.ndim not in (2, 3, 4):
        raise ValueError(
            f"--trace {path}: counts has shape {counts.shape}; expected [R, E], [layers, R, E] or [steps, layers, R, E]"
        )
    wide = counts.reshape((1,) * (4 - counts.ndim) + counts.shape)
    return checked("--trace", path, wide)


def write_plans(path: Path, plans: Sequence[Plan], leading_shape: tuple[int, ...]) -> None:
    """Writes plans as one file, which `Plan.load` reads as one plan with leading dimensions.

    Args:
        path: the file.
        plans: as NumPy arrays, all of one balancer, in row-major order of the leading dimensions.
        leading_shape: the leading dimensions: `(layers,)` or `(steps, layers)`.

    Raises:
        ValueError: the file cannot be written.
    """
    stacked: Plan = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*leading_shape, *leaves[0].shape), *plans)
    with naming("--out", path):
        stacked.save(path)


@contextmanager
def naming(argument: str, path: Path) -> Iterator[None]:
    """Gives errors of writing a file the name of the argument; that of a full disk does not even name the file.

    Args:
        argument: the argument, for the message.
        path: the file that is written.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{argument} is {path}: {reason}; expected a file that can be written") from error


def _load(argument: str, path: Path) -> dict[str, np.ndarray]:
    """Reads `counts` and, if it is there, `steps` of an npz, or the array of an npy under the name `counts`."""
    if path.suffix in OTHERS:
        raise ValueError(
            f"{argument} is {path}; expected a .npy or .npz file: jax-moe-lb convert makes one of recordings of SGLang "
            f"and Megatron-LM"
        )
    try:
        arrays, names = read_named(path, ("counts", "steps"), MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{argument} is {path}: {error.strerror or error}; expected a .npy or .npz file") from error
    except LimitError as error:
        raise ValueError(f"{argument} is {path}: {error}, in a .npy or .npz file") from error
    except Exception as error:  # a damaged file makes NumPy and zipfile raise nearly anything
        raise ValueError(
            f"{argument} is {path}: damaged, or no NumPy file of numbers; expected .npy or .npz"
        ) from error
    if "counts" not in arrays:
        raise ValueError(f"{argument} is {path}, which holds {_listed(names)}; expected an array called 'counts'")
    return arrays


def _listed(names: list[str]) -> str:
    """Lists names in a message, which ends after the first few."""
    first = ", ".join(map(shown, names[:NAMES_SHOWN]))
    return f"[{first}]" if len(names) <= NAMES_SHOWN else f"[{first}, and {len(names) - NAMES_SHOWN} more]"


def checked(argument: str, path: Path, counts: np.ndarray) -> Int[np.ndarray, "... R E"]:
    """Makes the counts int32, planning's integer type, if every layer of every step can be planned for.

    Args:
        argument: what the command line calls the file.
        path: the file.
        counts: `[..., R, E]` integers.

    Raises:
        ValueError: they cannot; the line names the file and the layer.
    """
    if counts.size == 0:
        raise ValueError(f"{argument} {path}: counts has shape {counts.shape}; expected no empty dimension")
    if math.prod(counts.shape[:-2]) > MOST_LAYERS or math.prod(counts.shape[-2:]) > MOST_ENTRIES:
        raise ValueError(
            f"{argument} {path}: counts has shape {counts.shape}; expected at most {MOST_LAYERS} layers of all steps "
            f"together and {MOST_ENTRIES} entries of each"
        )
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

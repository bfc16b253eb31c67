"""A plan in a file: an .npz archive of named arrays, which is written whole and checked when it is read."""

import io
import os
import secrets
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jax_moe_lb.split import Tier

ARRAYS = ("placement", "quota", "relay", "rails")
"""The fields of a plan that are arrays; a file lacks those that are `None`."""

_SETTINGS = {
    "domain": (np.integer, "an integer"),
    "split_tier": (np.str_, "a word"),
    "split_locality": (np.bool_, "a bool"),
}
"""A file of a plan also holds these, each without dimensions; beside them stand dtype, and dtype in words."""


def write_arrays(path: Path, parts: dict[str, Any]) -> None:
    """Writes what a plan consists of, by the names in `ARRAYS` and `_SETTINGS`.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    # NumPy's stub takes every keyword for an option, so the dict is untyped.
    arrays: dict[str, Any] = {name: np.asarray(part) for name, part in parts.items()}
    np.savez_compressed(buffer, **arrays)
    _write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote, with the dtypes and shapes of a plan.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or holds no plan; the message names the file and what is wrong in it.
    """
    arrays = _arrays_of(path, path.read_bytes())
    _check_arrays(path, arrays)
    return arrays


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is never seen half written."""
    if path.exists() and not path.is_file():
        # A device or a pipe must not be replaced by a file, and for a folder this raises what is wrong.
        path.write_bytes(content)
        return
    path = path.resolve()  # so that a link stays one, and what it points to is replaced
    # Only inside one file system is a rename atomic: the temporary file lies beside the final one.
    part = path.with_name(f".plan-{secrets.token_hex(8)}.tmp")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            # Without it a crash of the machine could leave the name with an empty file behind it.
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _arrays_of(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """Reads the known arrays of an .npz file, unchecked; names that nobody knows are left out."""
    try:
        # Pickles run code of whoever wrote them: a file of a stranger must not.
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        known = (*ARRAYS, *_SETTINGS)
        found = {} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in known if name in loaded}
    except Exception as error:  # a damaged file makes NumPy and zipfile raise nearly anything
        raise ValueError(f"{path}: damaged, or no .npz file of numbers; expected one that Plan.save wrote") from error
    for name in ("placement", "quota", *_SETTINGS):
        if name not in found:
            raise ValueError(f"{path}: {name} is missing; expected a file that Plan.save wrote")
    return found


def _check_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Refuses dtypes and shapes that no plan has."""
    for name, (kind, wanted) in _SETTINGS.items():
        if arrays[name].ndim or not np.issubdtype(arrays[name].dtype, kind):
            raise ValueError(f"{path}: {name} is {_described(arrays[name])}; expected {wanted} without dimensions")
    if str(arrays["split_tier"]) not in get_args(Tier):
        tiers = " or ".join(map(repr, get_args(Tier)))
        raise ValueError(f"{path}: split_tier is {str(arrays['split_tier'])!r}; expected {tiers}")
    for name in ARRAYS:
        if name in arrays and not np.issubdtype(arrays[name].dtype, np.integer):
            raise ValueError(f"{path}: {name} is {_described(arrays[name])}; expected integers")
    if arrays["placement"].ndim < 2:
        raise ValueError(f"{path}: placement is {_described(arrays['placement'])}; expected [..., R, S]")
    *leading, num_ranks, slots = arrays["placement"].shape
    # E is the one size that placement does not say.
    num_experts = arrays["quota"].shape[-2] if arrays["quota"].ndim > 1 else 0
    num_rails = arrays["rails"].shape[-1] if "rails" in arrays and arrays["rails"].ndim else 0
    shapes = {
        "quota": (num_experts, num_ranks),
        "relay": (num_ranks, slots),
        "rails": (num_ranks, num_ranks, num_rails),
    }
    words = {"quota": "[..., E, R]", "relay": "[..., R, S]", "rails": "[..., R, R, N]"}
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != (*leading, *shape):
            raise ValueError(
                f"{path}: {name} is {_described(arrays[name])}; expected {words[name]} "
                f"beside placement {list(arrays['placement'].shape)}"
            )


def _described(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"

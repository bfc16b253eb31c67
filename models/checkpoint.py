"""Checkpoints hold parameters, optimizer, balancer state and biases of a run, but no replica, which is no state."""

import hashlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from models.files import naming, write_whole

NUM_KEPT = 2
"""Should the newest checkpoint be damaged, there is one before it."""

CHECKSUMS = "sha256.json"


class Checkpoints:
    """`Checkpoints` keeps the newest checkpoints in a folder; it is a context that closes them.

    Args:
        folder: the folder, which is made when it is missing.
    """

    def __init__(self, folder: Path) -> None:
        _keep_quiet()
        self.folder = folder.absolute()
        # Written before training goes on: the step after may consume the arrays. What a killed run began is removed.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=NUM_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.close()

    @property
    def newest_step(self) -> int | None:
        """Finds the step of the newest checkpoint, `None` if there is none."""
        return self.manager.latest_step()

    def save(self, step: int, state: nnx.State) -> None:
        """Writes the state after `step` steps and the checksums of its files, unless it is there already.

        Args:
            step: how many steps the run has done.
            state: the whole state of the run.

        Raises:
            OSError: it cannot be written; the error names the folder. Checkpoints of earlier steps stay whole.
        """
        if step == self.newest_step:
            return
        with naming(self.folder), _system_errors():
            self.manager.save(step, args=ocp.args.StandardSave(_named(state)))
        if jax.process_index() == 0:
            checkpoint = self.folder / str(step)
            write_whole(checkpoint / CHECKSUMS, json.dumps(_checksums(checkpoint), indent=2).encode())

    def restore(self, step: int, shapes: nnx.State) -> nnx.State:
        """Reads the state after `step` steps.

        Args:
            step: the step of a checkpoint.
            shapes: shapes and shardings of the state, which say where it is placed.

        Raises:
            ValueError: it is the state of another model.
        """
        named = self.manager.restore(step, args=ocp.args.StandardRestore(_named(shapes)))
        return jax.tree.unflatten(jax.tree.structure(shapes), list(map(named.__getitem__, _named(shapes))))


def _keep_quiet() -> None:
    """Keeps off stderr what Orbax and TensorStore print about errors, pages of it; they raise them too."""
    # Orbax also warns of its own future, at every start.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _tell_unraisable:
        sys.unraisablehook = partial(_tell_unraisable, sys.unraisablehook)


def _tell_unraisable(before: Callable[[Any], None], unraisable: Any) -> None:
    # After one file has failed, threads of TensorStore tell of the others a loop that has ended.
    if str(unraisable.exc_value) != "Event loop is closed":
        before(unraisable)


@contextmanager
def _system_errors() -> Iterator[None]:
    """Makes errors of the system out of those of TensorStore, which are of another type and name the system's code."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def steps_in(folder: Path) -> list[int]:
    """Lists the steps of the checkpoints in a folder, the newest first; a checkpoint is there once it is complete."""
    return sorted((int(path.name) for path in folder.glob("*") if path.name.isdigit()), reverse=True)


def restore_newest(folder: Path, shapes: nnx.State, tell: Callable[[str], None]) -> tuple[int, nnx.State]:
    """Reads the newest checkpoint whose files are as they were written; returns its step and its state.

    Args:
        folder: the folder of the checkpoints.
        shapes: shapes and shardings of the state.
        tell: is called with a line about each checkpoint that is passed over, or that cannot be compared.

    Raises:
        ValueError: there is none, or it is the state of another model.
    """
    with Checkpoints(folder) as checkpoints:
        for step in steps_in(folder):
            problem = _damage(folder / str(step))
            # Processes may not restore different steps.
            if bool(multihost_utils.broadcast_one_to_all(np.bool_(problem is None))):
                try:
                    return step, checkpoints.restore(step, shapes)
                except Exception as error:
                    # What was compared is the state of another model; what could not be may be anything.
                    if (folder / str(step) / CHECKSUMS).exists() or jax.process_count() > 1:
                        raise
                    problem = str(error).partition("\n")[0]
            tell(f"the checkpoint of step {step} in {str(folder)!r} is damaged: {problem}")
    raise ValueError(f"resume is set, but every checkpoint in {str(folder)!r} is damaged; expected one that is whole")


def _damage(checkpoint: Path) -> str | None:
    """Says what is wrong with the files of a checkpoint, and `None` if they are as they were written."""
    manifest = checkpoint / CHECKSUMS
    try:
        expected, found = dict(json.loads(manifest.read_bytes())), _checksums(checkpoint)
    except FileNotFoundError:
        # The run was killed between the two, or is older than checksums are. The checkpoint itself is complete.
        return None
    except (OSError, TypeError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    differing = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f"{differing[0]} is not as it was written" if differing else None


def _checksums(checkpoint: Path) -> dict[str, str]:
    """Computes the SHA-256 of each file of a checkpoint, by its path in it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(checkpoint))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _named(state: nnx.State) -> dict[str, jax.Array]:
    """Names leaves by their path, for a file that does not depend on how Flax nests them."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

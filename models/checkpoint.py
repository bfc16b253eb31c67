"""Checkpoints hold parameters, optimizer, balancer state and biases of a run, but no replica, which is no state."""

import logging
from pathlib import Path
from types import TracebackType

import jax
import orbax.checkpoint as ocp
from flax import nnx

NUM_KEPT = 2


class Checkpoints:
    """`Checkpoints` keeps the newest checkpoints in a folder; it is a context that closes them.

    Args:
        folder: the folder, which is made when it is missing.
    """

    def __init__(self, folder: Path) -> None:
        # Orbax warns of its own future, at every start.
        logging.getLogger("absl").setLevel(logging.ERROR)
        # Written before training goes on: the step after may consume the arrays.
        options = ocp.CheckpointManagerOptions(max_to_keep=NUM_KEPT, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

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
        """Writes the state after `step` steps, unless it is there already.

        Args:
            step: how many steps the run has done.
            state: the whole state of the run.
        """
        if step != self.newest_step:
            self.manager.save(step, args=ocp.args.StandardSave(_named(state)))

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


def _named(state: nnx.State) -> dict[str, jax.Array]:
    """Names leaves by their path, for a file that does not depend on how Flax nests them."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

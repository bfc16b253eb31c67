"""Checkpoints of parameters, optimizer, balancer state and biases; replicas are not state.

They are written while the next steps run. A checkpoint has four items, each of which another mesh or system may restore
or skip: `state`, which fits any of them; `homes`, the places of experts of a run that relocates; `mesh`, the balancer
state of one mesh; and `run`, JSON with the layout of the run and the position of its data. Errors of Orbax and
TensorStore are reported once, as the operating system words them.
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from jax_moe_lb.nn.moe import ExpertHomes, RunningLoads
from jax_moe_lb.nn.relocation import OF_ONE_MESH
from models.config import CheckpointConfig
from models.run_folder.files import damage, has_checksums, naming, write_checksums


def keep_quiet() -> None:
    """Keep off stderr what Orbax and TensorStore print about errors, pages of it; they raise them too."""
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
def system_errors() -> Iterator[None]:
    """Make errors of the system out of those of TensorStore, which are of another type and name the system's code.

    Raises:
        OSError: the system refused a file; its number is that of the system.
    """
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


ITEMS = ("state", "homes", "mesh")
"""Items of arrays. The last two begin anew where they are not there or do not fit."""

ArraysByName = dict[str, Any]


class CheckpointMetadata(NamedTuple):
    """What a checkpoint says about its run, in JSON.

    Args:
        layout: the ranks and the system; what belongs to one mesh fits where they are the same.
        data: the position of the data, as its iterator gives it.
    """

    layout: dict[str, Any]
    data: dict[str, Any]


def preservation_policy(config: CheckpointConfig) -> managers.PreservationPolicy:
    """Return the retention of checkpoints as Orbax has it."""
    newest = managers.LatestN(n=config.keep)
    if config.keep_every_s is None:
        return newest
    return managers.AnyPreservationPolicy([newest, managers.EveryNSeconds(interval_secs=config.keep_every_s)])


class Checkpoints:
    """`Checkpoints` keeps the newest checkpoints in a folder; it is a context that waits for the last of them.

    Args:
        folder: the folder, which is made when it is missing.
        config: the checkpoints to keep.
    """

    def __init__(self, folder: Path, config: CheckpointConfig = CheckpointConfig()) -> None:
        keep_quiet()
        self.folder = folder.absolute()
        # What a killed run began is removed.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy(config), cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options, item_names=(*ITEMS, "run"))
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.written: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Whoever ends because of another error hears of that one.
            with suppress(*([Exception] if error else [])):
                self.wait()
        finally:
            self.thread.shutdown()
            # What went wrong is told already.
            with suppress(Exception):
                self.manager.close()

    @property
    def newest_step(self) -> int | None:
        """Find the step of the newest checkpoint, `None` if there is none; it may still be under way."""
        return self.manager.latest_step()

    def save(
        self,
        step: int,
        state: nnx.State,
        kept: CheckpointMetadata = CheckpointMetadata({}, {}),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write the state after `step` steps, unless it is there already; waits for the one before.

        When it returns the arrays are copied, and the step after may consume them.

        Args:
            step: how many steps the run has done.
            state: the whole state of the run.
            kept: what else has to be known to go on.
            then: is called in another thread when the checkpoint is complete.

        Raises:
            OSError: this one or the one before cannot be written; the error names the folder. Checkpoints of earlier
                steps stay whole.
        """
        if step == self.newest_step:
            return
        self.wait()
        arrays = {item: ocp.args.StandardSave(part) for item, part in parts(state).items() if part}
        with naming(self.folder), system_errors():
            self.manager.save(step, args=ocp.args.Composite(**arrays, run=ocp.args.JsonSave(kept._asdict())))
        self.written = self.thread.submit(self._complete, step, then)

    def _complete(self, step: int, then: Callable[[], None] | None) -> None:
        """Wait until a checkpoint is written, then adds its checksums, in a thread."""
        with naming(self.folder), system_errors():
            self.manager.wait_until_finished()
            if then is not None:
                then()
            if jax.process_index() == 0:
                write_checksums(self.folder / str(step))

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did so far; does not wait.

        Raises:
            OSError: the newest checkpoint could not be written.
        """
        if self.written is not None and self.written.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the newest checkpoint is written.

        Raises:
            OSError: it could not be written.
        """
        written, self.written = self.written, None
        if written is not None:
            written.result()

    def read_kept(self, step: int) -> CheckpointMetadata:
        """Read what the checkpoint of `step` says about its run.

        Raises:
            ValueError: there is nothing of the kind in it, as in those of older versions.
        """
        if not (self.folder / str(step) / "run").exists():
            where = f"the checkpoint of step {step} in {str(self.folder)!r}"
            raise ValueError(f"{where} is of an older version; expected one with an item 'run'")
        return CheckpointMetadata(
            **self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        )

    def restore(
        self, step: int, shapes: nnx.State, init: Callable[[], nnx.State] | None = None, *, same_mesh: bool = True
    ) -> nnx.State:
        """Read the state after `step` steps.

        Args:
            step: the step of a checkpoint.
            shapes: shapes and shardings of the state, which say where it is placed; the mesh may be another than that
                of the checkpoint.
            init: makes a state to take from what is not in the checkpoint, or does not fit; `None` if all is there.
            same_mesh: whether what belongs to the mesh and system of the checkpoint fits.

        Raises:
            ValueError: it is the state of another model.
        """
        wanted = parts(shapes)
        fits = [item for item in ITEMS if wanted[item] and (self.folder / str(step) / item).exists()]
        fits = [item for item in fits if item != "mesh" or same_mesh]
        missing = [name for item in ITEMS if item not in fits for name in wanted[item]]
        if missing and init is None:
            raise ValueError(f"the checkpoint of step {step} in {str(self.folder)!r} lacks {missing[0]}")
        named = _only(missing, init()) if missing and init else {}
        arrays = {item: ocp.args.StandardRestore(wanted[item]) for item in fits}
        restored = self.manager.restore(step, args=ocp.args.Composite(**arrays))
        for item in fits:
            named |= restored[item]
        return jax.tree.unflatten(jax.tree.structure(shapes), [named[name] for name, _ in _named(shapes)])


def steps_in(folder: Path) -> list[int]:
    """List the steps of the checkpoints in a folder, the newest first; a checkpoint is there once it is complete."""
    return sorted((int(path.name) for path in folder.glob("*") if path.name.isdigit()), reverse=True)


def restore_newest(
    folder: Path,
    shapes: nnx.State,
    tell: Callable[[str], None],
    init: Callable[[], nnx.State] | None = None,
    layout: dict[str, Any] | None = None,
) -> tuple[int, nnx.State, CheckpointMetadata]:
    """Read the newest checkpoint whose files are as they were written; returns its step, its state and the rest.

    Args:
        folder: the folder of the checkpoints.
        shapes: shapes and shardings of the state.
        tell: is called with a line about each checkpoint that is passed over, or that cannot be compared.
        init: see `Checkpoints.restore`.
        layout: the ranks and the system of this run, to be compared with those of the checkpoint; `None` if they are
            the same.

    Raises:
        ValueError: there is none, or it is the state of another model.
    """
    with Checkpoints(folder) as checkpoints:
        for step in steps_in(folder):
            problem = damage(folder / str(step))
            # Processes may not restore different steps.
            if bool(multihost_utils.broadcast_one_to_all(np.bool_(problem is None))):
                try:
                    kept = checkpoints.read_kept(step)
                    same_mesh = layout is None or layout == kept.layout
                    return step, checkpoints.restore(step, shapes, init, same_mesh=same_mesh), kept
                except Exception as error:
                    # What was compared is the state of another model; what could not be may be anything.
                    if has_checksums(folder / str(step)) or jax.process_count() > 1:
                        raise
                    problem = str(error).partition("\n")[0]
            tell(f"the checkpoint of step {step} in {str(folder)!r} is damaged: {problem}")
    raise ValueError(f"resume is set, but every checkpoint in {str(folder)!r} is damaged; expected one that is whole")


def without_homes(shapes: nnx.State, state: nnx.State, init: Callable[[], nnx.State]) -> nnx.State:
    """Take what any mesh may take over from a state whose experts are all at their first places.

    Args:
        shapes: shapes of the state that is returned, which has no homes.
        state: the state of the same model, of a run that relocates.
        init: makes the rest.
    """
    named = parts(state)["state"]
    missing = [name for name, _ in _named(shapes) if name not in named]
    named |= _only(missing, init()) if missing else {}
    return jax.tree.unflatten(jax.tree.structure(shapes), [named[name] for name, _ in _named(shapes)])


def _only(names: list[str], state: nnx.State) -> ArraysByName:
    named = dict(_named(state))
    return {name: named[name] for name in names}


def parts(state: nnx.State) -> dict[str, ArraysByName]:
    """Split a state into the items of a checkpoint, each with its leaves by name."""
    found: dict[str, ArraysByName] = {item: {} for item in ITEMS}
    for (name, leaf), item in zip(_named(state), _items(state), strict=True):
        found[item][name] = leaf
    return found


def _items(state: nnx.State) -> list[str]:
    """Says in which item each leaf is, in their order."""
    items = []
    for variable in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        item = "state"
        if isinstance(variable, OF_ONE_MESH):
            item = "mesh"
        elif isinstance(variable, ExpertHomes | RunningLoads):
            item = "homes"
        items += [item] * len(jax.tree.leaves(variable))
    return items


def _named(state: nnx.State) -> list[tuple[str, Any]]:
    """Name leaves by their path, for a file that does not depend on how Flax nests them."""
    leaves = jax.tree.leaves_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]

"""Checkpoints of parameters, optimizer, balancer state and biases, without replicas.

They are written asynchronously. A checkpoint has four items, and another mesh or system may restore or skip each.
`state` fits any mesh. `homes` has the places of relocated experts. `mesh` has balancer state specific to one mesh.
`run` is JSON with the layout of the run, the position of its data, and the record of step and run. Errors of Orbax and
TensorStore are reported once, with the message of the operating system.
"""

import inspect
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from jax_moe_lb.core import FileLimits
from jax_moe_lb.nn.relocation import OF_ONE_MESH
from jax_moe_lb.nn.variables import ExpertHomes, RunningLoads
from models.config import CheckpointConfig
from models.decoder.layers import Adapter
from models.run_folder.checkpoint_limits import check_arrays, check_texts
from models.run_folder.files import RECORD, damage, has_checksums, is_number, misplacement, naming, write_checksums


def keep_quiet() -> None:
    """Silence the error output of Orbax and TensorStore on stderr; both also raise the errors."""
    # Orbax also prints deprecation warnings at every start.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _tell_unraisable:
        sys.unraisablehook = partial(_tell_unraisable, sys.unraisablehook)


def _tell_unraisable(before: Callable[[Any], None], unraisable: Any) -> None:
    # After one file has failed, Orbax drops the coroutines of the others, and TensorStore threads report errors to a
    # closed event loop. This program has no coroutines of its own.
    if not inspect.iscoroutine(unraisable.object) and str(unraisable.exc_value) != "Event loop is closed":
        before(unraisable)


@contextmanager
def system_errors() -> Iterator[None]:
    """Convert TensorStore errors with the system's error code into `OSError`, and shorten others to one line."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        # Orbax wraps some of them.
        code = re.search(r"os_error_code='(\d+)'", f"{error} {error.__cause__}")
        if code is not None:
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        if "\n" not in str(error):
            raise
        # The further lines describe the array.
        raise ValueError(str(error.__cause__ or error).partition("\n")[0]) from error


# Items containing arrays. The last two are reinitialized if they are absent or do not fit.
ITEMS = ("state", "homes", "mesh")

# Part of a state outside of its checkpoints: parameters frozen beside adapters, which are those of the base.
BASE = "base"

ArraysByName = dict[str, Any]


class CheckpointMetadata(NamedTuple):
    """JSON metadata of a checkpoint."""

    layout: dict[str, Any]  # ranks and system of the run; state specific to a mesh fits if the layout is the same
    data: dict[str, Any]  # position of the data, returned by its iterator
    # Folder or name of the checkpoint with the frozen parameters of a run with adapters; "" without adapters
    base: str = ""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Manager of the newest checkpoints in a folder, and a context manager waiting for the last write."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig = CheckpointConfig(),
        limits: FileLimits = FileLimits(),
        run_id: str = "",
    ) -> None:
        keep_quiet()
        self.folder, self.limits, self.run_id = folder.absolute(), limits, run_id
        # The manager may read metadata of any checkpoint.
        for step in steps_in(self.folder):
            check_texts(self.folder / str(step), limits)
        policy: managers.PreservationPolicy = managers.LatestN(n=config.keep)
        if config.keep_every_s is not None:
            every = managers.EveryNSeconds(interval_secs=config.keep_every_s)
            policy = managers.AnyPreservationPolicy([policy, every])
        # Remove incomplete checkpoints of a killed run.
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options, item_names=(*ITEMS, "run"))
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.written: Future[None] | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # Keep the original error if the context ends with one.
            with suppress(*([Exception] if error else [])):
                self.wait()
        finally:
            self.thread.shutdown()
            # The errors of the manager have been raised before.
            with suppress(Exception):
                self.manager.close()

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint, `None` if there is none; it may be incomplete."""
        return self.manager.latest_step()

    def save(
        self,
        step: int,
        state: nnx.State,
        kept: CheckpointMetadata = CheckpointMetadata({}, {}),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Wait for the previous checkpoint, and start writing the state after `step` steps unless it is saved."""
        # On return the arrays are copied, so the next step may donate them.
        if step == self.newest_step:
            return
        self.wait()
        arrays = {item: ocp.args.StandardSave(part) for item, part in parts(state).items() if part and item != BASE}
        record = dict(zip(RECORD, (step, self.run_id), strict=True))
        with naming(self.folder), system_errors():
            self.manager.save(step, args=ocp.args.Composite(**arrays, run=ocp.args.JsonSave(kept._asdict() | record)))
        self.written = self.thread.submit(self._complete, step, then)

    def _complete(self, step: int, then: Callable[[], None] | None) -> None:
        """Wait until a checkpoint is written, then add its checksums, in a thread."""
        with naming(self.folder), system_errors():
            self.manager.wait_until_finished()
            if then is not None:
                then()
            if jax.process_index() == 0:
                write_checksums(self.folder / str(step))

    def check(self) -> None:
        """Raise a background error, if there is one, without waiting."""
        if self.written is not None and self.written.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the newest checkpoint is written."""
        written, self.written = self.written, None
        if written is not None:
            written.result()

    def read_kept(self, step: int) -> CheckpointMetadata:
        """Return the metadata of the checkpoint of `step`."""
        with naming(self.folder / str(step)), system_errors():
            found = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        return CheckpointMetadata(**{name: value for name, value in found.items() if name not in RECORD})

    def restore(
        self, step: int, shapes: nnx.State, init: Callable[[], nnx.State] | None = None, *, same_mesh: bool = True
    ) -> nnx.State:
        """Read the state after `step` steps."""
        wanted = parts(shapes)
        fits = [item for item in ITEMS if wanted[item] and (self.folder / str(step) / item).exists()]
        fits = [item for item in fits if item != "mesh" or same_mesh]
        missing = [name for item in (*ITEMS, BASE) if item not in fits for name in wanted[item]]
        if missing and init is None:
            raise ValueError(f"the checkpoint of step {step} in {str(self.folder)!r} lacks {missing[0]}")
        named = _only(missing, init()) if missing and init else {}
        arrays = {item: ocp.args.StandardRestore(wanted[item]) for item in fits}
        with naming(self.folder / str(step)), system_errors():
            for item in fits:
                check_arrays(self.folder / str(step) / item, wanted[item], self.limits)
            restored = self.manager.restore(step, args=ocp.args.Composite(**arrays))
        for item in fits:
            named |= restored[item]
        return jax.tree.unflatten(jax.tree.structure(shapes), [named[name] for name, _ in _named(shapes)])


def remove_incomplete(folder: Path) -> None:
    """Remove the checkpoints that a killed run did not complete."""
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, newest first."""
    return sorted((int(path.name) for path in folder.glob("*") if is_number(path.name)), reverse=True)


def restore_newest(
    folder: Path,
    shapes: nnx.State,
    tell: Callable[[str], None],
    init: Callable[[], nnx.State] | None = None,
    layout: dict[str, Any] | None = None,
    limits: FileLimits = FileLimits(),
    run_id: str | None = None,
    moved: Callable[[], nnx.State] | None = None,
) -> tuple[int, nnx.State, CheckpointMetadata]:
    """Restore the newest intact checkpoint; return its step, state and metadata."""
    # `moved` returns the shapes of a checkpoint with relocated experts, if they are not `shapes`.
    # A checkpoint saved at another step or by another run is damaged.
    with Checkpoints(folder, limits=limits) as checkpoints:
        for step in steps_in(folder):
            problem = damage(folder / str(step), limits) or misplacement(folder / str(step), run_id, limits)
            # All processes must restore the same step.
            if bool(multihost_utils.broadcast_one_to_all(np.bool_(problem is None))):
                try:
                    kept = checkpoints.read_kept(step)
                    same_mesh = layout is None or layout == kept.layout
                    has_homes = (folder / str(step) / "homes").exists()
                    wanted = moved() if moved is not None and has_homes else shapes
                    return step, checkpoints.restore(step, wanted, init, same_mesh=same_mesh), kept
                except Exception as error:
                    # With matching checksums, the state belongs to another model; without checksums, the files may be
                    # damaged.
                    if has_checksums(folder / str(step)) or jax.process_count() > 1:
                        raise
                    problem = str(error).partition("\n")[0]
            tell(f"the checkpoint of step {step} in {str(folder)!r} is damaged: {problem}")
    raise ValueError(f"resume is set, but every checkpoint in {str(folder)!r} is damaged; expected an intact one")


def without_homes(shapes: nnx.State, state: nnx.State, init: Callable[[], nnx.State]) -> nnx.State:
    """Return the mesh-independent part of a state whose experts are at their initial places."""
    named = parts(state)["state"]
    missing = [name for name, _ in _named(shapes) if name not in named]
    named |= _only(missing, init()) if missing else {}
    return jax.tree.unflatten(jax.tree.structure(shapes), [named[name] for name, _ in _named(shapes)])


def _only(names: list[str], state: nnx.State) -> ArraysByName:
    named = dict(_named(state))
    return {name: named[name] for name in names}


def parts(state: nnx.State) -> dict[str, ArraysByName]:
    """Split a state into the items of a checkpoint, each with its leaves by name."""
    found: dict[str, ArraysByName] = {item: {} for item in (*ITEMS, BASE)}
    for (name, leaf), item in zip(_named(state), _items(state), strict=True):
        found[item][name] = leaf
    return found


def _items(state: nnx.State) -> list[str]:
    """Return the item of each leaf, in leaf order."""
    items, variables = [], jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    has_adapters = any(isinstance(variable, Adapter) for variable in variables)
    for variable in variables:
        item = "state"
        if has_adapters and isinstance(variable, nnx.Param) and not isinstance(variable, Adapter):
            item = BASE
        if isinstance(variable, OF_ONE_MESH):
            item = "mesh"
        elif isinstance(variable, ExpertHomes | RunningLoads):
            item = "homes"
        items += [item] * len(jax.tree.leaves(variable))
    return items


def _named(state: nnx.State) -> list[tuple[str, Any]]:
    """Return the leaves by path, so that file names do not depend on the nesting in Flax."""
    leaves = jax.tree.leaves_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]

"""Marks of work that may end its process or never end, such as a new kernel: no later process tries it."""

import faulthandler
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp

FOLDER = Path(__file__).parents[2] / "build" / "gpu-kit" / "running"

LOAD = "load"
"""Start of the names of loads, which have no limit of their own."""

STUCK_S = 15.0
"""Seconds after which a kernel counts as stuck. Its first call may compile it."""


class EndedBefore(RuntimeError):
    """Work during which an earlier process ended."""


@contextmanager
def marked(work: str) -> Iterator[None]:
    """Refuse work during which an earlier process ended; an exception leaves no mark."""
    mark = FOLDER / re.sub(r"\W+", "-", work)
    if mark.exists():
        raise EndedBefore(f"a process ended during: {work}")
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(work)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


@contextmanager
def guarded(work: str) -> Iterator[None]:
    """Run work on the device that is marked; end the process if it takes too long or if the device fails."""
    with marked(work):
        faulthandler.dump_traceback_later(STUCK_S, exit=True, file=sys.__stderr__)
        try:
            yield
        except Exception as error:
            if not _device_works():
                # After an illegal access, all calls of the process fail. The mark remains.
                print(f"{work}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def _device_works() -> bool:
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except jax.errors.JaxRuntimeError:
        return False


def marks() -> frozenset[str]:
    """Return the names of marks: of work that is running, or during which a process ended."""
    return frozenset(path.name for path in FOLDER.glob("*"))


def forget(names: Iterable[str] | None = None) -> None:
    """Remove marks, by default all, as before the processes of a run start."""
    for name in marks() if names is None else names:
        (FOLDER / name).unlink(missing_ok=True)

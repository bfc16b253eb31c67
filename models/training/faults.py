"""Faults and interruptions of a run.

`StepRunner` repeats steps whose plan needs more rounds than the program has. A fault of a step ends the run before the
next checkpoint. A `StopRequest` ends it in order after an interrupt or a termination signal.
"""

import math
import os
import signal
from collections.abc import Callable
from threading import Thread
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb import Stats, raise_on_fault
from jax_moe_lb.core import needs_more_rounds
from models.config import UserError

StepResult = Callable[[nnx.State, Array], tuple[nnx.State, Array, Stats]]


class StepRunner:
    """`StepRunner` waits for each step, which also keeps the devices from being flooded with executions.

    Args:
        step: the program of a step.
        step_again: does a step that needs more rounds; `None` where `step` has all. It is compiled when it is first
            needed.
        tell: is called with a line when that is.
    """

    def __init__(self, step: StepResult, step_again: StepResult | None, tell: Callable[[str], None]) -> None:
        self.step, self.step_again, self.tell = step, step_again, tell
        self.num_again = 0

    def __call__(self, number: int, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        """Does one step; loss and statistics are on the host.

        Args:
            number: the number of the step, from 1.
            state: is consumed.
            tokens: the batch.
        """
        state, loss, stats = _done(self.step, state, tokens)
        # All processes have the same statistics, so that all of them do it again.
        if self.step_again is None or not needs_more_rounds(stats):
            return state, loss, stats
        self.num_again += 1
        if self.num_again == 1:
            self.tell(
                f"step {number} needs {np.max(stats.fault.rounds)} rounds, more than max_rounds: it is done again, as "
                "others will be that do, by a second program, which is compiled now"
            )
        return _done(self.step_again, state, tokens)


def _done(program: StepResult, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
    state, loss, stats = program(state, tokens)
    return state, *jax.device_get((loss, stats))


def check_step(step: int, loss: float, stats: Stats, good_step: int | None) -> None:
    """Refuse to go on after a step whose routing, plan or loss is wrong.

    Args:
        step: the number of the step, from 1.
        loss: its loss.
        stats: the statistics of the layers, `[layers, D, ...]`, on the host.
        good_step: the step of the newest checkpoint, to go on from; `None` if there is none.

    Raises:
        Refused: with step and layer, and with rank, expert and numbers where one of them is to blame.
    """
    for layer in np.flatnonzero(np.asarray(stats.fault.code).reshape(len(stats.fault.code), -1).any(1)):
        try:
            raise_on_fault(jax.tree.map(lambda leaf, i=layer: leaf[i], stats))
        except ValueError as error:
            raise UserError(f"step {step}, layer {layer + 1}: {error}{_go_on(good_step)}") from error
    if not math.isfinite(loss):
        raise UserError(f"step {step}: loss is {loss}, after layers that had finite routing{_go_on(good_step)}")


def check_state(step: int, state: nnx.State, good_step: int | None) -> None:
    """Refuse to make a checkpoint of a state that is not finite.

    Args:
        step: how many steps the run has done.
        state: the state after them.
        good_step: the step of the newest checkpoint; `None` if there is none.

    Raises:
        Refused: with the name of the first array that has such a value.
    """
    finite = jax.device_get(_all_finite(state))
    for path, good in jax.tree.leaves_with_path(finite):
        if not good:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise UserError(f"step {step}: {name} is not finite, of which no checkpoint is made{_go_on(good_step)}")


@jax.jit
def _all_finite(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)


def _go_on(good_step: int | None) -> str:
    if good_step is None:
        return "; there is no checkpoint yet"
    return f"; --resume goes on from the checkpoint of step {good_step}"


EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}
"""An interrupted command says so, as shells expect; a scheduler that terminates a run gets the checkpoint it asked
for, which is no failure."""

SIGNALLED = 128
"""A shell adds this to the number of the signal that ended a command."""


class StopRequest:
    """`StopRequest` is a context in which the first SIGINT or SIGTERM asks for an end, and the second ends at once.

    Outside the context nothing asks.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0

    def __enter__(self) -> "StopRequest":
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python's handlers wait until the main thread leaves C++, where a compilation may keep it for minutes. The
        # numbers of signals are written at once, and a thread reads them.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {number: signal.signal(number, _ignored) for number in EXIT_CODES}
        Thread(target=self._listen, args=(reader,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # The thread reads the end of the pipe, and ends.
        os.close(self._writer)

    def requested(self) -> bool:
        """Says whether to stop; all processes get the same answer, and all must ask."""
        if jax.process_count() == 1:
            self.agreed = self.received
        else:
            self.agreed = int(multihost_utils.process_allgather(np.int32(self.received)).max())
        return bool(self.agreed)

    @property
    def name(self) -> str:
        """Name the signal that asked."""
        return signal.Signals(self.agreed).name

    @property
    def exit_code(self) -> int:
        """Give the exit code of a program that was asked to stop, and 0 where none asked."""
        return EXIT_CODES.get(signal.Signals(self.agreed), 0) if self.agreed else 0

    def _listen(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while received := numbers.read(1):
                number = received[0]
                if number not in EXIT_CODES:
                    continue
                if self.received:
                    # Files are written aside and renamed, so that all are whole now too.
                    os._exit(SIGNALLED + number)
                self.received = number


def _ignored(number: int, frame: object) -> None:
    """Take the place of the default, which would end the process."""

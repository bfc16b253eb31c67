"""Faults and interruptions of a run.

`StepRunner` repeats steps whose plan needs more rounds than the program has. A fault ends the run before the next
checkpoint. A `StopRequest` ends the run in order after SIGINT or SIGTERM.
"""

import math
import os
import signal
from collections.abc import Callable
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb import Stats, raise_on_fault
from jax_moe_lb.core import needs_more_rounds
from models.console import UserError

StepResult = Callable[[nnx.State, Array], tuple[nnx.State, Array, Array, Stats]]


class StepRunner:
    """Runner of training steps, which waits for each step and so bounds the executions in flight."""

    def __init__(self, step: StepResult, step_again: StepResult | None, tell: Callable[[str], None]) -> None:
        self.step, self.step_again, self.tell = step, step_again, tell
        self.num_again = 0

    def __call__(self, number: int, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Array, Stats]:
        """Run one step; return the new state, and on the host the loss, the gradient norm and the statistics."""
        state, loss, norm, stats = _done(self.step, state, tokens)
        # All processes have the same statistics, so all of them repeat the step.
        if self.step_again is None or not needs_more_rounds(stats):
            return state, loss, norm, stats
        self.num_again += 1
        if self.num_again == 1:
            self.tell(
                f"step {number} needs {np.max(stats.fault.rounds)} rounds, more than max_rounds; compiling a "
                "second program without the limit, to repeat this step and later ones exceeding it"
            )
        return _done(self.step_again, state, tokens)


def _done(program: StepResult, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Array, Stats]:
    state, *rest = program(state, tokens)
    return state, *jax.device_get(rest)


def check_step(step: int, loss: float, stats: Stats, good_step: int | None) -> None:
    """Raise `UserError` after a step with a fault in routing or plan, or a loss that is not finite."""
    for layer in np.flatnonzero(np.asarray(stats.fault.code).reshape(len(stats.fault.code), -1).any(1)):
        try:
            raise_on_fault(jax.tree.map(lambda leaf, i=layer: leaf[i], stats))
        except ValueError as error:
            raise UserError(f"step {step}, layer {layer + 1}: {error}{_go_on(good_step)}") from error
    if not math.isfinite(loss):
        raise UserError(f"step {step}: loss is {loss}, after layers that had finite routing{_go_on(good_step)}")


def check_state(step: int, state: nnx.State, good_step: int | None) -> None:
    """Raise `UserError` if a state to be saved is not finite."""
    finite = jax.device_get(_all_finite(state))
    for path, good in jax.tree.leaves_with_path(finite):
        if not good:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise UserError(f"step {step}: {name} is not finite, so no checkpoint is written{_go_on(good_step)}")


@jax.jit
def _all_finite(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)


def _go_on(good_step: int | None) -> str:
    if good_step is None:
        return "; there is no checkpoint yet"
    return f"; --resume continues from the checkpoint of step {good_step}"


# Exit codes by signal: 130 after an interrupt, as shells expect; 0 after SIGTERM, as the checkpoint is written.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}
SIGNALLED = 128  # offset of shell exit codes of commands ended by a signal


class StopRequest:
    """Context in which the first SIGINT or SIGTERM requests a stop after the step, and the second exits at once."""

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0

    def __enter__(self) -> "StopRequest":
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python signal handlers wait until the main thread leaves C++, where a compilation may take minutes. Instead,
        # the wakeup descriptor receives the signal number immediately, and a thread reads it.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # The default handlers would end the process.
        self._handlers: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in EXIT_CODES}
        Thread(target=self._listen, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # Closing the write end stops the thread.
        os.close(self._writer)

    def requested(self) -> bool:
        """Return whether to stop; collective over all processes, with the same result on each."""
        if jax.process_count() == 1:
            self.agreed = self.received
        else:
            self.agreed = int(multihost_utils.process_allgather(np.int32(self.received)).max())
        return bool(self.agreed)

    @property
    def name(self) -> str:
        """Name of the signal requesting the stop."""
        return signal.Signals(self.agreed).name

    @property
    def exit_code(self) -> int:
        """Exit code of the program after the stop, 0 without a request."""
        return EXIT_CODES.get(signal.Signals(self.agreed), 0) if self.agreed else 0

    def _listen(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while received := numbers.read(1):
                number = received[0]
                if number not in EXIT_CODES:
                    continue
                if self.received:
                    # Files are written atomically, so an immediate exit leaves them intact.
                    os._exit(SIGNALLED + number)
                self.received = number

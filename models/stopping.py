"""A `StopRequest` lets a training run end in order when it is interrupted or terminated."""

import os
import signal
from threading import Thread
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

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
        """Names the signal that asked."""
        return signal.Signals(self.agreed).name

    @property
    def exit_code(self) -> int:
        """Gives the exit code of a program that was asked to stop, and 0 where none asked."""
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
    """Takes the place of the default, which would end the process."""

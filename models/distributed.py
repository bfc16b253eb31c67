"""`join` has JAX find the other processes of a training, and says what it waits for.

JAX itself would try a wrong coordinator for 300 s, silently, and then abort the process from C++, which Python cannot
catch. So the processes meet before it begins (`models.arrival`).
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from models.arrival import arrive, gather
from models.place import Place
from models.refusal import REFUSED, Refused, say

JAX_TIMEOUT_S = 120
"""All processes are there already when JAX connects them."""

MARGIN_S = 60
"""JAX's own limit comes so much later, since it ends in an abort."""


def join(place: Place, timeout_s: float) -> None:
    """Has JAX find the other processes; before anything else uses it.

    A process that has waited for too long ends here, with a line.

    Args:
        place: which process this is, and where the coordinator is.
        timeout_s: how long to wait for all of them; 60 is usual.

    Raises:
        Refused: the coordinator cannot be reached, or its port is taken, or JAX is in use already.
    """
    if not 0 < timeout_s < math.inf:
        raise Refused(f"join_timeout_s is {timeout_s}; expected a finite number above 0")
    until, at = time.monotonic() + timeout_s, place.coordinator
    say(f"waiting for {place.num_processes} processes at {at}, at most {timeout_s:g} s")
    if place.process_id == 0:
        gather(place, until, timeout_s)
    else:
        arrive(place, until, timeout_s)
    line = f"the processes met at {at}, but JAX did not connect all of them within {JAX_TIMEOUT_S} s"
    with _ends_at(time.monotonic() + JAX_TIMEOUT_S, line):
        try:
            limit_s = JAX_TIMEOUT_S + MARGIN_S
            jax.distributed.initialize(at, place.num_processes, place.process_id, initialization_timeout=limit_s)
        except (RuntimeError, ValueError) as error:
            raise Refused(f"distributed is set, but JAX cannot join the processes at {at}: {error}") from error


@contextmanager
def _ends_at(until: float, line: str) -> Iterator[None]:
    """Ends the process with a line unless the context is left before."""

    def end() -> None:
        say(f"error: {line}")
        # The main thread is in C++, where no exception reaches it.
        os._exit(REFUSED)

    timer = threading.Timer(max(until - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

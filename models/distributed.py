"""`join` has JAX find the other processes of a training, and says what it waits for.

JAX itself would try a wrong coordinator for 300 s, silently, and then abort the process from C++, which Python cannot
catch. So ports are tried here first, and who has waited for too long ends here.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from models.link import listen
from models.place import Place
from models.refusal import REFUSED, Refused, say

PAUSE_S = 0.1
"""Between two tries to reach a port."""

MARGIN_S = 60
"""JAX's own limit comes so much later than that of `join`, since it ends in an abort."""


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
        _check_port(place)
    else:
        _wait_for_port(place, until, timeout_s)
    line = f"num_processes is {place.num_processes}, but not all of them came to {at} within {timeout_s:g} s"
    line += f"; expected processes 0 to {place.num_processes - 1}, each with an id of its own"
    with _ends_at(until, line):
        try:
            # Its limit has to be whole seconds.
            limit_s = math.ceil(timeout_s) + MARGIN_S
            jax.distributed.initialize(at, place.num_processes, place.process_id, initialization_timeout=limit_s)
        except (RuntimeError, ValueError) as error:
            raise Refused(f"distributed is set, but JAX cannot join the processes at {at}: {error}") from error


def _check_port(place: Place) -> None:
    """Refuses a port that is taken; JAX's service would share it with another training, and mix the two."""
    try:
        listen(place.port).close()
    except OSError as error:
        raise Refused(
            f"coordinator is {place.coordinator!r}; expected a port that is free on the machine of process 0: "
            f"{error.strerror}"
        ) from error


def _wait_for_port(place: Place, until: float, timeout_s: float) -> None:
    """Waits for process 0 to come, which may have to wait for its machine, whose name may not be known yet either."""
    while True:
        try:
            left_s = max(until - time.monotonic(), PAUSE_S)
            socket.create_connection((place.host, place.port), timeout=left_s).close()
            return
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= until:
            raise Refused(
                f"coordinator is {place.coordinator!r}, which did not answer within {timeout_s:g} s ({problem}); "
                "expected the address of process 0"
            )
        time.sleep(PAUSE_S)


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

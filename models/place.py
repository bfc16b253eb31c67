"""`find_place` says which of several processes this is, and where process 0 is; a wrong address is refused in one line.

JAX ends with an IndexError at an address without a port.
"""

import math
import os
from dataclasses import dataclass

# No public function says what JAX would detect, which a message about the wait needs.
from jax._src.clusters import ClusterEnv

from models.refusal import Refused

PORTS = range(1, 65_536)


@dataclass(frozen=True)
class Place:
    """A place is that of one process among those of a training.

    Args:
        host: the name or address of the machine of process 0.
        port: the port at which JAX's coordination service listens there.
        num_processes: how many processes there are.
        process_id: which of them this is, from 0.
    """

    host: str
    port: int
    num_processes: int
    process_id: int

    @property
    def coordinator(self) -> str:
        """Writes the address of the coordination service as JAX reads it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_place(coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float) -> Place:
    """Finds what was not given in the environment, and then in the cluster that JAX detects.

    Args:
        coordinator: HOST:PORT of process 0; `None` takes `JAX_COORDINATOR_ADDRESS`, or detects it.
        num_processes: how many processes there are; `None` takes `JAX_NUM_PROCESSES`, or detects it.
        process_id: which of them this is; `None` takes `JAX_PROCESS_ID`, or detects it.
        timeout_s: how long the detection may take, where it has to wait for a machine to have a name.

    Raises:
        Refused: one of them is found nowhere, or is none.
    """
    coordinator, source = _given_or("JAX_COORDINATOR_ADDRESS", coordinator, "coordinator")
    if coordinator is not None:
        # Asked before the cluster is, which may take long to answer.
        _address(coordinator, source)
    num_processes = _whole("JAX_NUM_PROCESSES", num_processes)
    process_id = _whole("JAX_PROCESS_ID", process_id)
    found = coordinator, num_processes, process_id
    if None in found:
        found = _detected(coordinator, num_processes, process_id, timeout_s)
    return _checked(found, source)


def _given_or(variable: str, given: str | None, option: str) -> tuple[str | None, str]:
    """Returns a value, and what to call it in a message."""
    return (given, option) if given is not None else (os.environ.get(variable), variable)


def _whole(variable: str, given: int | None) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError as error:
        raise Refused(f"{variable} is {text!r}; expected a whole number") from error


def _detected(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> tuple[str | None, int | None, int | None]:
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, None, None, math.ceil(timeout_s)
        )
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise Refused(f"distributed is set, but the cluster cannot be detected: {error!r}") from error
    return found[:3]


def _checked(found: tuple[str | None, int | None, int | None], source: str) -> Place:
    coordinator, num_processes, process_id = found
    if coordinator is None or num_processes is None or process_id is None:
        named = zip(("coordinator", "num_processes", "process_id"), found, strict=True)
        missing = ", ".join(name for name, value in named if value is None)
        raise Refused(
            f"distributed is set, but {missing} is neither given nor that of a cluster that JAX detects; expected "
            "--coordinator HOST:PORT --num-processes N --process-id I"
        )
    host, port = _address(coordinator, source)
    if num_processes < 1:
        raise Refused(f"num_processes is {num_processes}; expected at least 1")
    if not 0 <= process_id < num_processes:
        raise Refused(
            f"process_id is {process_id}; expected 0 to {num_processes - 1}, as num_processes is {num_processes}"
        )
    return Place(host, port, num_processes, process_id)


def _address(coordinator: str, source: str) -> tuple[str, int]:
    """Splits HOST:PORT; the host may be an IPv6 address in brackets."""
    host, _, port = coordinator.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    if not bare or any(map(str.isspace, bare)) or "/" in bare or (":" in bare) != in_brackets:
        raise Refused(f"{source} is {coordinator!r}; expected HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) in PORTS):
        raise Refused(f"{source} is {coordinator!r}; expected HOST:PORT, a port from {PORTS[0]} to {PORTS[-1]}")
    return bare, int(port)

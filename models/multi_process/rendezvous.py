"""Rendezvous of the processes of a training run before JAX starts.

JAX tries a wrong coordinator silently for 300 s and then aborts the process from C++, which Python cannot catch; an
address without a port raises IndexError. So the processes meet at the coordinator's port first. `detect_process` finds
this process's index and the address of process 0 and refuses a wrong address in one line. Process 0 listens, the others
connect, and process 0 answers all of them once everyone has arrived or time is up, with the names of missing processes.
The port is then free for JAX's coordination service, which `join` starts. A `Link` is a connection that the kernel
closes when one of its processes ends.
"""

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax._src.clusters import ClusterEnv

from models.config import USER_ERRORS, UserError, say

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""A connection is asked after 5 s of silence and then every 3 s; three questions without an answer end it, after 14 s.
The last is in milliseconds, and is for what was sent and not acknowledged. Systems lack some of them."""


def listen(port: int) -> socket.socket:
    """Listen at a port of every address of this machine, or at any that is free for 0."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Link:
    """A link is a connection to another process; JSON objects travel over it, one per line.

    Args:
        connection: a connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.lines = connection, connection.makefile("rb")
        self.ended = threading.Event()

    def send(self, message: dict) -> None:
        """Send a message, unless the other end is gone, which whoever receives from it notices."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict | None:
        """Wait for a message; `None` says that the other end is gone."""
        try:
            # A process that is killed while it sends leaves a part of a line.
            line = self.lines.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None


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
        """Write the address of the coordination service as JAX reads it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def detect_process(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> Place:
    """Find what was not given in the environment, and then in the cluster that JAX detects.

    Args:
        coordinator: HOST:PORT of process 0; `None` takes `JAX_COORDINATOR_ADDRESS`, or detects it.
        num_processes: how many processes there are; `None` takes `JAX_NUM_PROCESSES`, or detects it.
        process_id: which of them this is; `None` takes `JAX_PROCESS_ID`, or detects it.
        timeout_s: how long the detection may take, where it has to wait for a machine to have a name.

    Raises:
        Refused: one of them is found nowhere, or is none.
    """
    coordinator, source = _given_or("JAX_COORDINATOR_ADDRESS", coordinator, "multi_process.coordinator")
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
    """Return a value, and what to call it in a message."""
    return (given, option) if given is not None else (os.environ.get(variable), variable)


def _whole(variable: str, given: int | None) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"{variable} is {text!r}; expected a whole number") from error


def _detected(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> tuple[str | None, int | None, int | None]:
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, None, None, math.ceil(timeout_s)
        )
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"distributed is set, but the cluster cannot be detected: {error!r}") from error
    return found[:3]


def _checked(found: tuple[str | None, int | None, int | None], source: str) -> Place:
    coordinator, num_processes, process_id = found
    if coordinator is None or num_processes is None or process_id is None:
        named = zip(("coordinator", "num_processes", "process_id"), found, strict=True)
        missing = ", ".join(f"multi_process.{name}" for name, value in named if value is None)
        raise UserError(
            f"distributed is set, but {missing} is neither given nor that of a cluster that JAX detects; expected "
            "--set multi_process.coordinator=HOST:PORT, and so on for num_processes and process_id"
        )
    host, port = _address(coordinator, source)
    if num_processes < 1:
        raise UserError(f"multi_process.num_processes is {num_processes}; expected at least 1")
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"multi_process.process_id is {process_id}; expected 0 to {num_processes - 1}, as num_processes is "
            f"{num_processes}"
        )
    return Place(host, port, num_processes, process_id)


def _address(coordinator: str, source: str) -> tuple[str, int]:
    """Split HOST:PORT; the host may be an IPv6 address in brackets."""
    host, _, port = coordinator.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    if not bare or any(map(str.isspace, bare)) or "/" in bare or (":" in bare) != in_brackets:
        raise UserError(f"{source} is {coordinator!r}; expected HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) in PORTS):
        raise UserError(f"{source} is {coordinator!r}; expected HOST:PORT, a port from {PORTS[0]} to {PORTS[-1]}")
    return bare, int(port)


PAUSE_S = 0.1
"""Between two tries to reach a port."""

HELLO_TIMEOUT_S = 5
"""So long whoever connects may take to say who it is; it may be a stranger."""

IDS_SHOWN = 8

HELLO = "jax_moe_lb"


def gather(place: Place, until: float, timeout_s: float) -> None:
    """Wait for all other processes, as process 0.

    Args:
        place: that of process 0.
        until: the moment, of `time.monotonic`, until which they may come.
        timeout_s: how long that is from the beginning, for the message.

    Raises:
        Refused: on all processes that came, if one is missing or came twice, and if the port is taken.
    """
    try:
        # JAX's service would share a port that is taken with another training, and mix the two.
        server = listen(place.port)
    except OSError as error:
        raise UserError(
            f"multi_process.coordinator is {place.coordinator!r}; expected a port that is free on the machine of "
            f"process 0: {error.strerror}"
        ) from error
    hosts, links = {0: socket.gethostname()}, []
    with server:
        problem = None
        while len(hosts) < place.num_processes and problem is None:
            server.settimeout(max(until - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                problem = _missing(place, hosts, timeout_s)
                break
            connection.settimeout(HELLO_TIMEOUT_S)
            link = Link(connection)
            hello = link.receive()
            if hello is not None and hello.get("hello") == HELLO:
                links.append(link)
                problem = _add(place, hosts, hello)
    for link in links:
        link.send({"problem": problem})
        link.connection.close()
    if problem is not None:
        raise UserError(problem)


def _add(place: Place, hosts: dict[int, str], hello: dict) -> str | None:
    """Note a process that came, and says what is wrong with it."""
    process_id, host, num_processes = hello["process_id"], hello["host"], hello["num_processes"]
    if num_processes != place.num_processes:
        return (
            f"multi_process.num_processes is {place.num_processes} on process 0 and {num_processes} on process "
            f"{process_id}; expected the same on all processes"
        )
    if process_id in hosts:
        return (
            f"multi_process.process_id is {process_id} of a process on {hosts[process_id]} and of one on {host}; "
            f"expected 0 to {place.num_processes - 1}, each once"
        )
    hosts[process_id] = host
    return None


def _missing(place: Place, hosts: Collection[int], timeout_s: float) -> str:
    ids = [i for i in range(place.num_processes) if i not in hosts]
    shown = ", ".join(map(str, ids[:IDS_SHOWN])) + f" and {len(ids) - IDS_SHOWN} more" * (len(ids) > IDS_SHOWN)
    return (
        f"multi_process.num_processes is {place.num_processes}, but process{'es' * (len(ids) > 1)} {shown} did not "
        f"come to {place.coordinator} within {timeout_s:g} s; expected processes 0 to {place.num_processes - 1}, each "
        "with an id of its own"
    )


def wait_for_processes(place: Place, until: float, timeout_s: float) -> None:
    """Says to process 0 that this one is there, and waits until all are.

    Args:
        place: which process this is.
        until: the moment, of `time.monotonic`, until which process 0 may take to answer.
        timeout_s: how long that is from the beginning, for the message.

    Raises:
        Refused: process 0 does not answer, or says what is wrong.
    """
    connection = _connected(place, until, timeout_s)
    # Process 0 has a limit of its own, and the kernel looks after its machine.
    connection.settimeout(None)
    link = Link(connection)
    hello = {"hello": HELLO, "process_id": place.process_id, "num_processes": place.num_processes}
    link.send(hello | {"host": socket.gethostname()})
    answer = link.receive()
    connection.close()
    if answer is None:
        raise UserError(f"process 0 at {place.coordinator} ended while it waited for the others; its own line says why")
    if answer.get("problem") is not None:
        raise UserError(answer["problem"])


def _connected(place: Place, until: float, timeout_s: float) -> socket.socket:
    """Wait for process 0 to come, which may have to wait for its machine, whose name may not be known yet either."""
    while True:
        try:
            left_s = max(until - time.monotonic(), PAUSE_S)
            return socket.create_connection((place.host, place.port), timeout=left_s)
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= until:
            raise UserError(
                f"multi_process.coordinator is {place.coordinator!r}, which did not answer within {timeout_s:g} s "
                f"({problem}); expected the address of process 0"
            )
        time.sleep(PAUSE_S)


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
        raise UserError(f"multi_process.join_timeout_s is {timeout_s}; expected a finite number above 0")
    until, at = time.monotonic() + timeout_s, place.coordinator
    say(f"waiting for {place.num_processes} processes at {at}, at most {timeout_s:g} s")
    if place.process_id == 0:
        gather(place, until, timeout_s)
    else:
        wait_for_processes(place, until, timeout_s)
    line = f"the processes met at {at}, but JAX did not connect all of them within {JAX_TIMEOUT_S} s"
    with _ends_at(time.monotonic() + JAX_TIMEOUT_S, line):
        try:
            limit_s = JAX_TIMEOUT_S + MARGIN_S
            jax.distributed.initialize(at, place.num_processes, place.process_id, initialization_timeout=limit_s)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"distributed is set, but JAX cannot join the processes at {at}: {error}") from error


@contextmanager
def _ends_at(until: float, line: str) -> Iterator[None]:
    """End the process with a line unless the context is left before."""

    def end() -> None:
        say(f"error: {line}")
        # The main thread is in C++, where no exception reaches it.
        os._exit(USER_ERRORS)

    timer = threading.Timer(max(until - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""Rendezvous of the processes of a training run before JAX starts.

JAX retries a wrong coordinator silently for 300 s and then aborts the process from C++, which Python cannot catch. An
address without a port raises IndexError. The processes therefore meet at the coordinator's port first.

`detect_process` determines this process's index and the address of process 0, and rejects an invalid address in one
line. Process 0 listens, and the others connect. It replies to all of them once every process has connected or the
timeout is reached, with the indices of missing processes. The port is then free for JAX's coordination service, started
by `join`. `PeerMonitor` keeps the connections, which the kernel closes when one of their processes ends.

A process that is stopped for minutes may continue, so the timeouts of JAX and XLA that abort the others meanwhile are
raised. `PeerMonitor` detects stalls.
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

from models.console import USER_ERRORS, UserError, say

# Keepalive settings of a connection: probe after 5 s idle, then every 3 s; three lost probes close it, after 14 s.
# `TCP_USER_TIMEOUT` is in milliseconds and limits unacknowledged data. Some systems lack some of these options.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}


def listen(port: int) -> socket.socket:
    """Listen at a port of all addresses of this machine; port 0 chooses a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Link:
    """Connection to another process, carrying JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.lines = connection, connection.makefile("rb")
        self.ended, self.sending = threading.Event(), threading.Lock()

    def send(self, message: dict) -> None:
        """Send a message; errors of a closed connection are ignored, as the receiving thread detects them."""
        with contextlib.suppress(OSError), self.sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict | None:
        """Wait for a message; return `None` if the connection is closed."""
        try:
            # A process killed while sending leaves an incomplete line.
            line = self.lines.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None


Links = dict[str, Link]  # connections by the names of the processes at their other ends
PORTS = range(1, 65_536)


@dataclass(frozen=True)
class Place:
    """Coordinates of a process in a multi-process run."""

    host: str  # name or address of the machine of process 0
    port: int  # port of JAX's coordination service on that machine
    num_processes: int  # number of processes
    process_id: int  # index of this process, from 0

    @property
    def coordinator(self) -> str:
        """Address of the coordination service in JAX's format."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """Name of this process in messages."""
        return f"process {self.process_id} (pid {os.getpid()} on {socket.gethostname()})"


def detect_process(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> Place:
    """Return the coordinates of this process from the arguments, the environment, or a cluster detected by JAX."""
    source = "multi_process.coordinator"
    if coordinator is None:
        coordinator, source = os.environ.get("JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS"
    if coordinator is not None:
        # Validate the address before the cluster detection, which may take long.
        _address(coordinator, source)
    num_processes = _whole("JAX_NUM_PROCESSES", num_processes)
    process_id = _whole("JAX_PROCESS_ID", process_id)
    found = coordinator, num_processes, process_id
    if None in found:
        found = _detected(coordinator, num_processes, process_id, timeout_s)
    return _checked(found, source)


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


PAUSE_S = 0.1  # seconds between attempts to connect
HELLO_TIMEOUT_S = 5  # timeout for a new connection to identify itself, in seconds; it may be an unrelated client
IDS_SHOWN = 8
HELLO = "jax_moe_lb"


def gather(place: Place, until: float, timeout_s: float) -> Links:
    """Wait for all other processes, on process 0; return the connections by the names of the processes."""
    try:
        # Check the port here: JAX's service would share a port in use and mix two training runs.
        server = listen(place.port)
    except OSError as error:
        raise UserError(
            f"multi_process.coordinator is {place.coordinator!r}; expected a port that is free on the machine of "
            f"process 0: {error.strerror}"
        ) from error
    hosts, links, problem = {0: socket.gethostname()}, [], None
    with server:
        arrivals = _accepted(server, until)
        while len(hosts) < place.num_processes and problem is None:
            try:
                link, hello = next(arrivals)
            except TimeoutError:
                problem = _missing(place, hosts, timeout_s)
            else:
                links.append((hello["name"], link))
                problem = _add(place, hosts, hello)
    for _, link in links:
        link.connection.settimeout(None)
        link.send({"problem": problem, "name": place.name})
        if problem is not None:
            link.connection.close()
    if problem is not None:
        raise UserError(problem)
    return dict(links)


def _accepted(server: socket.socket, until: float) -> Iterator[tuple[Link, dict]]:
    """Yield each connection that begins with `HELLO`, and its first message; raise `TimeoutError` at the deadline."""
    while True:
        server.settimeout(max(until - time.monotonic(), 0.001))
        connection, _ = server.accept()
        connection.settimeout(HELLO_TIMEOUT_S)
        link = Link(connection)
        hello = link.receive()
        if hello is not None and hello.get("hello") == HELLO:
            yield link, hello


def _add(place: Place, hosts: dict[int, str], hello: dict) -> str | None:
    """Register a connected process; return an error message if its coordinates are inconsistent."""
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
        f"connect to {place.coordinator} within {timeout_s:g} s; expected processes 0 to {place.num_processes - 1}, "
        "each with a unique process_id"
    )


def wait_for_processes(place: Place, until: float, timeout_s: float) -> Links:
    """Connect to process 0, and wait until all processes are connected; return the connection by its name."""
    connection = _connected(place, until, timeout_s)
    # Process 0 enforces the timeout, and keepalive detects its failure.
    connection.settimeout(None)
    link = Link(connection)
    hello = {"hello": HELLO, "process_id": place.process_id, "num_processes": place.num_processes}
    link.send(hello | {"host": socket.gethostname(), "name": place.name})
    answer = link.receive()
    if answer is None:
        raise UserError(f"process 0 at {place.coordinator} ended while it waited for the others; its own line says why")
    if answer.get("problem") is not None:
        connection.close()
        raise UserError(answer["problem"])
    return {answer["name"]: link}


def _connected(place: Place, until: float, timeout_s: float) -> socket.socket:
    """Connect to process 0; retry until its machine is up and its host name resolves."""
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


JAX_TIMEOUT_S = 120  # timeout for JAX to connect the processes, all of which have started, in seconds
NEVER_S = 10**6  # timeout of JAX and XLA for processes that do not respond, in seconds: 11 days
XLA_TIMEOUTS = [f"xla_cpu_collective_{name}timeout_seconds" for name in ("", "call_terminate_", "call_warn_stuck_")]
MARGIN_S = 60  # margin of JAX's own timeout over ours in seconds, as reaching it aborts the process


def join(place: Place, timeout_s: float) -> Links:
    """Initialize `jax.distributed` before any other use of JAX; return the connections for `PeerMonitor`."""
    # If a timeout is reached, this process exits with a message.
    until, at = time.monotonic() + timeout_s, place.coordinator
    say(f"waiting for {place.num_processes} processes at {at}, at most {timeout_s:g} s")
    links = (gather if place.process_id == 0 else wait_for_processes)(place, until, timeout_s)
    line = f"the processes met at {at}, but JAX did not connect all of them within {JAX_TIMEOUT_S} s"
    address = at if place.process_id == 0 else relay_to(place.host, place.port)
    _raise_xla_timeouts()
    with _ends_at(time.monotonic() + JAX_TIMEOUT_S, line):
        try:
            jax.distributed.initialize(
                address,
                place.num_processes,
                place.process_id,
                initialization_timeout=JAX_TIMEOUT_S + MARGIN_S,
                heartbeat_timeout_seconds=NEVER_S,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"distributed is set, but JAX cannot join the processes at {at}: {error}") from error
    return links


def relay_to(host: str, port: int) -> str:
    """Return a local address whose connections are forwarded to an address; it hides the end of process 0 from JAX."""
    # If the connection to its service closes, JAX aborts the process from C++ with some thirty lines, and a Python
    # callback for this case fails with `std::bad_cast`. A process stopped while the run ends would always meet this, as
    # it finds all connections closed when it continues. JAX therefore connects to a socket of its own process, which
    # stays open. `PeerMonitor` detects the end of process 0 through a connection of its own.
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, host, port), daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _accept(server: socket.socket, host: str, port: int) -> None:
    while True:
        inner, _ = server.accept()
        threading.Thread(target=_forward, args=(inner, host, port), daemon=True).start()


def _forward(inner: socket.socket, host: str, port: int) -> None:
    """Forward a connection; close it if the other end refuses it, as JAX connects again."""
    try:
        outer = socket.create_connection((host, port))
    except OSError:
        inner.close()
        return
    for connection in (inner, outer):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(outer, inner), daemon=True).start()
    _copy(inner, outer)
    # JAX closed its end. The inner end is left open if the outer one closes.
    outer.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def _raise_xla_timeouts() -> None:
    """Raise the timeouts of collectives on CPUs, unless `XLA_FLAGS` already contains them."""
    # XLA reads the variable when the backend starts.
    flags = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={NEVER_S}" for name in XLA_TIMEOUTS if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


@contextmanager
def _ends_at(until: float, line: str) -> Iterator[None]:
    """End the process with a message unless the context is left before the deadline."""

    def end() -> None:
        say(f"error: {line}")
        # The main thread is in C++, so an exception cannot interrupt it.
        os._exit(USER_ERRORS)

    timer = threading.Timer(max(until - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

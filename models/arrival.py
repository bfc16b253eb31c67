"""Processes meet at the port of the coordinator before JAX does, so that whoever does not come can be named.

Process 0 listens there, each other process says which one it is, and when all are there, or time is up, process 0 tells
all of them how to go on. Then the port is free for JAX's coordination service.
"""

import socket
import time
from collections.abc import Collection

from models.link import Link, listen
from models.place import Place
from models.refusal import Refused

PAUSE_S = 0.1
"""Between two tries to reach a port."""

HELLO_TIMEOUT_S = 5
"""So long whoever connects may take to say who it is; it may be a stranger."""

IDS_SHOWN = 8

HELLO = "jax_moe_lb"


def gather(place: Place, until: float, timeout_s: float) -> None:
    """Waits for all other processes, as process 0.

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
        raise Refused(
            f"coordinator is {place.coordinator!r}; expected a port that is free on the machine of process 0: "
            f"{error.strerror}"
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
        raise Refused(problem)


def _add(place: Place, hosts: dict[int, str], hello: dict) -> str | None:
    """Notes a process that came, and says what is wrong with it."""
    process_id, host, num_processes = hello["process_id"], hello["host"], hello["num_processes"]
    if num_processes != place.num_processes:
        return (
            f"num_processes is {place.num_processes} on process 0 and {num_processes} on process {process_id}; "
            "expected the same on all processes"
        )
    if process_id in hosts:
        return (
            f"process_id is {process_id} of a process on {hosts[process_id]} and of one on {host}; "
            f"expected 0 to {place.num_processes - 1}, each once"
        )
    hosts[process_id] = host
    return None


def _missing(place: Place, hosts: Collection[int], timeout_s: float) -> str:
    ids = [i for i in range(place.num_processes) if i not in hosts]
    shown = ", ".join(map(str, ids[:IDS_SHOWN])) + f" and {len(ids) - IDS_SHOWN} more" * (len(ids) > IDS_SHOWN)
    return (
        f"num_processes is {place.num_processes}, but process{'es' * (len(ids) > 1)} {shown} did not come to "
        f"{place.coordinator} within {timeout_s:g} s; expected processes 0 to {place.num_processes - 1}, each with an "
        "id of its own"
    )


def arrive(place: Place, until: float, timeout_s: float) -> None:
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
        raise Refused(f"process 0 at {place.coordinator} ended while it waited for the others; its own line says why")
    if answer.get("problem") is not None:
        raise Refused(answer["problem"])


def _connected(place: Place, until: float, timeout_s: float) -> socket.socket:
    """Waits for process 0 to come, which may have to wait for its machine, whose name may not be known yet either."""
    while True:
        try:
            left_s = max(until - time.monotonic(), PAUSE_S)
            return socket.create_connection((place.host, place.port), timeout=left_s)
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= until:
            raise Refused(
                f"coordinator is {place.coordinator!r}, which did not answer within {timeout_s:g} s ({problem}); "
                "expected the address of process 0"
            )
        time.sleep(PAUSE_S)

"""A `Link` is a connection between two processes of a training, which the kernel ends when one of them ends."""

import contextlib
import json
import socket
import threading

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""A connection is asked after 5 s of silence and then every 3 s; three questions without an answer end it, after 14 s.
The last is in milliseconds, and is for what was sent and not acknowledged. Systems lack some of them."""


def listen(port: int) -> socket.socket:
    """Listens at a port of every address of this machine, or at any that is free for 0."""
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
        """Sends a message, unless the other end is gone, which whoever receives from it notices."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict | None:
        """Waits for a message; `None` says that the other end is gone."""
        try:
            # A process that is killed while it sends leaves a part of a line.
            line = self.lines.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

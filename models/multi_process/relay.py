"""Relay between JAX and its coordination service, which hides the end of process 0 from JAX.

If the connection to the service closes, JAX aborts the process from C++ with some thirty lines, and a Python callback
for this case fails with `std::bad_cast`. A process stopped while the run ends would always meet this, as it finds all
connections closed when it continues. JAX therefore connects to a socket of its own process, which stays open.
`PeerMonitor` detects the end of process 0 through a connection of its own.
"""

import contextlib
import socket
import threading


def relay_to(host: str, port: int) -> str:
    """Return a local address whose connections are forwarded to an address."""
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

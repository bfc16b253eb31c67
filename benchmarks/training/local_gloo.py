"""Collectives of processes on this machine."""

import socket

from jax._src.lib import _jax


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def bind_gloo() -> None:
    """Make gloo bind to 127.0.0.1 if the host name does not resolve, as on a minimal machine."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        make = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = lambda *args, **kwargs: make(*args, **{**kwargs, "hostname": "127.0.0.1"})

"""`python -m tests.models.tiny_process` is `tests.models.tiny_training` as one of several processes."""

import socket

from jax._src.lib import _jax

from tests.models.tiny_training import main

if __name__ == "__main__":
    # gloo takes the address that the host name stands for; on a bare machine that may be none.
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        make = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = lambda *args, **kwargs: make(*args, **{**kwargs, "hostname": "127.0.0.1"})
    main()

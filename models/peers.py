"""`Peers` ends the processes of a training soon after one of them has ended, and all of them say which one it was.

JAX's own coordination service also notices. It takes 60 to 100 s by default, and 10 s with the shortest sensible
`heartbeat_timeout_seconds`; either way it aborts the process from C++ with some twenty lines, among them the number of
the process. Here each process keeps a connection to process 0. The kernel closes it as soon as a process ends, however
it ends, and looks after a machine that has vanished (`models.link`). No thread of Python has to be in time for that, so
a process that is busy is never taken for one that is gone.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from models.link import Link, listen
from models.place import Place
from models.refusal import REFUSED, Refused, say
from models.store import Store

MEET_TIMEOUT_S = 60
"""So long all connections may take; all processes are there already."""

CAUSE_TIMEOUT_S = 3.0
"""So long a process that fails waits to hear of another that did so before."""

HELLO_TIMEOUT_S = 5
"""So long whoever connects may take to say who it is; it may be a stranger."""

LINGER_S = 3.0
"""So long process 0 stays for the others to end first. JAX aborts those whose coordinator leaves, with twenty lines."""

FAILED = 1


class Peers:
    """`Peers` is a context in which this process ends when another one does, and tells the others if it fails itself.

    Whoever leaves the context without an error has waited for all others to do so. With an error the process ends here:
    at its usual end JAX would wait for the others, which do not come.

    Args:
        place: which process this is.
        store: what all processes can read.

    Raises:
        Refused: the processes cannot connect to each other.
    """

    def __init__(self, place: Place, store: Store) -> None:
        self.place = place
        self.name = f"process {place.process_id} (pid {os.getpid()} on {socket.gethostname()})"
        # Whoever has it ends this process, and is alone in saying why.
        self.deciding = threading.Lock()
        try:
            self.links = self._meet_members(store) if place.process_id == 0 else self._meet_first(store)
        except OSError as error:
            raise Refused(
                f"the {place.num_processes} processes cannot connect to each other ({error}); expected process 0 at "
                f"{place.host!r} to accept connections at any port"
            ) from error

    def __enter__(self) -> "Peers":
        for name, link in self.links.items():
            threading.Thread(target=self._watch, args=(name, link), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            # Waits for all; who is killed until then is still missed.
            jax.distributed.shutdown()
            self._tell({"line": None})
            return
        refused = isinstance(error, Refused)
        if not refused:
            # When another process ends, exchanges with it fail here. The thread that hears of it ends this one.
            time.sleep(CAUSE_TIMEOUT_S)
        with self.deciding:
            if refused:
                say(f"error: {error}")
            else:
                traceback.print_exception(error)
            code = REFUSED if refused else FAILED
            self._tell({"line": f"{self.name} ended: {error or type(error).__name__}", "code": code})
            self._end(code)

    def _meet_members(self, store: Store) -> dict[str, Link]:
        """Accepts a connection of each other process. The word keeps strangers out."""
        word, until = secrets.token_hex(), time.monotonic() + MEET_TIMEOUT_S
        links: dict[str, Link] = {}
        with listen(0) as server:
            store.put("peers", json.dumps({"port": server.getsockname()[1], "word": word, "name": self.name}))
            while len(links) < self.place.num_processes - 1:
                server.settimeout(max(until - time.monotonic(), 0.001))
                connection, _ = server.accept()
                connection.settimeout(HELLO_TIMEOUT_S)
                link = Link(connection)
                hello = link.receive()
                if hello and hello.get("word") == word:
                    connection.settimeout(None)
                    links[hello["name"]] = link
        return links

    def _meet_first(self, store: Store) -> dict[str, Link]:
        first = json.loads(store.get("peers", MEET_TIMEOUT_S))
        connection = socket.create_connection((self.place.host, first["port"]), timeout=MEET_TIMEOUT_S)
        connection.settimeout(None)
        link = Link(connection)
        link.send({"word": first["word"], "name": self.name})
        return {first["name"]: link}

    def _watch(self, name: str, link: Link) -> None:
        """Listens to another process until it ends, in a thread."""
        explained = False
        while (message := link.receive()) is not None:
            explained = True
            if message["line"] is not None:
                threading.Thread(target=self._follow, args=(message,), daemon=True).start()
        link.ended.set()
        if not explained:
            self._follow({"line": f"{name} is gone; --resume goes on from the newest checkpoint", "code": FAILED})

    def _follow(self, message: dict) -> None:
        """Ends this process because of another, the first that ended."""
        with self.deciding:
            if self.place.process_id == 0:
                self._tell(message)
            if sys.stderr.isatty():
                # The line of steps hides the cursor.
                sys.stderr.write("\x1b[?25h\n")
            say(f"error: {message['line']}")
            self._end(message["code"])

    def _tell(self, message: dict) -> None:
        for link in self.links.values():
            link.send(message)

    def _end(self, code: int) -> None:
        """Ends this process now, and process 0 after the others, which need it until then."""
        if self.place.process_id == 0:
            until = time.monotonic() + LINGER_S
            for link in self.links.values():
                link.ended.wait(max(until - time.monotonic(), 0))
        os._exit(code)

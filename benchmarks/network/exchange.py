"""Exchange of rows between processes over TCP, direct or via rail ranks: full duplex, exact bytes, with a timeout.

A rank is one process with one connection to every peer. Rows are sent in messages; a rail rank forwards a message once
it is complete, so the hops of a route overlap. Sending and receiving are non-blocking: available data is sent, and
arriving data is received.
"""

import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from benchmarks.network.launch import Rank
from benchmarks.network.ways import ROW_BYTES, Ways

MESSAGE_ROWS = 16
"""Maximum rows per message: 5 ms at 50 Mbit/s."""

HEADER = struct.Struct("<5i")
"""Message header: source, target, way, first row, number of rows."""

PORT = 5300
BUFFER_BYTES = 16 << 20
"""Buffer size per connection and direction: larger than the bytes of any case on one connection."""


class Stalled(RuntimeError):
    """An exchange exceeded its timeout."""


# ---- connections -------------------------------------------------------------------------


def listen(rank: Rank) -> socket.socket:
    """Return a listening socket; all ranks must listen before any connects.

    The namespace gets large buffers, so that a NIC keeps working while a rank is not scheduled.
    """
    for name in ("tcp_rmem", "tcp_wmem"):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(f"4096 {BUFFER_BYTES} {BUFFER_BYTES}")
    return socket.create_server((rank.address, PORT), backlog=len(rank.hosts))


def connect(rank: Rank, server: socket.socket, peers: set[int], timeout_s: float) -> dict[int, socket.socket]:
    """Return a connection to each peer, all of which call this function."""
    connections = {}
    for peer in sorted(peer for peer in peers if peer < rank.index):
        address = rank.hosts[peer].address, PORT
        connections[peer] = socket.create_connection(address, timeout_s, (rank.address, 0))
        connections[peer].sendall(struct.pack("<i", rank.index))
    server.settimeout(timeout_s)
    while len(connections) < len(peers):
        try:
            connection = server.accept()[0]
        except TimeoutError:
            late = ", ".join(map(str, sorted(peers - set(connections))))
            raise Stalled(f"rank {rank.index}: no connection from ranks {late} after {timeout_s} s") from None
        connection.settimeout(timeout_s)
        (peer,) = struct.unpack("<i", connection.recv(4, socket.MSG_WAITALL))
        connections[peer] = connection
    for connection in connections.values():
        connection.setblocking(False)
        # Send the end of a message without waiting for acknowledgements.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


# ---- the exchange --------------------------------------------------------------------------


@dataclass
class _Peer:
    """Pending data of one connection, and its partially received message."""

    rank: int
    missing: int
    queue: deque[memoryview] = field(default_factory=deque)
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    body: memoryview | None = None
    into: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def events(self) -> int:
        """Selector events to wait for."""
        return (selectors.EVENT_READ if self.missing else 0) | (selectors.EVENT_WRITE if self.queue else 0)


class Shipment:
    """One rank's part in an exchange; call `run` once.

    The constructor does all preparation: expected peers, memory, and messages.
    """

    def __init__(self, rank: int, ways: Ways, sending: list[np.ndarray]) -> None:
        self.rank, self.path = rank, ways.path
        hops = ways.hops()
        self.peers = {
            peer: _Peer(peer, int(hops[peer, rank])) for peer in np.flatnonzero(hops[rank] + hops[:, rank]).tolist()
        }
        for peer in self.peers.values():
            peer.into = memoryview(peer.header)
        counts = ways.rows[:, rank].sum(-1)
        self.starts = (counts.cumsum() - counts).tolist()
        self.arrived = np.zeros((counts.sum(), ROW_BYTES // 4), np.int32)
        """Received rows in the order of `expected`."""
        for to, header, rows in _messages(rank, ways, sending):
            self.peers[to].queue += [memoryview(header), rows]

    def run(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        """Send, receive and forward until this rank's part is complete."""
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for peer in self.peers.values():
                if peer.events:
                    selector.register(connections[peer.rank], peer.events, peer)
            while selector.get_map():
                ready = selector.select(max(end_s - time.monotonic(), 0))
                if not ready:
                    raise Stalled(self._complaint(timeout_s))
                for key, events in ready:
                    self._serve(connections[key.data.rank], key.data, events)
                for peer in self.peers.values():
                    _await(selector, connections[peer.rank], peer)

    def _serve(self, connection: socket.socket, peer: _Peer, events: int) -> None:
        """Handle the ready events of a connection."""
        try:
            if events & selectors.EVENT_WRITE:
                _send(connection, peer)
            if events & selectors.EVENT_READ:
                self._receive(connection, peer)
        except (ConnectionError, EOFError) as error:
            message = f"rank {self.rank}: rank {peer.rank} closed its connection; {peer.missing} rows are missing"
            raise ConnectionError(message) from error

    def _receive(self, connection: socket.socket, peer: _Peer) -> None:
        """Receive available data of a message."""
        while peer.into:
            try:
                count = connection.recv_into(peer.into)
            except BlockingIOError:
                return
            if not count:
                raise EOFError
            peer.into = peer.into[count:]
            if not peer.into and peer.body is None:
                peer.into = peer.body = self._room(peer)
        self._finish(peer)

    def _room(self, peer: _Peer) -> memoryview:
        """Return the buffer for the rows of a message with a complete header."""
        source, target, _, first, count = HEADER.unpack(peer.header)
        if target != self.rank:
            return memoryview(bytearray(count * ROW_BYTES))
        start = self.starts[source] + first
        return memoryview(self.arrived[start : start + count]).cast("B")

    def _finish(self, peer: _Peer) -> None:
        """Forward a complete message if it is for another rank."""
        source, target, way, _, count = HEADER.unpack(peer.header)
        peer.missing -= count
        if target != self.rank and peer.body is not None:
            path = self.path(source, target, way)
            following = self.peers[path[path.index(self.rank) + 1]]
            following.queue += [memoryview(bytes(peer.header)), peer.body]
        peer.into, peer.body = memoryview(peer.header), None

    def _complaint(self, timeout_s: float) -> str:
        missing = [f"{peer.missing} rows from rank {peer.rank}" for peer in self.peers.values() if peer.missing]
        kept = [f"{sum(map(len, p.queue))} bytes for rank {p.rank}" for p in self.peers.values() if p.queue]
        return f"rank {self.rank}: after {timeout_s} s still missing [{', '.join(missing)}], unsent [{', '.join(kept)}]"


def _messages(rank: int, ways: Ways, sending: list[np.ndarray]) -> Iterator[tuple[int, bytes, memoryview]]:
    """Yield next hop, header and rows of each message, interleaved over all ways to keep all of them busy."""
    flows = []
    for turn in range(len(sending)):
        target = (rank + turn) % len(sending)
        first = 0
        for way, count in enumerate(ways.rows[rank, target].tolist()):
            if count:
                cuts = range(first, first + count, MESSAGE_ROWS)
                flows.append([(target, way, cut, min(MESSAGE_ROWS, first + count - cut)) for cut in cuts])
            first += count
    for round_of_messages in zip_longest(*flows):
        for target, way, first, count in filter(None, round_of_messages):
            header = HEADER.pack(rank, target, way, first, count)
            yield ways.path(rank, target, way)[1], header, memoryview(sending[target][first : first + count]).cast("B")


def _send(connection: socket.socket, peer: _Peer) -> None:
    """Send as much as the connection accepts."""
    try:
        sent = connection.sendmsg(list(islice(peer.queue, 8)))
    except BlockingIOError:
        return
    while sent:
        part = peer.queue.popleft()
        if sent < len(part):
            peer.queue.appendleft(part[sent:])
        sent -= min(sent, len(part))


def _await(selector: selectors.BaseSelector, connection: socket.socket, peer: _Peer) -> None:
    """Update the selector for a peer's pending events, which forwarding changes."""
    key = selector.get_map().get(connection)
    if key is None and peer.events:
        selector.register(connection, peer.events, peer)
    elif key is not None and not peer.events:
        selector.unregister(connection)
    elif key is not None and key.events != peer.events:
        selector.modify(connection, peer.events, peer)

"""RailS on real interfaces: two nodes of four ranks, each with a slow NIC, and skewed all-to-alls.

Requires a sandbox, see `sandbox.py`.

Every rank is a process in its own network namespace. Between the nodes, rows pass NICs limited in both directions;
inside a node, an unlimited switch. The same rows are sent in four ways:

- direct: from rank to rank, over the NICs of sender and receiver;
- receiver's rail: via rail ranks, on the receiving rank's rail, as in `MultiRailDispatch` without a plan;
- ECMP: each node is one host with four NICs, and the kernel's hash selects a NIC per connection; new connections, with
  other ports, each time;
- sprayed: via rail ranks, on the rails planned by `RailS`.

The lower bound is theorem 2's: the busiest node's bytes, evenly over its NICs, at the TCP payload rate of a NIC.
"""

import argparse
import hashlib
import multiprocessing
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.network import sandbox, topologies
from benchmarks.network.exchange import Shipment, connect, listen
from benchmarks.network.launch import Rank, launch
from benchmarks.network.network import Network
from benchmarks.network.rail_cases import NODES, RAILS, RANKS, busiest_node, by_receiver, cases, plan_of, scaled
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.ways import ROW_BYTES, Ways, contents, expected
from benchmarks.render.results import Table, Value, spread

NIC_BITS_PER_S = 50e6
NODE_ROWS = 6000
"""Rows of the busiest node in each case, 12.3 MB."""

REPEATS = 5
TIMEOUT_S = 20.0
LEAD_S = 0.05
"""Delay from the arrival of the last rank to the start, so that all ranks are scheduled."""

WAYS = ("direct", "receiver's rail", "ECMP", "sprayed")
Key = tuple[str, str]
"""A case, and one of the ways."""


@dataclass(frozen=True)
class Trial:
    seconds: float
    nic_bytes: list[list[int]]


# ---- a rank --------------------------------------------------------------------------------


def measure(network: Network, ways: Mapping[Any, Ways], repeats: int, *, reconnect: bool) -> dict[Any, list[Trial]]:
    """Measure all ways interleaved, after one warm-up exchange of the first."""
    start = Start(len(network.hosts))
    keys = [next(iter(ways)), *(key for _ in range(repeats) for key in ways)]

    def one_rank(rank: Rank) -> list[tuple[float, list[list[int]]]]:
        return _take_part(rank, [ways[key] for key in keys], start, reconnect)

    ranks = launch(network, one_rank, deadline_s=30 + 10 * len(keys))
    trials: dict[Any, list[Trial]] = {key: [] for key in ways}
    for i, key in list(enumerate(keys))[1:]:
        trials[key].append(Trial(max(rank[i][0] for rank in ranks), ranks[0][i][1]))
    return trials


class Start:
    """Common start time of all ranks; create it before forking them."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("fork")
        self._barrier = context.Barrier(num_ranks)
        self._start_s = context.Value("d", 0.0)

    def gather(self) -> None:
        """Wait for all ranks."""
        self._barrier.wait(TIMEOUT_S)

    def together(self, rank: int) -> float:
        """Wait for all ranks, then return at the same time on all of them; return that time."""
        self.gather()
        if rank == 0:
            self._start_s.value = time.monotonic() + LEAD_S
        self.gather()
        time.sleep(max(self._start_s.value - time.monotonic(), 0))
        return self._start_s.value


def _take_part(rank: Rank, exchanges: list[Ways], start: Start, reconnect: bool) -> list[tuple[float, list[list[int]]]]:
    """Run one rank of all exchanges; return its end time of each and the bytes of the NICs."""
    server, connections = listen(rank), dict[int, socket.socket]()
    peers = set(range(len(rank.hosts))) - {rank.index}
    times = []
    for i, ways in enumerate(exchanges):
        counts = ways.rows[rank.index].sum(-1).tolist()
        shipment = Shipment(rank.index, ways, [contents(rank.index, to, n) for to, n in enumerate(counts)])
        start.gather()
        if reconnect or i == 0:
            connections = connect(rank, server, peers, TIMEOUT_S)
        before = _nic_bytes(rank)
        start_s = start.together(rank.index)
        shipment.run(connections, TIMEOUT_S)
        seconds = time.monotonic() - start_s
        if not np.array_equal(shipment.arrived, expected(rank.index, ways)):
            raise AssertionError(f"rank {rank.index} received rows not sent to it")
        start.gather()
        times.append((seconds, (_nic_bytes(rank) - before).tolist()))
        if reconnect:
            for connection in connections.values():
                connection.close()
    return times


def _nic_bytes(rank: Rank) -> np.ndarray:
    """Return bytes sent and received by the NICs, on rank 0; empty on other ranks."""
    if rank.index:
        return np.zeros(0, int)
    return np.array([(nic.sent_bytes, nic.received_bytes) for nic in rank.network.counters()]).T


# ---- predictions -----------------------------------------------------------------------------


def planned_nic_bytes(ways: Ways) -> np.ndarray:
    """Return the planned bytes sent and received by each rank's NIC, `[2, RANKS]`: rows between nodes."""
    node = np.arange(RANKS) // RAILS
    between = np.where(node[:, None] == node, 0, ways.hops()) * ROW_BYTES
    return np.stack([between.sum(1), between.sum(0)])


@dataclass(frozen=True)
class Result:
    """Result of one way of a case."""

    predicted_s: np.ndarray
    seconds: np.ndarray
    planned_nic_bytes: np.ndarray | None
    nic_bytes: np.ndarray

    @property
    def off_plan(self) -> float:
        """Largest difference between a NIC's counter and its plan, over the busiest NIC's plan; 0 without a plan."""
        if self.planned_nic_bytes is None:
            return 0.0
        return float(np.abs(self.nic_bytes - self.planned_nic_bytes).max() / self.planned_nic_bytes.max())

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))


def result_of(trials: list[Trial], ways: Ways | None, bits_per_s: float) -> Result:
    """Return the result of some trials with its prediction."""
    counted = np.array([trial.nic_bytes for trial in trials])
    planned = None if ways is None else planned_nic_bytes(ways)
    busiest = (counted if planned is None else np.broadcast_to(planned, counted.shape)).max((1, 2))
    seconds = np.array([trial.seconds for trial in trials])
    return Result(busiest / payload_bytes_per_s(bits_per_s), seconds, planned, counted)


def run_all(traffic: dict[str, np.ndarray], bits_per_s: float, repeats: int) -> dict[Key, Result]:
    """Run every way of every case, in its network."""
    ways, straight = {}, {}
    for case, counts in traffic.items():
        rows, rails = plan_of(counts)
        straight[case, "ECMP"] = ways[case, "direct"] = Ways.straight(rows)
        ways[case, "receiver's rail"] = Ways.along_rails(by_receiver(rows))
        ways[case, "sprayed"] = Ways.along_rails(rails)
    with topologies.rails(NODES, RAILS, bits_per_s) as network:
        trials = measure(network, ways, repeats, reconnect=False)
    with topologies.multipath(NODES, RAILS, bits_per_s) as network:
        trials |= measure(network, straight, repeats, reconnect=True)
    return {key: result_of(trials[key], ways.get(key), bits_per_s) for key in trials}


def floor_s(counts: np.ndarray, bits_per_s: float) -> float:
    """Return theorem 2's lower bound, in seconds."""
    return busiest_node(plan_of(counts)[0]) * ROW_BYTES / RAILS / payload_bytes_per_s(bits_per_s)


# ---- tables --------------------------------------------------------------------------------


def seconds_table(floors_s: dict[str, float], results: dict[Key, Result]) -> Table:
    rows: list[list[Value]] = []
    for case, floor in floors_s.items():
        over_floor = 100 * (results[case, "sprayed"].median_s / floor - 1)
        rows.append([case, floor, *(spread(results[case, way].seconds) for way in WAYS), over_floor])
    columns = {"case": ""} | dict.fromkeys(("floor", *WAYS), ".3f") | {"sprayed over the floor, %": "+.1f"}
    return Table(columns, rows)


def saved_table(floors_s: dict[str, float], results: dict[Key, Result]) -> Table:
    """Return the gain of spraying, and the NIC counters relative to the plan."""
    rows: list[list[Value]] = []
    for case in floors_s:
        ours = results[case, "sprayed"].median_s
        others = [results[case, way].median_s for way in WAYS[:-1]]
        gains = [100 * (ratio - 1) for other in others for ratio in (ours / other, other / ours)]
        over = [float(100 * np.median(results[case, way].seconds / results[case, way].predicted_s - 1)) for way in WAYS]
        off = max(results[case, way].off_plan for way in WAYS)
        rows.append([case, *gains, *over, 100 * off])
    against = [f"{what} against {way}, %" for way in WAYS[:-1] for what in ("time", "bandwidth")]
    columns = {"case": ""} | dict.fromkeys(against, "+.0f")
    columns |= {f"{way} over its busiest NIC, %": "+.1f" for way in WAYS} | {"NICs off plan, %": ".1f"}
    return Table(columns, rows)


def measured_table(traffic: dict[str, np.ndarray], results: dict[Key, Result]) -> Table:
    """Return median seconds of all ways in the format read by other programs."""
    rows: list[list[Value]] = []
    for case, counts in traffic.items():
        medians = (results[case, way].median_s for way in WAYS)
        rows.append([case, digest_of(plan_of(counts)[0]), NIC_BITS_PER_S, *medians])
    columns = {"case": "", "digest of rows": "", "nic_bits_per_s": ".0f"}
    return Table(columns | dict.fromkeys(WAYS, ".6f"), rows)


def digest_of(rows: np.ndarray) -> str:
    """Return the first digits of the SHA-256 of the rows between ranks, as an identifier of the traffic."""
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    sandbox.enter()
    traffic = {name: scaled(weights, NODE_ROWS) for name, weights in cases(0).items()}
    results = run_all(traffic, NIC_BITS_PER_S, REPEATS)
    floors_s = {name: floor_s(counts, NIC_BITS_PER_S) for name, counts in traffic.items()}
    tables = {"seconds": seconds_table(floors_s, results), "saved": saved_table(floors_s, results)}
    tables["measured"] = measured_table(traffic, results)
    return tables

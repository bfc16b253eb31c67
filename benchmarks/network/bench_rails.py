"""RailS on real interfaces: two nodes of four ranks, each with a slow NIC of its own, and skewed all-to-alls.

Run it with `python -m benchmarks.network.bench_rails [--out FILE]`; needs a sandbox, see `sandbox.py`.

Every rank is a process in a network namespace of its own. Between the nodes rows pass by NICs whose rate is limited in
both directions; inside a node by a switch that nothing limits. The same rows travel in four ways:

- direct: from rank to rank, so by the NICs of the sender and of the receiver;
- receiver's rail: by rail ranks, on the rail of the rank that receives, as `MultiRailDispatch` does without a plan;
- ECMP: each node is one host with four NICs, and the kernel puts each connection on one of them by its hash; new
  connections, so other ports and another draw, each time;
- sprayed: by rail ranks, on the rails that `RailS` planned.

The floor is theorem 2's: the busiest node's bytes, evenly over its NICs, at what TCP gets out of a NIC.
"""

import argparse
import hashlib
import multiprocessing
import os
import socket
import time
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.exchange import Shipment, connect, listen
from benchmarks.network.launch import Rank, launch
from benchmarks.network.network import Network
from benchmarks.network.rail_cases import NODES, RAILS, RANKS, busiest_node, by_receiver, cases, plan_of, scaled
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.topologies import Multipath, Rails
from benchmarks.network.ways import ROW_BYTES, Ways, contents, expected
from benchmarks.results import Table, Value, out_option, report, spread

NIC_BITS_PER_S = 50e6
NODE_ROWS = 6000
"""Of the busiest node in each case, 12.3 MB."""

REPEATS = 5
TIMEOUT_S = 20.0
LEAD_S = 0.05
"""From the last rank's coming to the start, so that all are awake."""

WAYS = ("direct", "receiver's rail", "ECMP", "sprayed")
Key = tuple[str, str]
"""A case, and one of the ways."""

K = TypeVar("K")


@dataclass(frozen=True)
class Trial:
    """One exchange.

    Args:
        seconds: from the common start to the last rank's end.
        nic_bytes: what each NIC sent, and received, by its counters: `[2, NICs]`.
    """

    seconds: float
    nic_bytes: list[list[int]]


# ---- what a rank does --------------------------------------------------------------------


def measure(network: Network, ways: dict[K, Ways], repeats: int, *, reconnect: bool) -> dict[K, list[Trial]]:
    """All of them in turn, so many times, after the first of them once that does not count.

    Args:
        network: with a host for each rank.
        ways: by name.
        repeats: how often each.
        reconnect: new connections for each exchange.

    Raises:
        RanksFailed: a rank did not get what it should, or not in time.
    """
    start = Start(len(network.hosts))
    keys = [next(iter(ways)), *(key for _ in range(repeats) for key in ways)]

    def one_rank(rank: Rank) -> list[tuple[float, list[list[int]]]]:
        return _take_part(rank, [ways[key] for key in keys], start, reconnect)

    ranks = launch(network, one_rank, deadline_s=30 + 10 * len(keys))
    trials: dict[K, list[Trial]] = {key: [] for key in ways}
    for i, key in list(enumerate(keys))[1:]:
        trials[key].append(Trial(max(rank[i][0] for rank in ranks), ranks[0][i][1]))
    return trials


class Start:
    """A moment for all ranks to start; make it before they are forked."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("fork")
        self._barrier = context.Barrier(num_ranks)
        self._start_s = context.Value("d", 0.0)

    def gather(self) -> None:
        """Return when all ranks have come."""
        self._barrier.wait(TIMEOUT_S)

    def together(self, rank: int) -> float:
        """Return shortly after all ranks have come, on all of them at the same time, which it returns."""
        self.gather()
        if rank == 0:
            self._start_s.value = time.monotonic() + LEAD_S
        self.gather()
        time.sleep(max(self._start_s.value - time.monotonic(), 0))
        return self._start_s.value


def _take_part(rank: Rank, exchanges: list[Ways], start: Start, reconnect: bool) -> list[tuple[float, list[list[int]]]]:
    """A rank's part in all exchanges: seconds until it was done with each, and what the NICs carried."""
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
            raise AssertionError(f"rank {rank.index} received rows that nobody sent to it")
        start.gather()
        times.append((seconds, (_nic_bytes(rank) - before).tolist()))
        if reconnect:
            for connection in connections.values():
                connection.close()
    return times


def _nic_bytes(rank: Rank) -> np.ndarray:
    """What NICs sent and received; one rank reads them all."""
    if rank.index:
        return np.zeros(0, int)
    return np.array([(nic.sent_bytes, nic.received_bytes) for nic in rank.network.counters()]).T


# ---- what should come of it ------------------------------------------------------------------


def planned_nic_bytes(ways: Ways) -> np.ndarray:
    """What each rank's NIC should send, and receive, `[2, RANKS]`: rows that change nodes."""
    node = np.arange(RANKS) // RAILS
    between = np.where(node[:, None] == node, 0, ways.hops()) * ROW_BYTES
    return np.stack([between.sum(1), between.sum(0)])


@dataclass(frozen=True)
class Result:
    """What one way of doing a case came to.

    Args:
        predicted_s: its busiest NIC's bytes at its rate; by the counters for ECMP, where only the kernel knows.
        seconds: measured, of each trial.
        planned_nic_bytes: sent and received, `None` for ECMP.
        nic_bytes: of each trial, as counted.
    """

    predicted_s: np.ndarray
    seconds: np.ndarray
    planned_nic_bytes: np.ndarray | None
    nic_bytes: np.ndarray

    @property
    def off_plan(self) -> float:
        """The largest difference between a NIC's counter and its plan, over the busiest NIC's plan; 0 without one."""
        if self.planned_nic_bytes is None:
            return 0.0
        return float(np.abs(self.nic_bytes - self.planned_nic_bytes).max() / self.planned_nic_bytes.max())

    @property
    def median_s(self) -> float:
        """Of what was measured."""
        return float(np.median(self.seconds))


def result_of(trials: list[Trial], ways: Ways | None, bits_per_s: float) -> Result:
    """Beside the prediction."""
    counted = np.array([trial.nic_bytes for trial in trials])
    planned = None if ways is None else planned_nic_bytes(ways)
    busiest = (counted if planned is None else np.broadcast_to(planned, counted.shape)).max((1, 2))
    seconds = np.array([trial.seconds for trial in trials])
    return Result(busiest / payload_bytes_per_s(bits_per_s), seconds, planned, counted)


def run_all(traffic: dict[str, np.ndarray], bits_per_s: float, repeats: int) -> dict[Key, Result]:
    """Every way of every case, in the network that it needs.

    Args:
        traffic: counts of each case, `[RANKS, EXPERTS]`.
        bits_per_s: of a NIC.
        repeats: of each.
    """
    ways, straight = {}, {}
    for case, counts in traffic.items():
        rows, rails = plan_of(counts)
        straight[case, "ECMP"] = ways[case, "direct"] = Ways.straight(rows)
        ways[case, "receiver's rail"] = Ways.along_rails(by_receiver(rows))
        ways[case, "sprayed"] = Ways.along_rails(rails)
    with Rails(NODES, RAILS, bits_per_s).build() as network:
        trials = measure(network, ways, repeats, reconnect=False)
    with Multipath(NODES, RAILS, RAILS, bits_per_s).build() as network:
        trials |= measure(network, straight, repeats, reconnect=True)
    return {key: result_of(trials[key], ways.get(key), bits_per_s) for key in trials}


def floor_s(counts: np.ndarray, bits_per_s: float) -> float:
    """Theorem 2's time, in seconds."""
    return busiest_node(plan_of(counts)[0]) * ROW_BYTES / RAILS / payload_bytes_per_s(bits_per_s)


# ---- tables --------------------------------------------------------------------------------


def seconds_table(floors_s: dict[str, float], results: dict[Key, Result]) -> Table:
    """Seconds of all ways."""
    rows: list[list[Value]] = []
    for case, floor in floors_s.items():
        over_floor = 100 * (results[case, "sprayed"].median_s / floor - 1)
        rows.append([case, floor, *(spread(results[case, way].seconds) for way in WAYS), over_floor])
    columns = {"case": ""} | dict.fromkeys(("floor", *WAYS), ".3f") | {"sprayed over the floor, %": "+.1f"}
    return Table(columns, rows)


def saved_table(floors_s: dict[str, float], results: dict[Key, Result]) -> Table:
    """What spraying saves, and what a NIC's counters say beside the plan."""
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
    """Return median seconds of all ways as other programs read them."""
    rows: list[list[Value]] = []
    for case, counts in traffic.items():
        medians = (results[case, way].median_s for way in WAYS)
        rows.append([case, digest_of(plan_of(counts)[0]), NIC_BITS_PER_S, *medians])
    columns = {"case": "", "digest of rows": "", "nic_bits_per_s": ".0f"}
    return Table(columns | dict.fromkeys(WAYS, ".6f"), rows)


def digest_of(rows: np.ndarray) -> str:
    """Return the start of the SHA-256 of the rows between ranks, which names a case's traffic.

    Args:
        rows: `[RANKS, RANKS]` integers.
    """
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


def main() -> None:
    """All cases."""
    sandbox.enter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out_option(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the workloads that are drawn")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"NICs of {NIC_BITS_PER_S / 1e6:.0f} Mbit/s, {REPEATS} repetitions; load {load:.1f}", flush=True)
    traffic = {name: scaled(weights, NODE_ROWS) for name, weights in cases(arguments.seed).items()}
    results = run_all(traffic, NIC_BITS_PER_S, REPEATS)
    floors_s = {name: floor_s(counts, NIC_BITS_PER_S) for name, counts in traffic.items()}
    tables = {"seconds": seconds_table(floors_s, results), "saved": saved_table(floors_s, results)}
    tables["measured"] = measured_table(traffic, results)
    report(tables, arguments.out)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

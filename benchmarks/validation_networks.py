"""Validation of the simulator against the real networks of `benchmarks.network`, without fits.

For a layer between two datacenters, the results contain the time of the same program without a rate limit, measured
once for all rates. A prediction may use this time, or the time with experts at home only, or neither.
"""

from collections.abc import Callable
from operator import itemgetter

import numpy as np

from benchmarks.bench_sim_networks import AT_ONCE, RESULTS, Row, measured, rail_points, simulated
from benchmarks.network.bench_rails import NODE_ROWS
from benchmarks.network.rail_cases import NODES, RAILS, cases, scaled, sprayed
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.ways import ROW_BYTES
from benchmarks.validation import Check, Pairs, ratios
from jax_moe_lb.core.plan import rows_between
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Links
from jax_moe_lb.sim.network import flow, seconds
from jax_moe_lb.transport.wave_rows import WaveRows

LONG_S = 0.4
"""Minimum seconds of a step dominated by the link."""

LINK_RATES = (0.9, 1.1)
"""Other assumed link rates, x the shaper's rate."""


def datacenters() -> list[Check]:
    """Return checks of a layer with and without expert domains, on a link of 100 to 1000 Mbit/s."""
    rows = measured(RESULTS, "network_hybridep")
    long = [row for row in rows if row["measured_s"] >= LONG_S]
    ways: dict[str, Callable[[Row], float]] = {
        "its time without the link": itemgetter("unlimited_s"),
        "the time without the link of experts at home": lambda row: _at_home(rows)[_sizes(row)]["unlimited_s"],
        "none": lambda row: 0.0,
    }
    checks = []
    for known, rest in ways.items():
        for name, some in (("steps", rows), (f"steps of {LONG_S} s or more", long)):
            of = "a layer between two processes, seconds of "
            checks.append(_datacenters(of + name, known, rest, some, rows))
    return checks


def _datacenters(predicted: str, known: str, rest: Callable[[Row], float], some: list[Row], rows: list[Row]) -> Check:
    def pairs(of: list[Row], rate: float = 1.0) -> Pairs:
        return [(simulated(row, rate).step_s + rest(row), row["measured_s"]) for row in of]

    others = [row for row in some if (row["dc"], row["gpu"]) != (1, 1)]
    plain = _at_home(rows)
    speedups = ratios(pairs(others), pairs([plain[_sizes(row)] for row in others]))
    assumptions = {f"{rate:g} of the link's rate": pairs(some, rate) for rate in LINK_RATES}
    source = "benchmarks.network.bench_hybridep"
    return Check(source, predicted, known, pairs(some), "experts at home", speedups, assumptions)


def _sizes(row: Row) -> tuple[float, int, int]:
    return row["wan_bits_per_s"], row["token_bytes"], row["expert_bytes"]


def _at_home(rows: list[Row]) -> dict[tuple[float, int, int], Row]:
    """Return the rows of plain expert parallelism."""
    return {_sizes(row): row for row in rows if (row["dc"], row["gpu"]) == (1, 1)}


def rails() -> list[Check]:
    """Return checks of all-to-alls between eight interfaces: by the simulator's links, and by flows of
    `benchmarks/fabric`.
    """
    results = measured(RESULTS, "network_rails")
    by_flows = {(p.case, p.way): (p.simulated_s, p.measured_s) for p in rail_points(results)}
    bits_per_s = results[0]["nic_bits_per_s"]
    known = {key: pair[1] for key, pair in by_flows.items()}
    checks = []
    for name, found in (("flows of benchmarks/fabric", None), ("links of the simulator", _by_links(bits_per_s, 1.0))):
        pairs = by_flows if found is None else {key: (found[key], known[key]) for key in by_flows}
        others = [key for key in pairs if key[1] != "direct"]
        speedups = ratios([pairs[key] for key in others], [pairs[key[0], "direct"] for key in others])
        under = {
            f"{rate:g} of the interfaces' rate": [(s, known[key]) for key, s in _by_links(bits_per_s, rate).items()]
            for rate in LINK_RATES
            if found is not None
        }
        predicted = f"an all-to-all, seconds, by {name}"
        source = "benchmarks.network.bench_rails"
        checks.append(Check(source, predicted, "none", list(pairs.values()), "direct", speedups, under))
    return checks


def _by_links(bits_per_s: float, rate: float) -> dict[tuple[str, str], float]:
    """Return the seconds of every case and way, by `sim.network`."""
    nics = Links("node", NODES, rate * payload_bytes_per_s(bits_per_s), RAILS)
    # Links inside nodes are unlimited.
    cluster = Cluster((nics, Links("gpu", RAILS, AT_ONCE)))
    dispatch, times = systems.rails().dispatch, {}
    for name, weights in cases(0).items():
        counts = scaled(weights, NODE_ROWS)
        plan = sprayed(counts)
        rows = rows_between(counts, plan)
        ways = {"direct": rows, "receiver's rail": _at_receivers_rail(rows), "sprayed": None}
        for way, matrix in ways.items():
            wave = WaveRows(counts, plan, per_token=1)
            hops = dispatch.cost().hops(wave, cluster.topology()) if matrix is None else (matrix,)
            times[name, way] = sum(seconds(flow(hop * ROW_BYTES, cluster), cluster) for hop in hops)
    return times


def _at_receivers_rail(rows: np.ndarray) -> np.ndarray:
    """Return rows with all traffic of a node to a rank sent by the interface of that rank's offset."""
    nodes = rows.reshape(NODES, RAILS, NODES, RAILS)
    sent = np.zeros_like(nodes)
    for offset in range(RAILS):
        sent[:, offset, :, offset] = nodes[:, :, :, offset].sum(1)
    return sent.reshape(rows.shape)

"""The simulator against real networks: measured and simulated seconds and bytes of every point.

It reads the table `measured` of two benchmarks in `benchmarks/results/`. No value is fitted: the link rate is the
shaper's rate minus headers.

- `network_hybridep.json`, of `benchmarks.network.hybridep`: one MoE layer between two processes on a shaped link.
  The time besides the link is the time of the same program without a rate limit, given in the file; simulated experts
  take no time.
- `network_rails.json`, of `benchmarks.network.rails`: all-to-alls between two nodes of four NICs. ECMP is
  omitted, as the simulator does not model the kernel's hash.
"""

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.network.rail_cases import NODES, RAILS, cases, scaled, sprayed
from benchmarks.network.rails import NODE_ROWS, digest_of
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.ways import ROW_BYTES
from benchmarks.papers.flows import simulate as flow_simulation
from benchmarks.papers.paths import Fabric, spine_paths
from benchmarks.papers.policies import hashed_flows, planned_flows
from benchmarks.render.results import Table, Value, load
from jax_moe_lb import Buffers, plain
from jax_moe_lb.core.plan import rows_between
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape, Report, simulate
from jax_moe_lb.transport import Codec, CodecBase

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]
AT_ONCE = 1e15
"""Rate with negligible time, for work already contained in the file's calibration."""


def measured(results: Path, run: str) -> list[Row]:
    """Return the rows of a run's table `measured`, by the names of its columns."""
    return load(results / f"{run}.json")["measured"].dicts()


def simulated(row: Row) -> Report:
    sizes = [row[name] for name in ("width", "inner", "num_experts", "per_tok", "num_tokens")]
    model = ModelShape(1, *sizes, itemsize=4, gated=False, pre_expert_s=0.0)
    wan = Links("dc", 2, payload_bytes_per_s(row["wan_bits_per_s"]))
    cluster = Cluster((wan, Links("gpu", 2, AT_ONCE)), AnalyticGemm(AT_ONCE, 0.0, 0.0))
    copies = model.tokens * model.per_token // model.experts
    counts = np.full((cluster.num_ranks, model.experts), copies, np.int32)
    migration = Migration((row["dc"], row["gpu"]), Codec(row["ratio"], CodecBase.SHARED, gradient_ratio=1.0))
    return simulate(plain(Buffers(headroom=1.0)), model, cluster, counts, migration=migration)


class Point(NamedTuple):
    """Deviations of a simulated step from the measured one, in percent."""

    encoded: bool
    measured_s: float
    seconds_off: float
    bytes_off: float


def point_of(row: Row) -> Point:
    report = simulated(row)
    sent = report.level_bytes["dc"] / 2  # sum over both datacenters
    seconds = report.step_s + row["unlimited_s"]
    off = (100 * (mine / its - 1) for mine, its in ((seconds, row["measured_s"]), (sent, row["counted_bytes"])))
    return Point(row["ratio"] > 1, row["measured_s"], *off)


def summary(points: list[Point]) -> Table:
    """Return medians and ranges, of long steps and of all steps, plain and encoded."""
    rows: list[list[Value]] = []
    for encoded, least_s in itertools.product((False, True), (0.4, 0.0)):
        some = [point for point in points if point.encoded == encoded and point.measured_s >= least_s]
        name = "encoded" if encoded else "experts as they are"
        name += f", steps of {least_s} s or more" if least_s else ""
        cells = [_spread([point.seconds_off for point in some]), _spread([point.bytes_off for point in some])]
        rows.append([name, len(some), *cells])
    return Table({"": "", "points": "d", "seconds %": "", "bytes %": ""}, rows)


def _spread(values: list[float]) -> str:
    low, median, high = np.quantile(values, [0, 0.5, 1])
    return f"{median:+.1f} ({low:+.1f} to {high:+.1f})"


# ---- rails ---------------------------------------------------------------------


class RailPoint(NamedTuple):
    case: str
    way: str
    measured_s: float
    simulated_s: float


def rail_points(results: list[Row]) -> list[RailPoint]:
    """Return all cases and ways except ECMP."""
    # One spine without a rate limit, and unlimited links inside nodes.
    fabric = Fabric(NODES, RAILS, payload_bytes_per_s(results[0]["nic_bits_per_s"]), AT_ONCE, 1, AT_ONCE)
    measured_cases, points = {row["case"]: row for row in results}, []
    for name, weights in cases(0).items():
        counts, case = scaled(weights, NODE_ROWS), measured_cases[name]
        plan = sprayed(counts)
        rows = rows_between(counts, plan)
        if digest_of(rows) != case["digest of rows"]:
            raise ValueError(f"case {name!r} of the results sends other rows than the case of this name")
        flows = {
            "direct": hashed_flows(rows, fabric, ROW_BYTES, spine_paths, lanes=1, seed=0),
            "receiver's rail": planned_flows(counts, replace(plan, rails=None), fabric, ROW_BYTES),
            "sprayed": planned_flows(counts, plan, fabric, ROW_BYTES),
        }
        for way, some in flows.items():
            points.append(RailPoint(name, way, case[way], flow_simulation(some, fabric, None, 0.0, 0).seconds))
    return points


def rail_table(points: list[RailPoint]) -> Table:
    """Return measured and simulated seconds, and the deviation in percent."""
    columns = {"case": ""}
    for way in dict.fromkeys(point.way for point in points):
        columns |= {f"{way}: measured s": ".3f", f"{way}: simulated s": ".3f", f"{way}: deviation, %": "+.1f"}
    rows: list[list[Value]] = []
    for case in dict.fromkeys(point.case for point in points):
        some = [(point.measured_s, point.simulated_s) for point in points if point.case == case]
        rows.append([case, *(number for m, s in some for number in (m, s, 100 * (s / m - 1)))])
    return Table(columns, rows, "All-to-alls between NICs")


def tables(results: Path) -> dict[str, Table]:
    points = [point_of(row) for row in measured(results, "network_hybridep")]
    by_rail = rail_points(measured(results, "network_rails"))
    return {"summary": summary(points), "rails": rail_table(by_rail)}


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return tables(RESULTS)

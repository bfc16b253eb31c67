"""The simulator against real networks: seconds and bytes of every measured point beside the simulated ones.

Run it with `python -m benchmarks.bench_sim_networks`. It reads `benchmarks/results/two_datacenters.json`, what
`benchmarks.network.bench_hybridep` measured of one MoE layer between two processes on a shaped link. Nothing is fitted:
the link's rate is the shaper's less headers; what a step takes beside the link is that of the same program without a
limit on it, which stands in the file, and the simulated experts take no time.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.shaping import payload_bytes_per_s
from jax_moe_lb import Codec, plain
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape, Report, simulate

MEASURED = Path(__file__).parent / "results" / "two_datacenters.json"
AT_ONCE = 1e15
"""A rate that takes no time: of what the file's own calibration contains."""


def simulated(row: dict[str, Any]) -> Report:
    """The step of one measured row."""
    sizes = row["sizes"]
    model = ModelShape(
        layers=1,
        hidden=sizes["width"],
        inner=sizes["inner"],
        experts=sizes["num_experts"],
        per_token=sizes["per_tok"],
        tokens=sizes["num_tokens"],
        itemsize=4,
        gated=False,
        pre_expert_s=0.0,
    )
    wan = Links("dc", 2, payload_bytes_per_s(row["wan_bits_per_s"]))
    cluster = Cluster((wan, Links("gpu", 2, AT_ONCE)), AnalyticGemm(AT_ONCE, 0.0, 0.0))
    copies = model.tokens * model.per_token // model.experts
    counts = np.full((cluster.num_ranks, model.experts), copies, np.int32)
    migration = Migration(tuple(row["domain_sizes"]), Codec(row["ratio"]))
    return simulate(plain(headroom=1.0), model, cluster, counts, migration=migration)


@dataclass(frozen=True)
class Point:
    """One measured row beside the simulated one.

    Args:
        row: rate and sizes.
        column: domain sizes and ratio.
        encoded: whether experts travelled encoded.
        measured_s: median.
        simulated_s: link and calibration.
        counted_bytes: that a datacenter sent, median.
        simulated_bytes: likewise.
    """

    row: str
    column: str
    encoded: bool
    measured_s: float
    simulated_s: float
    counted_bytes: float
    simulated_bytes: float

    @property
    def seconds_off(self) -> float:
        """Of the simulated from the measured, in percent."""
        return 100 * (self.simulated_s / self.measured_s - 1)

    @property
    def bytes_off(self) -> float:
        """Likewise."""
        return 100 * (self.simulated_bytes / self.counted_bytes - 1)


def point_of(row: dict[str, Any]) -> Point:
    """Measured and simulated."""
    report, domains = simulated(row), " x ".join(map(str, row["domain_sizes"]))
    megabytes = " | ".join(f"{row[key] / 1e6:.2f}" for key in ("token_bytes", "expert_bytes"))
    return Point(
        row=f"{row['wan_bits_per_s'] / 1e6:.0f} | {megabytes}",
        column=domains + (f", CR {row['ratio']:.0f}" if row["domain_sizes"] != [1, 1] else ""),
        encoded=row["ratio"] > 1,
        measured_s=float(np.median(row["measured_s"])),
        simulated_s=report.step_s + float(np.median(row["unlimited_s"])),
        counted_bytes=float(np.median(row["counted_bytes"])),
        simulated_bytes=report.level_bytes["dc"] / 2,  # of both datacenters together
    )


def matrix(points: list[Point], off: Callable[[Point], float]) -> str:
    """Deviations of all points in percent."""
    columns = list(dict.fromkeys(point.column for point in points))
    lines = ["| Mbit/s | tokens MB | experts MB | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for row in dict.fromkeys(point.row for point in points):
        cells = {point.column: f"{off(point):+.0f}" for point in points if point.row == row}
        lines.append(f"| {row} | " + " | ".join(cells[column] for column in columns) + " |")
    return "\n".join(lines)


def summary(points: list[Point]) -> str:
    """Medians and ranges, of long steps and of all, as they are and encoded."""
    lines = ["| | points | seconds % | bytes % |", "|---|---|---|---|"]
    for encoded in (False, True):
        for least_s in (0.4, 0.0):
            some = [point for point in points if point.encoded == encoded and point.measured_s >= least_s]
            name = ("encoded" if encoded else "experts as they are") + (
                f", steps of {least_s} s or more" if least_s else ""
            )
            cells = [_spread([off(point) for point in some]) for off in (_seconds_off, _bytes_off)]
            lines.append(f"| {name} | {len(some)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    low, median, high = np.quantile(values, [0, 0.5, 1])
    return f"{median:+.1f} ({low:+.1f} to {high:+.1f})"


def _seconds_off(point: Point) -> float:
    return point.seconds_off


def _bytes_off(point: Point) -> float:
    return point.bytes_off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--json", action="store_true", help="every point, in full")
    given = parser.parse_args()
    points = [point_of(row) for row in json.loads(given.measured.read_text())]
    if given.json:
        print(json.dumps([asdict(point) for point in points], indent=1))
        return
    print("Simulated less measured seconds, %\n\n" + matrix(points, _seconds_off))
    print("\nSimulated less counted bytes, %\n\n" + matrix(points, _bytes_off))
    print("\n" + summary(points))


if __name__ == "__main__":
    main()

"""One MoE layer across two datacenters: fastest domain size, measured and predicted.

Requires a sandbox, see `sandbox.py`. Two processes of two devices each, in network namespaces, have 100 to 1000 Mbit/s
between them. The benchmark measures and predicts seconds of a step (forward and backward) and bytes on the link, for
every domain size and compression ratio.

Predicted seconds are the model's time on the link plus the time of the same program without a rate limit.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.jax_ranks import Timed, launch_jax, timed_at
from benchmarks.network.launch import Rank
from benchmarks.network.layer import CHOICES, RATIOS, Choice, Sizes, jitted_step, wan_bytes, wan_s, work_of
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.topologies import two_datacenters
from benchmarks.render.results import Table, Value, spread
from jax_moe_lb.core import Level
from jax_moe_lb.sim.stream_model import choose_level

RATES_BITS_PER_S = (100e6, 300e6, 1000e6)

TOKENS_AND_INNER = ((1024, 16), (512, 64), (256, 256))
"""`T` and `F`: from many tokens and small experts to the reverse."""

NEAR_THE_CROSSOVER = ((384, 80), (384, 96), (384, 128))
"""`T` and `F` for which the model predicts similar times of plain expert parallelism and of domains across
datacenters.
"""

WIDTH = 512

DEVICES_PER_PROCESS = 2

DEADLINE_S = 600
"""Time limit of one configuration in seconds."""

CLEARLY = 1.2
"""Minimum ratio of two predictions for a definite winner."""


# ---- a rank --------------------------------------------------------------------


def body(rank: Rank, sizes: Sizes, repeats: int) -> list[list[Timed]]:
    """Return the times of every program at every rate; rank 0 also sets the rate and reads the counters."""
    rates = None, *RATES_BITS_PER_S
    return [
        list(timed_at(rank, *jitted_step(one, sizes), rates, repeats, f"{sizes}, {one}").values()) for one in CHOICES
    ]


# ---- the parent ----------------------------------------------------------------


def measure(num_tokens: int, inner: int, repeats: int) -> list[dict[str, Any]]:
    """Return one row per program and rate."""
    sizes, options = Sizes(num_tokens, WIDTH, inner), {"devices_per_process": DEVICES_PER_PROCESS}
    with two_datacenters(1) as network:
        ranks = launch_jax(network, lambda rank: body(rank, sizes, repeats), deadline_s=DEADLINE_S, **options)
    programs = zip(CHOICES, zip(*ranks, strict=True), strict=True)
    return [row for choice, of_ranks in programs for row in rows_of(sizes, choice, of_ranks)]


def rows_of(sizes: Sizes, choice: Choice, of_ranks: Sequence[Sequence[Timed]]) -> list[dict[str, Any]]:
    """Return predictions and measurements of one program at every rate."""
    # The slowest rank determines the step.
    unlimited_s, *limited_s = np.max([[seconds for seconds, _ in times] for times in of_ranks], 0).tolist()
    common = {
        "sizes": sizes,
        "token_bytes": sizes.token_bytes,
        "expert_bytes": sizes.expert_bytes,
        "domain_sizes": [choice.dc, choice.gpu],
        "ratio": choice.ratio,
        "predicted_bytes": wan_bytes(sizes, choice),
        "unlimited_s": unlimited_s,
    }
    rows = []
    for rate, seconds, (_, counted) in zip(RATES_BITS_PER_S, limited_s, of_ranks[0][1:], strict=True):
        predicted_s = wan_s(sizes, choice, payload_bytes_per_s(rate)) + float(np.median(unlimited_s))
        measured = {"counted_bytes": counted, "predicted_s": predicted_s, "measured_s": seconds}
        rows.append({**common, "wan_bits_per_s": rate, **measured})
    return rows


_SIZES = ("num_tokens", "width", "inner", "num_experts", "per_tok", "token_bytes", "expert_bytes", "dc", "gpu")
MEASURED = {"wan_bits_per_s": ".0f", **dict.fromkeys(_SIZES, "d"), "ratio": ".0f"}
MEASURED |= {"unlimited_s": ".6f", "measured_s": ".6f", "counted_bytes": ".0f"}
"""Columns of measured points compared with the simulator; the last three are medians of the repetitions."""


def measured_table(rows: list[dict[str, Any]]) -> Table:
    """Return all points in the format read by other programs."""
    lines: list[list[Value]] = []
    for row in rows:
        dc, gpu = row["domain_sizes"]
        medians = {name: float(np.median(row[name])) for name in ("unlimited_s", "measured_s", "counted_bytes")}
        point = {**row, **vars(row["sizes"]), "dc": dc, "gpu": gpu, **medians}
        lines.append([point[name] for name in MEASURED])
    return Table(MEASURED, lines)


def winners(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the model's choice across datacenters and the fastest, for every rate, sizes and ratio."""
    points = []
    for first in (row for row in rows if row["domain_sizes"] == [1, 1]):
        alike = [row for row in rows if all(row[key] == first[key] for key in ("wan_bits_per_s", "sizes"))]
        for ratio in RATIOS:
            candidates = [row for row in alike if row["ratio"] == ratio or row["domain_sizes"] == [1, 1]]
            rate = payload_bytes_per_s(first["wan_bits_per_s"]) / DEVICES_PER_PROCESS
            choice = choose_level(work_of(first["sizes"], ratio), Level("dc", 2, rate))
            best = min(candidates, key=lambda row: np.median(row["measured_s"]))
            predicted = [min(row["predicted_s"] for row in candidates if row["domain_sizes"][0] == dc) for dc in (1, 2)]
            point = {"row": first, "ratio": ratio, "model": choice.best.domain_size, "measured": best["domain_sizes"]}
            point["clear"] = max(predicted) > CLEARLY * min(predicted)
            point["speedup"] = float(np.median(first["measured_s"]) / np.median(best["measured_s"]))
            points.append(point)
    return points


def table(rows: list[dict[str, Any]]) -> Table:
    """Return predicted and measured seconds of plain expert parallelism and of domains across the datacenters."""
    columns = {"Mbit/s": ".0f", "tokens MB": ".2f", "experts MB": ".2f"}
    for head in ("1 x 1", *(f"2 x 1, CR {ratio:.0f}" for ratio in RATIOS)):
        columns |= {f"{head}: predicted s": ".2f", f"{head}: measured s": ".2f"}
    lines: list[list[Value]] = []
    for first in (row for row in rows if row["domain_sizes"] == [1, 1]):
        alike = [row for row in rows if all(row[key] == first[key] for key in ("wan_bits_per_s", "sizes"))]
        across = [row for row in alike if row["domain_sizes"] == [2, 1]]
        cells: list[Value] = [first[key] / 1e6 for key in ("wan_bits_per_s", "token_bytes", "expert_bytes")]
        for row in (first, *across):
            cells += [row["predicted_s"], spread(np.array(row["measured_s"]))]
        best = min(alike, key=lambda row: np.median(row["measured_s"]))
        gain = np.median(first["measured_s"]) / np.median(best["measured_s"])
        name = " x ".join(map(str, best["domain_sizes"])) + f", CR {best['ratio']:.0f}" * (best is not first)
        lines.append([*cells, name, float(gain)])
    return Table(columns | {"fastest of all": "", "plain's time over its": ".1f"}, lines, notes=summary(rows))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return deviations of bytes and seconds from the predictions, and how often the model chose the fastest."""
    bytes_off = [
        (row["predicted_bytes"], counted / row["predicted_bytes"] - 1)
        for row in rows
        for one in row["counted_bytes"]
        for counted in one
    ]
    seconds_off = [np.median(row["measured_s"]) / row["predicted_s"] - 1 for row in rows]
    found = winners(rows)
    points = [point for point in found if point["clear"]]
    hits = [point for point in points if point["model"] == point["measured"][0]]
    right = [point for point in found if point["model"] == point["measured"][0]]
    decisions = {(row["token_bytes"], row["expert_bytes"], point["model"]) for point in found for row in [point["row"]]}
    lines = [
        *(
            f"Bytes counted over predicted, steps of at least {least / 1e6:.0f} MB: "
            f"{min(off for size, off in bytes_off if size >= least):+.1%} to "
            f"{max(off for size, off in bytes_off if size >= least):+.1%}."
            for least in (0, 2e6)
        ),
        f"Seconds measured over predicted: median {np.median(seconds_off):+.1%}, "
        f"{min(seconds_off):+.1%} to {max(seconds_off):+.1%}.",
        f"The model's domain size across datacenters is that of the fastest in {len(hits)} of the {len(points)} clear "
        f"points, and in {len(right)} of all {len(found)}. There are {len(decisions)} distinct pairs "
        "of sizes and chosen domain size; other parameters do not change the choice.",
    ]
    for point in points:
        if point not in hits:
            row = point["row"]
            lines.append(
                f"Missed: {row['wan_bits_per_s'] / 1e6:.0f} Mbit/s, tokens {row['token_bytes'] / 1e6:.2f} MB, "
                f"experts {row['expert_bytes'] / 1e6:.2f} MB, CR {point['ratio']:.0f}: "
                f"the model says {point['model']}, fastest was {point['measured']}."
            )
    return [*lines, f"Largest speed-up over plain: {max(point['speedup'] for point in found):.2f}."]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--near", action="store_true", help="Use sizes near the crossover.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    sandbox.enter()
    rows: list[dict[str, Any]] = []
    for num_tokens, inner in NEAR_THE_CROSSOVER if given.near else TOKENS_AND_INNER:
        rows += measure(num_tokens, inner, given.repeats)
    return {"points": table(rows), "measured": measured_table(rows)}

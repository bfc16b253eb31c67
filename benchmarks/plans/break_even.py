"""Break-even of balancing: tokens per rank, expert size and skew, simulated.

The simulation is of one layer, forward and backward, on the preset `h100_node` (8 H100, assumed rates), with 64
experts, top-4, width 4096 and bfloat16. It gives the time of `exact` with two replica slots relative to plain, the
median over the four load shapes. The same is given for `exact` with `Cost()`, which keeps the plain plan if balancing
does not pay.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.render.results import Table, Value, picture_file
from jax_moe_lb import Cost, exact, plain
from jax_moe_lb.advise.advise import WORTH_IT
from jax_moe_lb.advise.choice import Candidate
from jax_moe_lb.advise.evaluate import Workload, drawn_workloads
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, LoadShape, ModelShape, simulate
from jax_moe_lb.sim.config import load_config

TOKENS = tuple(2**power for power in range(5, 15))
INNER = (512, 2048, 8192)
SKEWS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
REPLICA_SLOTS = 2
# Without a cost, for the break-even point; `exact()` itself has one.
EXACT = Candidate("exact", replace(exact(REPLICA_SLOTS), balancer=Exact()))
GUARDED = Candidate("exact with Cost()", replace(EXACT.system, balancer=Exact(cost=Cost())))

DARK = 0.7
"""Absolute log2 of a ratio above which its cell is dark."""

Surface = dict[int, np.ndarray]
"""Time ratio to plain, `[skews, tokens]`, by inner width."""


def model_of(tokens: int, inner: int) -> ModelShape:
    return ModelShape(1, 4096, inner, experts=64, per_token=4, tokens=tokens)


def step_s(candidate: Candidate, model: ModelShape, cluster: Cluster, workload: Workload) -> float:
    return simulate(candidate.system, model, cluster, workload.counts, migration=candidate.migration).step_s


def over_plain(candidate: Candidate, model: ModelShape, cluster: Cluster, skew: float) -> float:
    """Return the time ratio to plain, the median over load shapes; more than four loads change little."""
    base = Candidate("plain", plain())
    workloads = drawn_workloads(model, cluster.num_ranks, skew, 1, list(LoadShape), draws=1, seed=0)
    ratios = [step_s(candidate, model, cluster, one) / step_s(base, model, cluster, one) for one in workloads]
    return float(np.median(ratios))


def surface(candidate: Candidate, cluster: Cluster, tokens: tuple[int, ...]) -> Surface:
    return {
        inner: np.array([[over_plain(candidate, model_of(t, inner), cluster, skew) for t in tokens] for skew in SKEWS])
        for inner in INNER
    }


def break_even(found: Surface, guarded: Surface, tokens: tuple[int, ...]) -> Table:
    """Return the token count above which `exact` stays faster by 1 %, and extreme and final time ratios of both."""
    rows: list[list[Value]] = []
    for inner, ratios in found.items():
        expert_mb = model_of(1, inner).expert_bytes / 1e6
        for skew, of_skew, of_guarded in zip(SKEWS, ratios, guarded[inner], strict=True):
            slower = np.flatnonzero(of_skew > 1 - WORTH_IT)
            first = 0 if not len(slower) else slower[-1] + 1
            text = f"{tokens[first]}" if first < len(tokens) else "never"
            ends = of_skew.max(), of_skew[-1], of_guarded.max(), of_guarded[-1]
            rows.append([inner, expert_mb, skew, text, *ends])
    columns = {"inner width": "d", "an expert, MB": ".1f", "skew": ".2f", "pays from tokens per rank": ""}
    for name in (EXACT.name, GUARDED.name):
        columns |= {f"{name} / plain at most": ".2f", f"{name} / plain at {tokens[-1]}": ".2f"}
    return Table(columns, rows)


def draw(found: Surface, tokens: tuple[int, ...], path: Path) -> None:
    """Plot one panel per expert size."""
    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    for axes, (inner, ratios) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        image = axes.pcolormesh(range(len(tokens)), range(len(SKEWS)), np.log2(ratios), cmap="RdBu_r", vmin=-1, vmax=1)
        for (at_skew, at_tokens), ratio in np.ndenumerate(ratios):
            color = "white" if abs(np.log2(ratio)) > DARK else "black"
            axes.text(at_tokens, at_skew, f"{ratio:.2f}", ha="center", va="center", fontsize=6, color=color)
        axes.set_xticks(range(len(tokens)), map(str, tokens), rotation=60)
        axes.set_yticks(range(len(SKEWS)), map(str, SKEWS))
        axes.set(xlabel="tokens per rank", ylabel="max / mean load before", title=f"experts of 4096 x {inner}")
    bar = figure.colorbar(image, ax=figure.axes, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["0.5", "1", "2"])
    bar.set_label("time of exact / plain, simulated")
    # Omit the version of matplotlib: equal numbers give an equal file.
    figure.savefig(path, dpi=100, metadata={"Software": None})


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Use few points.")
    parser.add_argument("--plot", type=picture_file, help="Output PNG of the plot.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    cluster = load_config("cluster", "h100_node", "cluster").cluster.build()
    tokens = TOKENS[::4] if given.quick else TOKENS
    found, guarded = (surface(candidate, cluster, tokens) for candidate in (EXACT, GUARDED))
    if given.plot is not None:
        draw(found, tokens, given.plot)
    return {"break_even": break_even(found, guarded, tokens)}

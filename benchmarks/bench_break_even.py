"""Where balancing does not pay: tokens per rank, size of experts and skew, simulated.

    python -m benchmarks.bench_break_even [--quick] [--plot docs/how-to/break_even.png] [--out FILE.json]

Simulated is one layer, forward and backward, on the preset `h100_node` (8 H100, assumed rates), 64 experts, top-4,
width 4096, bfloat16: the time of `exact` with two replica slots over that of plain, the median over the four shapes of
load, and that of `exact` with `Cost()`, which leaves a plan alone where it would not pay. `advise` gets workloads of
the same skew drawn with one seed, and what it recommends is judged on those of another. `bench_break_even_two_ranks`
measures some points.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import Cost, exact, plain
from jax_moe_lb.advise.advise import WORTH_IT, advise
from jax_moe_lb.advise.choice import Candidate, Choice
from jax_moe_lb.advise.evaluate import Evaluator, Workload, drawn_workloads
from jax_moe_lb.advise.search import Space
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, LoadShape, ModelShape, Step, simulate
from jax_moe_lb.sim.config import load_config

TOKENS = tuple(2**power for power in range(5, 15))
INNER = (512, 2048, 8192)
SKEWS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
REPLICA_SLOTS = 2
ADVISED_TOKENS = (64, 1024, 16384)
EXACT = Candidate("exact", exact(REPLICA_SLOTS))
GUARDED = Candidate("exact with Cost()", replace(EXACT.system, balancer=Exact(cost=Cost())))

DARK = 0.7
"""Beyond this binary logarithm of a ratio its cell is dark."""

Surface = dict[int, np.ndarray]
"""`[skews, tokens]`, a time over that of plain, by the inner width."""


def model_of(tokens: int, inner: int) -> ModelShape:
    """One layer."""
    return ModelShape(1, 4096, inner, experts=64, per_token=4, tokens=tokens)


def cluster_of(preset: str) -> Cluster:
    """The machine of a preset."""
    section = load_config("CLUSTER", preset).cluster
    if section is None:
        raise ValueError(f"preset {preset!r} has no cluster; expected one")
    return section.build()


def workloads_of(model: ModelShape, cluster: Cluster, skew: float, seed: int) -> list[Workload]:
    """One draw of each shape of load that can have the skew; more than four tokens hardly change it."""
    return drawn_workloads(model, cluster.num_ranks, skew, 1, list(LoadShape), draws=1, seed=seed)


def step_s(candidate: Candidate, model: ModelShape, cluster: Cluster, workload: Workload) -> float:
    """Seconds of a simulated layer."""
    if workload.counts is None:
        raise ValueError(f"workload {workload.name!r} has no counts; expected some")
    migration = candidate.migration
    return simulate(candidate.system, model, cluster, workload.counts, migration=migration).step_s


def over_plain(candidate: Candidate, model: ModelShape, cluster: Cluster, skew: float, seed: int) -> float:
    """Its time over that of plain, the median over shapes."""
    base = Candidate("plain", plain())
    workloads = workloads_of(model, cluster, skew, seed)
    ratios = [step_s(candidate, model, cluster, one) / step_s(base, model, cluster, one) for one in workloads]
    return float(np.median(ratios))


def surface(candidate: Candidate, cluster: Cluster, tokens: tuple[int, ...]) -> Surface:
    """Its time over that of plain."""
    return {
        inner: np.array(
            [[over_plain(candidate, model_of(t, inner), cluster, skew, 0) for t in tokens] for skew in SKEWS]
        )
        for inner in INNER
    }


def break_even(found: Surface, guarded: Surface, tokens: tuple[int, ...]) -> Table:
    """From how many tokens on `exact` stays faster by a percent, and the times of both at the most and at the end."""
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


def advice(cluster: Cluster, tokens: tuple[int, ...]) -> Iterator[list[Value]]:
    """What `advise` says, and how that does on another draw: a row for each point."""
    step = Step()
    for inner in INNER:
        for skew in SKEWS:
            for num_tokens in tokens:
                model = model_of(num_tokens, inner)
                drawn = workloads_of(model, cluster, skew, 0)
                space = Space(cluster, REPLICA_SLOTS, with_relocation=False)
                answer = advise(Evaluator(model, cluster, step), space, drawn, drawn)
                choice = Choice() if answer.leave_off else answer.best.choice
                ratio = over_plain(choice.build(model, cluster, step), model, cluster, skew, 7)
                ours = over_plain(EXACT, model, cluster, skew, 7)
                yield [inner, skew, num_tokens, choice.name, ratio, ours]


def agreement(rows: list[list]) -> Table:
    """Counts of what `advise` did where `exact` loses and where it wins."""
    table: list[list[Value]] = []
    for name, keep in (
        ("exact loses (above 1)", lambda ours: ours > 1),
        ("within a percent", lambda ours: 1 - WORTH_IT < ours <= 1),
        ("exact wins by more", lambda ours: ours <= 1 - WORTH_IT),
    ):
        of = [row for row in rows if keep(row[5])]
        left = sum(row[3] == "plain" for row in of)
        worse = sum(row[4] > 1 + WORTH_IT for row in of)
        worst = max((row[4] for row in of), default=None)
        table.append([name, len(of), left, len(of) - left, worse, worst])
    columns = {"on another draw": "", "points": "d", "advised plain": "d", "advised another": "d"}
    return Table(columns | {"advice slower than plain by a percent": "d", "advice / plain at worst": ".3f"}, table)


def draw(found: Surface, tokens: tuple[int, ...], path: Path) -> None:
    """Write a panel for each size of experts."""
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
    # Without the version of matplotlib, so that the same numbers make the same file.
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
    """Print the tables and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points")
    parser.add_argument("--plot", type=Path, help="where to write the plot, a PNG")
    out_option(parser)
    given = parser.parse_args()
    cluster = cluster_of("h100_node")
    tokens = TOKENS[::4] if given.quick else TOKENS
    found, guarded = (surface(candidate, cluster, tokens) for candidate in (EXACT, GUARDED))
    if given.plot is not None:
        draw(found, tokens, given.plot)
    advised = list(advice(cluster, ADVISED_TOKENS[1:2] if given.quick else ADVISED_TOKENS))
    columns = {"inner width": "d", "skew": ".2f", "tokens per rank": "d", "advised": ""}
    ends = {"advised / plain": ".3f", "exact / plain": ".3f"}
    tables = {"break_even": break_even(found, guarded, tokens), "advice": Table(columns | ends, advised)}
    tables["agreement"] = agreement(advised)
    report(tables, given.out)


if __name__ == "__main__":
    main()

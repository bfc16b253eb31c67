"""FEPLB's paper (arXiv 2604.19654) in the simulator: published and simulated numbers, and our own systems.

Four values are fitted, only to the nine numbers of the columns "before" (layer times and stragglers of products). They
are the peak rate of experts, the overhead per expert in rows (`AnalyticGemm.half_rows`), and the remaining time of a
layer. The fourth is the tokens per rank, a power of two not given by the paper. Assumed for all rows: 8 experts per
token; four fifths of NVLink's 450 GB/s in each direction; lognormal popularity, with a width fitted to the published
straggler before balancing (`stragglers.py`).
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import nnls

from benchmarks.papers import feplb
from benchmarks.papers.published import Comparison, tables_of
from benchmarks.papers.stragglers import CASES, DYNAMIC, NUM_EXPERTS, counts, sampled, width_of
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, System
from jax_moe_lb.balancers import FEPLB, Exact, FasterMoE, UltraEP
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import AnalyticGemm, Cluster, Collective, Communication, Links, ModelShape, Report, Step, simulate
from jax_moe_lb.transport import Direct, PeerCopy, TwoPhase

LAYER_MS = {
    2: {"before": (8.2, 14.9), "FasterMoE": (7.9, 14.0), "FEPLB": (7.9, 14.4)},
    4: {"before": (7.3, 13.2), "FasterMoE": (6.9, 12.2), "FEPLB": (6.8, 12.1)},
    8: {"before": (6.9, 12.5), "FasterMoE": (6.3, 11.1), "FEPLB": (6.0, 10.6)},
}
"""Table 2, forward and backward, by ranks."""

PRODUCTS_MS = {
    2: {"before": 0.316, "FasterMoE": 0.170, "FEPLB": 0.157},
    4: {"before": 0.652, "FasterMoE": 0.380, "FEPLB": 0.247},
    8: {"before": 1.110, "FasterMoE": 0.625, "FEPLB": 0.352},
}
"""Figure 5: products of the slowest rank minus the mean rank's, in ms."""

COPIES = (8192, 16384, 32768)
PER_TOK = 8
SLOTS, ROOM = 8, 8.0
NVLINK_BYTES_PER_S = 0.8 * 450e9
STEP = Step(recompute=False)
HELD_OUT_RANKS = 16
"""Ranks of the held-out prediction; the paper has 2, 4 and 8."""
HELD_OUT_MICROBATCHES = 200

SYSTEMS = {
    "before": systems.plain(Buffers(ROOM)),
    "FasterMoE": System(FasterMoE(), PeerCopy(), Direct(Buffers(ROOM)), SLOTS),
    "FEPLB": System(FEPLB(), PeerCopy(), TwoPhase(Buffers(ROOM), moved_headroom=ROOM), SLOTS),
    "FEPLB, skip": System(FEPLB(skip=True), PeerCopy(), TwoPhase(Buffers(ROOM), moved_headroom=ROOM), SLOTS),
    "FEPLB, one wave": System(FEPLB(), PeerCopy(), Direct(Buffers(ROOM)), SLOTS),
    "UltraEP": System(UltraEP(min_tokens=512), PeerCopy(), Direct(Buffers(ROOM)), SLOTS),
    "Exact": System(Exact(), PeerCopy(), Direct(Buffers(ROOM)), SLOTS),
    "Exact, eps 0.05": System(Exact(eps=0.05), PeerCopy(), Direct(Buffers(ROOM)), SLOTS),
}


@dataclass(frozen=True)
class Fit:
    """Parameters fitted to the columns "before"."""

    copies: int
    peak_flops_per_s: float = 600e12
    half_rows: float = 0.0
    rest_s: float = 0.0
    residual: float = 0.0

    def cluster(self, num_ranks: int, bytes_per_s: float = NVLINK_BYTES_PER_S) -> Cluster:
        """Return one node of GPUs; the CPU plans in 50 us, as published, and DeepEP sends counts to all ranks at
        once.
        """
        gemm, told = AnalyticGemm(self.peak_flops_per_s, self.half_rows, 0.0), Communication(Collective.DIRECT)
        links = (Links("gpu", num_ranks, bytes_per_s, latency_s=3e-6),)
        return Cluster(links, gemm, planner_s=50e-6, communication=told)

    def model(self, layers: int) -> ModelShape:
        """Return GLM-5's experts, 128 of them, with one layer per microbatch."""
        return ModelShape(layers, 6144, 2048, NUM_EXPERTS, PER_TOK, self.copies // PER_TOK, pre_expert_s=self.rest_s)

    def loads(self, number: int) -> dict[int, np.ndarray]:
        """Return loads `[number, R, E]` for each number of ranks."""
        return {case.num_ranks: counts(case, 0, number, self.copies) for case in CASES}


def run(fit: Fit, system: System, loads: np.ndarray) -> Report:
    """Simulate all microbatches in sequence."""
    return simulate(system, fit.model(len(loads)), fit.cluster(loads.shape[1]), loads, step=STEP)


def layer_ms(report: Report, number: int) -> tuple[float, float]:
    """Return forward and backward time of the mean layer, in ms."""
    forward = max(float(task.end.max()) for task in report.timeline.tasks if "(backward)" not in task.stage)
    return 1e3 * forward / number, 1e3 * (report.step_s - forward) / number


def products_ms(report: Report, number: int) -> float:
    """Return products of the slowest rank minus the mean rank's, forward, of the mean layer, in ms."""
    busy = np.zeros((number, report.timeline.num_ranks))
    for task in report.timeline.tasks:
        if task.stage == "experts":
            busy[task.layer] += task.end - task.start
    return float(1e3 * (busy.max(1) - busy.mean(1)).mean())


def fitted(number: int) -> list[Fit]:
    """Return the fit for every number of tokens, the best first."""
    return sorted((_fitted(Fit(copies), number) for copies in COPIES), key=lambda fit: fit.residual)


def _fitted(bare: Fit, number: int) -> Fit:
    """Return non-negative least squares of relative deviations from six times and three stragglers."""
    rows, wanted = [], []
    row_flops = bare.model(1).row_flops
    for num_ranks, given in bare.loads(number).items():
        report = run(bare, SYSTEMS["before"], given)
        load = given.sum(1).reshape(number, num_ranks, -1).sum(2)
        most, above = load.max(1).mean(), (load.max(1) - load.mean(1)).mean()
        for times, at_ms, ms in zip((1, 2), layer_ms(report, number), LAYER_MS[num_ranks]["before"], strict=True):
            exchanges_ms = at_ms - 1e3 * times * most * row_flops / bare.peak_flops_per_s
            rows.append(np.array([times * most, times * NUM_EXPERTS / num_ranks, times]) / ms)
            wanted.append(1 - exchanges_ms / ms)
        rows.append(np.array([above, 0.0, 0.0]) / PRODUCTS_MS[num_ranks]["before"])
        wanted.append(1.0)
    sizes = np.linalg.norm(rows, axis=0)
    found, residual = nnls(np.array(rows) / sizes, np.array(wanted))
    row_ms, expert_ms, rest_ms = (found / sizes).tolist()
    return Fit(bare.copies, row_flops / (1e-3 * row_ms), expert_ms / row_ms, 1e-3 * rest_ms, residual)


def stragglers(fit: Fit, number: int) -> list[Comparison]:
    """Return figures 5 and 6 in tokens, from the planners alone."""
    table = Comparison("figure_5_tokens", "Figure 5: token straggler (before: fitted)")
    sweep = Comparison("figure_6", "Figure 6: the token straggler on 8 ranks falls by %")
    for case in CASES:
        loads = counts(case, 0, number, fit.copies)
        plans: dict[str, Callable[[np.ndarray], feplb.Plans]] = {
            "before": feplb.plain,
            "FasterMoE": feplb.fastermoe,
            "FEPLB": feplb.feplb,
            "FEPLB, skip": partial(feplb.feplb, balancer=FEPLB(skip=True)),
        }
        known = {"before": case.straggler, "FasterMoE": case.fastermoe, "FEPLB": case.feplb}
        for name, plan in plans.items():
            found = feplb.straggler(plan(loads)).mean()
            table.add(f"{case.num_ranks} ranks, {name}", found, known.get(name), fitted=name == "before")
        if case.num_ranks == 8:
            for dynamic, percent in DYNAMIC.items():
                fewer = feplb.feplb(loads, FEPLB(num_dynamic=dynamic))
                sweep.add(f"{dynamic} dynamic experts", feplb.reduction(fewer, feplb.plain(loads)), percent)
    table.notes.append(
        "FEPLB is better than published, most on 2 and 4 ranks. The distribution of tokens over the experts of a rank "
        "is unknown, and smaller experts balance better. The choice of dynamic experts, the condition of a move and "
        "the end of the loop are our readings, selected on the paper's token stragglers (docs/systems/feplb.md). With "
        "a threshold, `tau=1792`, the stragglers fall as published on these loads."
    )
    return [table, sweep]


def exchanges_s(report: Report) -> float:
    """Return the time of dispatch and combine, forward, of all layers, in seconds."""
    return sum(report.stages[stage].busy_s for stage in ("dispatch", "combine"))


OURS = ("forward", "backward", "exposed weight transfer, forward", "exchanges, forward")


def layers(fit: Fit, loads: dict[int, np.ndarray]) -> tuple[list[Comparison], Table]:
    """Return table 2 and figure 5 in time, and every system in milliseconds."""
    times = Comparison("table_2", "Table 2: ms of an MoE layer (before: fitted)")
    products = Comparison("figure_5_products", "Figure 5: straggler of the products, ms, forward (before: fitted)")
    rows: list[list[Value]] = []
    for ranks, given in loads.items():
        for name, system in SYSTEMS.items():
            report, label = run(fit, system, given), f"{ranks} ranks, {name}"
            forward, backward = layer_ms(report, len(given))
            straggler_ms, first = PRODUCTS_MS[ranks].get(name), name == "before"
            products.add(label, products_ms(report, len(given)), straggler_ms, fitted=first)
            known = LAYER_MS[ranks].get(name)
            if known is not None:
                times.add(f"{label}, forward", forward, known[0], fitted=first)
                times.add(f"{label}, backward", backward, known[1], fitted=first)
            weights = report.stages.get("weights")
            exposed = 0.0 if weights is None else 1e3 * weights.exposed_s / len(given)
            exchanges = 1e3 * exchanges_s(report) / len(given)
            rows.append([f"{ranks} ranks", name, forward, backward, exposed, exchanges])
    times.notes.append(
        f"Fitted: {fit.copies} token copies on a rank, {fit.peak_flops_per_s * 1e-12:.0f} TFLOP/s, "
        f"{fit.half_rows:.0f} rows, {1e3 * fit.rest_s:.2f} ms. Tutel and Triton Distributed are not in this "
        "library. Published gains are larger. FasterMoE's weight copies are exposed here; in the paper they run on "
        "copy engines beside the products."
    )
    columns = {"ranks": "", "system": ""} | dict.fromkeys(OURS, ".2f")
    return [times, products], Table(columns, rows, "Ours: ms of an MoE layer")


def held_out(fit: Fit, number: int) -> Table:
    """Return predictions for 16 ranks of one NVLink domain, on which neither the rule nor a number was selected."""
    widths = [width_of(case, 0, number, fit.copies) for case in CASES]
    line = np.polyfit(np.log2([case.num_ranks for case in CASES]), widths, 1)
    ends = {"as on 8 ranks": widths[-1], "continued to 16": float(np.polyval(line, np.log2(HELD_OUT_RANKS)))}
    columns = {"popularity": "", "width": ".2f", "token straggler before": ".0f"}
    columns |= {"FEPLB, % less": ".1f", "FEPLB, tau 1792, % less": ".1f"}
    columns |= {f"{name} {which}, ms": ".2f" for which in ("before", "FEPLB") for name in ("forward", "backward")}
    rows: list[list[Value]] = []
    for name, width in ends.items():
        loads = sampled(HELD_OUT_RANKS, width, 0, number, fit.copies)
        before = feplb.plain(loads)
        cuts = [feplb.reduction(feplb.feplb(loads, FEPLB(tau=tau)), before) for tau in (1, 1792)]
        times = [layer_ms(run(fit, SYSTEMS[one], loads), number) for one in ("before", "FEPLB")]
        rows.append([name, width, float(feplb.straggler(before).mean()), *cuts, *times[0], *times[1]])
    return Table(columns, rows, f"{HELD_OUT_RANKS} ranks of one NVLink domain: predicted, not published")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=60, help="Microbatches to simulate.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    fit = fitted(given.number)[0]
    tables, ours = layers(fit, fit.loads(given.number))
    tables += stragglers(fit, 2000)
    return tables_of(tables) | {"ours": ours, "held_out": held_out(fit, HELD_OUT_MICROBATCHES)}

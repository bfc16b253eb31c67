"""Cost of stale plans: EPLB at several periods against plans of the microbatch, on recorded and synthetic loads.

The recordings in `benchmarks/traces` are of 200 steps of the preset tiny. A drift model is fitted to seed 0, and its
samples are compared with the held-out seed 1, if there is one. Planners then run on the last recording and on samples.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.render.results import Table, spread
from jax_moe_lb import Topology
from jax_moe_lb.balancers import EPLB, EPLBPlus, Exact, Plain
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.cli.planning import PlanRunner
from jax_moe_lb.sim import Drift, ModelShape, drifting_counts, fitted_drift
from jax_moe_lb.sim.drift import moments

TRACES = Path(__file__).parents[1] / "traces"
KINDS = {"no router loss": ("free_0",), "balance loss 1e-2": ("loss_0", "loss_1")}
PHASES = {"steps 16-63": slice(16, 64), "steps 128-199": slice(128, 200)}
"""Training phases. In the first, routers still change, and a period of 64 steps has no plan yet."""

MODEL = ModelShape(layers=4, hidden=128, inner=128, experts=16, per_token=2, tokens=512)
"""The preset tiny on eight ranks."""

LAGS, DRAWS, PERIODS = (1, 4, 16), 16, (64, 16, 4, 1)


def recorded(kind: str, run: int) -> np.ndarray:
    """Return the counts [steps, layers, R, E] of a training run."""
    with np.load(TRACES / f"{KINDS[kind][run]}.npz") as file:
        return file["counts"].astype(np.int32)


def imbalances(trace: np.ndarray) -> np.ndarray:
    """Return max/mean home load of the ranks, [steps, layers]."""
    load = trace.sum(2).reshape(*trace.shape[:2], trace.shape[2], -1).sum(3)
    return load.max(2) / load.mean(2)


def cases() -> Iterator[tuple[str, str, Drift]]:
    """Yield each kind of training and phase, with the drift fitted to its first run."""
    for kind in KINDS:
        for phase, steps in PHASES.items():
            yield kind, phase, fitted_drift(recorded(kind, 0)[steps], MODEL.per_token)


def fits() -> Table:
    """Return the fitted parameters, as printed by `jax-moe-lb drift`."""
    shares = dict.fromkeys(("spread", "steady", "drifting", "fresh"), ".3f")
    rows = [[kind, phase, d.spread, d.steady, d.drifting, d.fresh, d.steps, d.rank_std] for kind, phase, d in cases()]
    return Table({"training": "", "steps": "", **shares, "correlation time": ".1f", "rank_std": ".3f"}, rows)


def held_out() -> Table:
    """Return statistics of the fitted run, the other run, and samples: median and range over samples."""
    rows = []
    for kind, phase, drift in cases():
        length = PHASES[phase].stop - PHASES[phase].start
        drawn = [drifting_counts(MODEL, 8, range(length), 4, drift, seed=seed) for seed in range(DRAWS)]
        runs = [statistics(recorded(kind, run)[PHASES[phase]]) for run in range(len(KINDS[kind]))]
        found = np.array([list(statistics(trace).values()) for trace in drawn])
        for at, (name, fitted) in enumerate(runs[0].items()):
            other = runs[1][name] if len(runs) > 1 else None
            rows.append([kind, phase, name, fitted, other, spread(found[:, at])])
    columns = {
        "training": "",
        "steps": "",
        "statistic": "",
        "seed 0, fitted": ".3f",
        "seed 1": ".3f",
        "synthetic": ".3f",
    }
    return Table(columns, rows)


def statistics(trace: np.ndarray) -> dict[str, float]:
    """Return autocorrelations of log popularity, and quantiles of the home imbalance."""
    correlations = moments(trace, MODEL.per_token, LAGS).correlations
    low, middle, high = np.quantile(imbalances(trace), [0.1, 0.5, 0.9])
    named = {f"autocorrelation, lag {lag}": value for lag, value in zip(LAGS, correlations, strict=True)}
    return {**named, "imbalance, 10 %": float(low), "imbalance, median": float(middle), "imbalance, 90 %": float(high)}


def planners() -> dict[str, Balancer]:
    stale = {f"EPLB every {period}": EPLB(every=period) for period in PERIODS}
    return {"plain": Plain(), **stale, "EPLB+": EPLBPlus(), "Exact(eps=0.01)": Exact()}


def stale_plans() -> Table:
    """Return the imbalance under each planner, median and range over steps, means over layers: recorded and
    synthetic.
    """
    drawn = {
        (kind, phase): drifting_counts(MODEL, 8, range(PHASES[phase].stop), 2, drift, seed=0)
        for kind, phase, drift in cases()
    }
    rows: list[list] = []
    for name, balancer in planners().items():
        of_kind = {kind: balanced(balancer, recorded(kind, -1)) for kind in KINDS}
        found = [[of_kind[kind][PHASES[phase]] for kind, phase in drawn]]
        found += [[balanced(balancer, trace)[PHASES[phase]] for (_, phase), trace in drawn.items()]]
        for source, row in zip(("recorded", "synthetic"), found, strict=True):
            # There are no replicas before the first plan.
            none = [isinstance(balancer, EPLB) and balancer.every > PHASES[phase].start for _, phase in drawn]
            rows.append([name, source, *(None if cold else spread(each) for cold, each in zip(none, row, strict=True))])
    columns = {"planner": "", "loads": ""} | {f"{kind}, {phase}": ".3f" for kind, phase in drawn}
    return Table(columns, sorted(rows, key=lambda row: row[1]))


def balanced(balancer: Balancer, trace: np.ndarray) -> np.ndarray:
    """Return max/mean load under legal plans with two replica slots, [steps]."""
    planner = PlanRunner(balancer, Topology.flat(8), slots=4)
    return np.array([np.mean([layer.effect.imbalance_after for layer in step]) for step in planner.replay(trace)])


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {"fits": fits(), "held_out": held_out(), "stale_plans": stale_plans()}

"""Cost of stale plans: EPLB at several periods against plans of the microbatch, on recorded loads.

The recordings in `benchmarks/traces` are of 200 steps of the preset tiny.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.render.results import Table, Value, spread
from jax_moe_lb import Topology
from jax_moe_lb.balancers import EPLB, EPLBPlus, Exact, Plain
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.cli.planning import PlanRunner

TRACES = Path(__file__).parents[1] / "traces"
KINDS = {"no router loss": "free_0", "balance loss 1e-2": "loss_0"}
PHASES = {"steps 16-63": slice(16, 64), "steps 128-199": slice(128, 200)}
"""Training phases. In the first, routers still change, and a period of 64 steps has no plan yet."""

PERIODS = (64, 16, 4, 1)


def planners() -> dict[str, Balancer]:
    stale = {f"EPLB every {period}": EPLB(every=period) for period in PERIODS}
    return {"plain": Plain(), **stale, "EPLB+": EPLBPlus(), "Exact(eps=0.01)": Exact()}


def stale_plans() -> Table:
    """Return the imbalance under each planner, median and range over steps, means over layers."""
    cases = [(kind, phase) for kind in KINDS for phase in PHASES]
    rows: list[list[Value]] = []
    for name, balancer in planners().items():
        of_kind = {kind: balanced(balancer, recorded(file)) for kind, file in KINDS.items()}
        # There are no replicas before the first plan.
        first = balancer.every if isinstance(balancer, EPLB) else 0
        cells = [
            spread(of_kind[kind][PHASES[phase]]) if first <= PHASES[phase].start else None for kind, phase in cases
        ]
        rows.append([name, *cells])
    columns = {"planner": ""} | {f"{kind}, {phase}": ".3f" for kind, phase in cases}
    return Table(columns, rows)


def recorded(name: str) -> np.ndarray:
    """Return the counts [steps, layers, R, E] of a training run."""
    with np.load(TRACES / f"{name}.npz") as file:
        return file["counts"].astype(np.int32)


def balanced(balancer: Balancer, trace: np.ndarray) -> np.ndarray:
    """Return max/mean load under legal plans with two replica slots, [steps]."""
    planner = PlanRunner(balancer, Topology.flat(8), slots=4)
    return np.array([np.mean([layer.effect.imbalance_after for layer in step]) for step in planner.replay(trace)])


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {"stale_plans": stale_plans()}

"""Plans of predicted counts, with a return to the exact plan: how often they hold, and a bound on their gain.

The predicted counts of a microbatch are those of the one before. Their plan fixes the replicas, two slots per rank. The
true counts then split the tokens over these copies by the linear program of `spread`, with the least maximum load that
the replicas allow. If it exceeds 1.05 times the mean, the layer returns to the plan of `exact`, without a charge for
the weights fetched in vain. So no predictor with these counts and replicas gains more.

Replicas are those of `Exact`, or fill all slots by the rule of `EPLBPlus`, which is more robust. Times are those of one
layer, forward and backward, on the rates of `h100_node`, simulated. Weights travel before the counts if the plan holds.
The split takes no time, or as long as `exact` plans. With `--loads`, the loads are those of the files alone, as in
`plans balancers`.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from benchmarks.plans import recorded
from benchmarks.plans.loads import DRIFT, HISTORY, MODEL, SLOTS, STEPS, Trace, drawn, machine, served
from benchmarks.plans.stale_plans import KINDS, PHASES
from benchmarks.plans.stale_plans import recorded as recorded_counts
from benchmarks.render.results import Table, Value
from jax_moe_lb import System, exact
from jax_moe_lb.balancers import EPLBPlus, Exact, Given
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.contrib.lplb import spread
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.types import Counts
from jax_moe_lb.sim import Cluster, Drift, LoadShape, ModelShape, drifting_counts, simulate
from jax_moe_lb.sim.planner_times import planning_s

BOUND = 1.05
"""Imbalance above which the layer returns to the exact plan."""

RULES: dict[str, Balancer] = {"exact": Exact(eps=0.0), "all slots": EPLBPlus()}
MIXTRAL = replace(MODEL, hidden=4096, inner=14336, experts=8, per_token=2)
DEEPSEEK = replace(MODEL, hidden=7168, inner=2048, experts=256)


@dataclass(frozen=True)
class Outcome:
    """One layer in one step.

    Args:
        predicted: Imbalance under the predicted replicas.
        exact: Imbalance under the plan of `exact`.
        predicted_s: Seconds of the layer with predicted replicas, whose split takes no time.
        exact_s: Seconds of the layer of `exact`.
    """

    predicted: float
    exact: float
    predicted_s: float
    exact_s: float

    @property
    def holds(self) -> bool:
        """Whether the predicted plan is kept."""
        return self.predicted <= BOUND


def trained(kind: str, steps: slice) -> tuple[ModelShape, Trace]:
    """Return a model and recorded counts of two layers, with as many tokens as the synthetic ones."""
    counts = recorded_counts(kind, -1)[steps, :2].astype(np.int64)
    copies, per_token = counts.sum(3)[0, 0, 0], 2
    factor = MODEL.tokens * MODEL.per_token // copies
    model = replace(MODEL, experts=counts.shape[3], per_token=per_token, tokens=int(copies * factor // per_token))
    return model, (counts * factor).astype(np.int32)


def large(model: ModelShape, num_ranks: int, drift: Drift) -> tuple[ModelShape, Trace]:
    """Return a model with large experts and its synthetic counts, with an imbalance of 1.5."""
    return model, drifting_counts(model, num_ranks, range(HISTORY + STEPS), 2, drift, 1.5, 0, LoadShape.ZIPF)


def loads(quick: bool) -> Iterator[tuple[str, ModelShape, Trace]]:
    """Yield the name of a load, its model and its counts."""
    for kind in KINDS:
        for phase, steps in PHASES.items():
            yield f"{kind}, {phase}", *trained(kind, steps)
    if quick:
        return
    for name, drift in (("steady", Drift()), ("drift", DRIFT)):
        yield f"{name}, 32 ranks", *drawn(32, 256, drift)
        yield f"{name}, DeepSeek-V3 on 64 ranks", *large(DEEPSEEK, 64, drift)
        yield f"{name}, Mixtral on 8 ranks", *large(MIXTRAL, 8, drift)


def outcome(rule: Balancer, model: ModelShape, cluster: Cluster, before: Counts, counts: Counts) -> Outcome:
    """Simulate a layer whose predicted counts are those before."""
    topology = cluster.topology()
    start = plain_plan(before, topology, model.experts // cluster.num_ranks + SLOTS)
    predicted, _ = rule.rebalance(before, start, topology, rule.init(before.shape))
    plan = spread(counts, predicted, topology)
    state = Given(1).follow(jax.tree.map(lambda leaf: leaf[None], plan))
    system = System(Given(1), replica_slots=SLOTS)
    followed = simulate(system, model, cluster, counts[None], states=[[state]])
    own = simulate(exact(replica_slots=SLOTS), model, cluster, counts[None])
    return Outcome(followed.imbalance_after, own.imbalance_after, followed.step_s, own.step_s)


def row_of(name: str, rule: str, model: ModelShape, trace: Trace) -> list[Value]:
    """Return the row of a load and a rule for replicas."""
    num_ranks, cluster = trace.shape[2], machine(trace.shape[2])
    single, steps = replace(model, layers=1), range(len(trace) - min(len(trace) - 1, 24), len(trace))
    found = [
        outcome(RULES[rule], single, cluster, trace[step - 1, at], trace[step, at])
        for step in steps
        for at in range(trace.shape[1])
    ]
    split_s = planning_s(exact().balancer, num_ranks, num_ranks, model.experts, cluster.host_wait_s)
    exact_s = sum(one.exact_s for one in found)

    def over_exact(split_s: float) -> float:
        """Return the time of all layers over that of `exact`, if the split takes some seconds."""
        return sum(one.predicted_s + split_s if one.holds else one.exact_s + split_s for one in found) / exact_s

    imbalances = [float(np.mean([one.predicted for one in found])), float(np.mean([one.exact for one in found]))]
    kept = float(np.mean([one.predicted if one.holds else one.exact for one in found]))
    held = float(np.mean([one.holds for one in found]))
    return [name, rule, held, imbalances[1], imbalances[0], kept, over_exact(0.0), over_exact(split_s)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Use the recorded trainings only.")
    recorded.add_arguments(parser)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    columns = {
        "load": "",
        "replicas by": "",
        "plans kept": ".0%",
        "imbalance, exact": ".3f",
        "predicted": ".3f",
        "with return": ".3f",
        "layer over exact, free split": ".3f",
        "split as long as a plan": ".3f",
    }
    files = served(recorded.read(given)) if given.loads else {}
    found = [(f"{name.replace('_', ' ')} ranks", *one) for name, one in files.items()] or loads(given.quick)
    rows = [row_of(name, rule, model, trace) for name, model, trace in found for rule in RULES]
    return {"predicted": Table(columns, rows)}

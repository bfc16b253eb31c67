"""All balancers on the same loads: imbalance, replicas, weights, simulated time of a layer, and planning time.

    python -m benchmarks.bench_balancers [--quick] [--loads FILE.npy ...] [--out FILE.json]

A load is a sequence of steps of two layers, replayed by the simulator, so that balancers with a history have seen
earlier steps; rows are means over the last steps. Every rank has two slots more than home experts. Synthetic loads have
an imbalance of 2 without balancing, on 8, 32 and 64 ranks of one domain, and on 32 ranks with drift. The recorded load
is `traces/free_0.npz`, the routing of a small trained model on 8 ranks, scaled to the same number of tokens. With
`--loads`, the loads are those of the files, recorded by a serving system, on 8, 32 and 64 ranks instead. Every rank
then serves a mix of them, new in each step.

Times are of one forward and backward pass on the rates of `h100_node`, in units of `plain`'s, without planning. The
planning time is that of `sim/planner_times.yaml`.

The last table bounds the gain of a predictor and of planning beside other work: layer times over those of `exact` with
its planning, if planning takes no time, if plans and weights of the true counts are ready before the layer, and if the
plans are those of the step before. Exposed weights bound the gain of using a replica's first tile before its last has
come.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from benchmarks import recorded
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import System, exact, plain
from jax_moe_lb.balancers import Exact, Given, plan_all
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, LPLB, MoonEP
from jax_moe_lb.layer.systems import eplb, eplb_plus, fastermoe, feplb, greedy, ultraep
from jax_moe_lb.sim import (
    Cluster,
    Drift,
    LoadShape,
    ModelShape,
    drifting_counts,
    mean_report,
    planner_times,
    replay,
    simulate,
)
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.run import Report, StageTime, States

SLOTS = 2
HISTORY, STEPS = 5, 4
"""Steps before the rows' means, and in them."""

MODEL = ModelShape(layers=2, hidden=2048, inner=768, experts=64, per_token=8, tokens=8192)
DRIFT = Drift(steady=0.4, drifting=0.6, steps=8.0)
"""Most of the popularity drifts, with a correlation of `1 / e` after 8 steps."""

SYSTEMS = {
    "plain": plain(),
    "exact": exact(),
    "exact, tokens only": System(Exact()),
    "greedy": greedy(),
    "ultraep": ultraep(),
    "MoonEP": System(MoonEP()),
    "LLEP": System(LLEP()),
    "ECHO": System(ECHO()),
    "EPIC": System(EPIC()),
    "eplb_plus": eplb_plus(),
    "eplb": eplb(),
    "lplb": System(LPLB()),
    "fastermoe": fastermoe(),
    "feplb": feplb(),
}

Trace = Int[np.ndarray, "steps X R E"]


def drawn(num_ranks: int, num_experts: int, drift: Drift) -> tuple[ModelShape, Trace]:
    """Return a model and its synthetic counts."""
    model = replace(MODEL, experts=num_experts)
    times = range(HISTORY + STEPS)
    return model, drifting_counts(model, num_ranks, times, 2, drift, 2.0, 0, LoadShape.ZIPF)


def trained() -> tuple[ModelShape, Trace]:
    """Return a model and the last counts of the recorded training, with as many tokens as the synthetic ones."""
    with np.load(Path(__file__).parent / "traces" / "free_0.npz") as file:
        counts = file["counts"][-(HISTORY + STEPS) :, :2].astype(np.int64)
    copies, per_token = counts.sum(3)[0, 0, 0], 2
    factor = MODEL.tokens * MODEL.per_token // copies
    shape = replace(MODEL, experts=counts.shape[3], per_token=per_token, tokens=int(copies * factor // per_token))
    return shape, (counts * factor).astype(np.int32)


def loads(quick: bool) -> dict[str, tuple[ModelShape, Trace]]:
    """Return models and counts by the name of the table."""
    found = {"recorded": trained(), "ranks_8": drawn(8, 64, Drift())}
    if quick:
        return found
    large = {"ranks_32": drawn(32, 256, Drift()), "ranks_64": drawn(64, 256, Drift())}
    return found | large | {"drift": drawn(32, 256, DRIFT)}


def served(files: recorded.Layers) -> dict[str, tuple[ModelShape, Trace]]:
    """Return a model and mixed counts of recordings, by the name of the table."""
    model, copies = replace(MODEL, experts=256), MODEL.tokens * MODEL.per_token
    return {f"served_{ranks}": (model, recorded.mixed(files, ranks, HISTORY + STEPS, copies)) for ranks in (8, 32, 64)}


def machine(num_ranks: int) -> Cluster:
    """Return one domain of ranks with the rates of `h100_node`."""
    node = load_config("cluster", "h100_node", "cluster").cluster.build()
    return replace(node, levels=(replace(node.levels[0], size=num_ranks),), memory_bytes=None)


def row_of(system: System, model: ModelShape, trace: Trace) -> tuple[list[Value], float]:
    """Return imbalance, replicas, MB of weights and planning time of a balancer, and the seconds of a layer."""
    num_ranks, cluster = trace.shape[2], replace(machine(trace.shape[2]), planner_s=0.0)
    found = mean_report(list(replay(system, model, cluster, trace))[HISTORY:])
    sent = weights_bytes(found) / model.layers
    planner_s = planning_s(system, num_ranks, model.experts)
    values: list[Value] = [found.imbalance_after, sent / model.expert_bytes, sent / 1e6]
    return [*values, planner_s and planner_s * 1e6], found.step_s / model.layers


def weights_bytes(found: Report) -> float:
    """Return the bytes of replicas in a forward pass."""
    return found.stages["weights"].bytes if "weights" in found.stages else 0.0


def planning_s(system: System, num_ranks: int, num_experts: int) -> float | None:
    """Return the seconds of a plan without waits; None if the table has no row of this planner."""
    if not any(row.planner == type(system.balancer).__name__ for row in planner_times.planner_times()):
        return None
    return planner_times.planning_s(system.balancer, num_ranks, num_experts, host_wait_s=0.0)


def table_of(name: str, model: ModelShape, trace: Trace) -> Table:
    """Return one row per balancer."""
    rows = {
        name: row_of(system if name == "plain" else replace(system, replica_slots=SLOTS), model, trace)
        for name, system in SYSTEMS.items()
    }
    plain_s = rows["plain"][1]
    columns = {"balancer": "", "max / mean load": ".3f", "replicas": ".1f", "weights MB": ".0f"}
    lines = [[name, *values, seconds / plain_s] for name, (values, seconds) in rows.items()]
    title = f"{name.replace('_', ' ')}: {trace.shape[2]} ranks, {model.experts} experts"
    return Table(columns | {"planning us": ".0f", "layer over plain": ".3f"}, lines, title)


def ahead_of(name: str, model: ModelShape, trace: Trace) -> list[Value]:
    """Return the layer times of plans made before the layer, over those of `exact`, which plans in it."""
    cluster = machine(trace.shape[2])
    topology, slots = cluster.topology(), model.experts // cluster.num_ranks + SLOTS
    system, given = exact(replica_slots=SLOTS), System(Given(1), replica_slots=SLOTS)

    def follow(counts: Int[np.ndarray, "X R E"]) -> States:
        """Return the states that follow the plans of these counts."""
        return [[Given(1).follow(plan_all(Exact(), layer[None], topology, slots))] for layer in counts]

    steps = range(HISTORY, HISTORY + STEPS)
    own = [simulate(system, model, cluster, trace[at]) for at in steps]
    hidden = [simulate(system, model, replace(cluster, planner_s=0.0), trace[at]) for at in steps]
    known = [simulate(given, model, cluster, trace[at], states=follow(trace[at])) for at in steps]
    stale = [simulate(given, model, cluster, trace[at], states=follow(trace[at - 1])) for at in steps]
    own_s, *others_s = (mean_report(found).step_s for found in (own, hidden, known, stale))
    weights = mean_report(own).stages.get("weights", StageTime())
    return [name.replace("_", " "), *(one / own_s for one in others_s), weights.exposed_s / own_s]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use the loads on 8 ranks only.")
    recorded.add_arguments(parser)
    out_option(parser)
    given = parser.parse_args()
    found = served(recorded.read(given)) if given.loads else loads(given.quick)
    columns = {
        "load": "",
        "planning hidden": ".3f",
        "plans and weights ahead": ".3f",
        "plans of the step before": ".3f",
    }
    ahead = Table(columns | {"weights exposed": ".1%"}, [ahead_of(name, *one) for name, one in found.items()])
    report({name: table_of(name, *one) for name, one in found.items()} | {"ahead": ahead}, given.out)


if __name__ == "__main__":
    main()

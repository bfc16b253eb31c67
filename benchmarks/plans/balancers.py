"""Every balancer on the same loads: maximum, replicas, bytes, rows that stay, planning times and simulated layers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.plans import popular_ranks
from benchmarks.plans.loads import HISTORY, SLOTS, Load, Trace, machine, steady
from benchmarks.plans.times import least_s
from benchmarks.render.results import Table, Value
from jax_moe_lb import System, exact, plain
from jax_moe_lb.balancers import Exact, Given, plan_all
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, LPLB, MoonEP
from jax_moe_lb.core import Plan, imbalance, load, plain_plan, rows_between
from jax_moe_lb.core.types import Counts
from jax_moe_lb.layer.plan_on_host import plan_groups
from jax_moe_lb.layer.systems import eplb, eplb_plus, fastermoe, feplb, greedy, ultraep
from jax_moe_lb.planners import rebalance_experts
from jax_moe_lb.sim import ModelShape, mean_report, simulate
from jax_moe_lb.sim.run import StageTime, States
from jax_moe_lb.sim.work import layer_facts, replicas_between
from jax_moe_lb.transport import Relay

NODE = 8
"""Ranks of a node."""

SYSTEMS = {
    "plain": plain(),
    "exact": exact(),
    "exact, relays": replace(exact(), replicate=Relay()),
    "exact, tokens only": System(Exact()),
    "exact, eps 0": System(Exact(eps=0.0)),
    "exact, tokens only, relays": System(Exact(), replicate=Relay()),
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
COLUMNS = {"balancer": "", "max / mean load": ".3f", "replicas": ".1f", "busiest sender, MB": ".1f"}
COLUMNS |= {"rows on their rank": ".1%", "in their node": ".1%", "host us": ".0f"}
COLUMNS |= {"layer over plain": ".3f"}


def steps(system: System, model: ModelShape, trace: Trace) -> Iterator[tuple[Trace, list[Plan], States]]:
    """Yield counts and plans of the layers, and the states before, of each step after the history."""
    cluster = machine(trace.shape[2])
    topology, facts = cluster.topology(), layer_facts(system, model, cluster)
    sized = replace(system, balancer=system.balancer.sized(facts))
    states: States = [[system.balancer.init(counts.shape)] for counts in trace[0]]
    for step, layers in enumerate(trace):
        found = [
            plan_groups(sized, [counts], topology, states=its)[0] for counts, its in zip(layers, states, strict=True)
        ]
        if step >= HISTORY:
            yield layers, [one.plan for one in found], states
        states = [[one.state] for one in found]


def numbers(counts: Counts, plan: Plan) -> tuple[float, ...]:
    """Return max/mean load, replicas, replicas sent by the busiest rank, and shares of rows on their rank and node."""
    sent, rows = replicas_between(plan), rows_between(counts, plan)
    node = np.arange(len(rows)) // NODE
    inside = rows[node[:, None] == node].sum()
    return float(imbalance(load(plan))), sent.sum(), sent.sum(1).max(), np.trace(rows) / rows.sum(), inside / rows.sum()


def host_us(balancer: Balancer, counts: Counts, slots: int) -> float:
    """Return the least time of a plan on NumPy arrays; with a history, of a step that plans."""
    topology = machine(len(counts)).topology()
    start, state = plain_plan(counts, topology, slots), balancer.init(counts.shape)
    for _ in range(getattr(balancer, "every", 1)):
        _, state = balancer.rebalance(counts, start, topology, state)
    return 1e6 * least_s(lambda: balancer.rebalance(counts, start, topology, state), 5)


def row_of(name: str, model: ModelShape, trace: Trace) -> tuple[list[Value], float]:
    system = replace(SYSTEMS[name], replica_slots=0 if name == "plain" else SLOTS)
    num_ranks, cluster = trace.shape[2], replace(machine(trace.shape[2]), planner_s=0.0)
    found, times_s = [], []
    for layers, plans, states in steps(system, model, trace):
        found += [numbers(*one) for one in zip(layers, plans, strict=True)]
        times_s.append(simulate(system, model, cluster, layers, states=states).step_s / model.layers)
    level, replicas, sent, stays, inside = np.mean(found, axis=0).tolist()
    # Only the cost of `exact` differs from "tokens only", so its planner is the same.
    balancer = system.balancer.sized(model.facts)
    counts, slots = np.ascontiguousarray(trace[-1, 0]), model.experts // num_ranks + SLOTS
    plan_us = None if name == "plain" else host_us(balancer, counts, slots)
    return [level, replicas, sent * model.expert_bytes / 1e6, stays, inside, plan_us], float(np.mean(times_s))


def moved_homes(trace: Trace, spare: int = SLOTS) -> list[float]:
    """Return max/mean load and replicas of EPLB's own algorithm on the exact load, which also moves homes."""
    found = []
    for counts in trace[HISTORY:].reshape(-1, *trace.shape[2:]):
        tokens, ranks = counts.sum(0), len(counts)
        slots = len(tokens) + ranks * spare
        experts, _, copies = rebalance_experts(tokens[None], slots, 1, 1, ranks)
        at = (tokens / copies[0])[experts[0]].reshape(ranks, -1).sum(1)
        found.append((at.max() / at.mean(), slots - len(tokens)))
    return np.mean(found, axis=0).tolist()


def table_of(name: str, model: ModelShape, trace: Trace) -> Table:
    rows = {system: row_of(system, model, trace) for system in SYSTEMS}
    plain_s = rows["plain"][1]
    lines: list[list[Value]] = [[system, *values, seconds / plain_s] for system, (values, seconds) in rows.items()]
    lines.append(["EPLB, homes move", *moved_homes(trace), *[None] * (len(COLUMNS) - 3)])
    return Table(COLUMNS, lines, f"{name.replace('_', ' ')}: {trace.shape[2]} ranks, {model.experts} experts")


def popular() -> Table:
    """Return maximum, replicas and busiest sender on the 15 loads of UltraEP's table 3, each with its own slots."""
    found: dict[str, list[list[float]]] = {}
    for case in popular_ranks.CASES:
        model, trace = steady(popular_ranks.counts(case, seed=0)[None])
        for name in ("plain", "exact, tokens only", "exact, tokens only, relays", "ultraep", "eplb_plus", "lplb"):
            system = replace(SYSTEMS[name], replica_slots=0 if name == "plain" else case.replica_slots)
            (((counts,), (plan,), _),) = steps(system, model, trace)
            found.setdefault(name, []).append([float(one) for one in numbers(counts, plan)[:3]])
        found.setdefault("EPLB, homes move", []).append(moved_homes(trace, case.replica_slots))
    columns = {"balancer": "", "max / mean load": ".3f", "replicas": ".1f", "sent by the busiest rank": ".1f"}
    rows = [[name, *np.mean(its, axis=0).tolist()] for name, its in found.items()]
    return Table(columns, [[*row, None][:4] for row in rows], "means over the 15 loads of UltraEP's table 3")


def ahead_of(name: str, model: ModelShape, trace: Trace) -> list[Value]:
    """Return the layer times of plans made before the layer, over those of `exact`, which plans in it."""
    cluster = machine(trace.shape[2])
    topology, slots = cluster.topology(), model.experts // cluster.num_ranks + SLOTS
    system, given = exact(replica_slots=SLOTS), System(Given(1), replica_slots=SLOTS)

    def follow(counts: Trace) -> States:
        """Return the states that follow the plans of these counts."""
        return [[Given(1).follow(plan_all(Exact(), layer[None], topology, slots))] for layer in counts]

    steps = range(HISTORY, len(trace))
    own = [simulate(system, model, cluster, trace[at]) for at in steps]
    hidden = [simulate(system, model, replace(cluster, planner_s=0.0), trace[at]) for at in steps]
    known = [simulate(given, model, cluster, trace[at], states=follow(trace[at])) for at in steps]
    stale = [simulate(given, model, cluster, trace[at], states=follow(trace[at - 1])) for at in steps]
    own_s, *others_s = (mean_report(found).step_s for found in (own, hidden, known, stale))
    weights = mean_report(own).stages.get("weights", StageTime())
    return [name.replace("_", " "), *(one / own_s for one in others_s), weights.exposed_s / own_s]


def tables(found: dict[str, Load]) -> dict[str, Table]:
    """Return one table per load, and bounds on planning ahead for those that change from step to step."""
    columns = {"load": ""} | dict.fromkeys(
        ("planning hidden", "plans and weights ahead", "plans of the step before"), ".3f"
    )
    changing = {name: one for name, one in found.items() if (one[1][0] != one[1][-1]).any()}
    ahead = Table(columns | {"weights exposed": ".1%"}, [ahead_of(name, *one) for name, one in changing.items()])
    return {name: table_of(name, *one) for name, one in found.items()} | {"ahead": ahead}

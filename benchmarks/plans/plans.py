"""Plans of `Exact` and of every other balancer: level, replicas, bytes, gap to the optimum, and times.

    families   `Exact` beside every other balancer on loads that are hard to level, 8 to 256 ranks
    balancers  every balancer on the same loads: maximum, bytes, rows that stay, planning times, simulated layers
    exact      `Exact` on recorded loads: maximum, optimum, jnp beside C++, replicas within the maximum of UltraEP
    times      planning times of `Exact`: C++, jit, estimated kernel
    planners   planning times of all balancers, and growth with ranks; --write replaces sim/planner_times.yaml
    settings   the default `exact(2)` beside the best of all its settings, in the simulator

A loss is a load on which another balancer has a lower maximum than `Exact(eps=0)`, whose search ends within 1/4096 of
the mean. A plan of the default is dominated if another balancer's is no worse in maximum, replicas and replicas sent by
the busiest rank, and better in one. Balancers that plan from earlier counts and LPLB, which solves a linear program for
each plan, are left out.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.plans import balancers, loads, recorded, times
from benchmarks.plans.load_families import families, spread
from benchmarks.plans.optimum import optimum
from benchmarks.render.results import Table, Value
from jax_moe_lb import Balancer, System, Topology, _planning, exact, plain
from jax_moe_lb.balancers import FEPLB, EPLBPlus, Exact, Greedy, UltraEP
from jax_moe_lb.balancers.exact import SEARCH_ENDS
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, MoonEP
from jax_moe_lb.core import Plan, load, plain_plan, traffic
from jax_moe_lb.planners.exact_search import exact_in_jax
from jax_moe_lb.sim import Cluster, LoadShape, ModelShape, simulate, skewed_counts
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.transport import Relay

Tables = dict[str, Table]

# ---- families ------------------------------------------------------------------------

# ranks, home experts
SHAPES = ((8, 8), (16, 8), (32, 4), (64, 4), (72, 4), (72, 8), (96, 4), (128, 2), (128, 8), (256, 1))
SLOTS = (1, 2, 4)
MOST_SOLVED = 16
"""Ranks of the largest domain compared with the optimum."""

OTHERS: dict[str, Balancer] = {
    "Greedy": Greedy(),
    "UltraEP": UltraEP(min_tokens=64),
    "UltraEP, eps 0": UltraEP(eps=0.0, min_tokens=1),
    "MoonEP": MoonEP(),
    "LLEP": LLEP(capacity=1.0, min_tokens=1, min_imbalance=1.0),
    "ECHO": ECHO(),
    "EPIC": EPIC(),
    "EPLB+": EPLBPlus(),
    "FEPLB": FEPLB(),
}


def plan(balancer: Balancer, counts: np.ndarray, slots: int) -> Plan:
    """Return the plan of a balancer with all ranks in one domain."""
    topology = Topology.flat(len(counts))
    start = plain_plan(counts, topology, counts.shape[1] // len(counts) + slots)
    return balancer.rebalance(counts, start, topology, balancer.init(counts.shape))[0]


class Outcome(NamedTuple):
    """Maximum load, replicas, and replicas sent by the busiest rank."""

    most: int
    replicas: int
    sent: int

    def dominates(self, other: "Outcome") -> bool:
        """Return whether no number is higher and one is lower."""
        return self != other and all(own <= its for own, its in zip(self, other, strict=True))


def outcome(balancer: Balancer, counts: np.ndarray, slots: int) -> Outcome:
    found = plan(balancer, counts, slots)
    moved = traffic(found, counts)
    return Outcome(int(load(found).max()), int(moved.replicas), int(moved.fan_out.max()))


def gap(tokens: np.ndarray, num_ranks: int, slots: int, most: int, limit_s: float) -> tuple[float, bool]:
    """Return the distance of a maximum from the optimum, in percent, and whether the optimum is proven."""
    mean = tokens.sum(dtype=np.int64) / num_ranks
    if most <= np.ceil(mean):
        return 0.0, True
    home = len(tokens) // num_ranks
    best, bound = optimum(tokens, num_ranks, home + slots, candidates=home, limit_s=limit_s)
    # The solver ends 0.05 % above its bound, or at its time limit with a worse plan.
    return 100 * max(most / mean / best - 1, 0.0), best / bound - 1 <= 6e-4


def family_row(num_ranks: int, num_home: int, slots: int, seeds: int) -> list[Value]:
    """Return the row of a shape: loads, losses, least lead over the best other, dominated plans, gaps, and times."""
    leads, dominated, times_us, gaps = [], 0, [], []
    loads = [(seed, tokens) for seed in range(seeds) for tokens in families(num_ranks, num_home, seed).values()]
    for seed, tokens in loads:
        counts = spread(tokens, num_ranks)
        others = [outcome(balancer, counts, slots) for balancer in OTHERS.values()]
        best = Exact(eps=0.0, localize=False)
        own = outcome(best, counts, slots)
        times_us.append(1e6 * times.least_s(partial(plan, best, counts, slots), 3))
        enough = int(counts.sum() / num_ranks * (1 + SEARCH_ENDS))
        leads.append(max(min(other.most for other in others), enough) / max(own.most, enough) - 1)
        default = outcome(Exact(), counts, slots)
        dominated += any(other.dominates(default) for other in others)
        if num_ranks <= MOST_SOLVED and seed == 0:
            gaps.append(gap(tokens, num_ranks, slots, own.most, limit_s=10))
    found = np.array([one for one, is_proven in gaps if is_proven])
    solved: list[Value] = [len(found), float(found.mean()), float(found.max())] if gaps else [None] * 3
    shape: list[Value] = [num_ranks, num_home, slots, len(leads), sum(lead < 0 for lead in leads)]
    return [*shape, 100 * float(np.mean(leads)), dominated, *solved, float(np.median(times_us)), max(times_us)]


def of_families(given: argparse.Namespace) -> Tables:
    """Return the comparison with every balancer, and with the optimum up to 16 ranks."""
    shapes, seeds = (SHAPES[:1], 1) if given.quick else (SHAPES, 2)
    columns = {"ranks": "d", "L": "d", "S - L": "d", "loads": "d", "losses": "d", "mean lead, %": ".2f"}
    columns |= {"dominated": "d", "proven optima": "d", "gap, mean, %": ".3f", "gap, worst, %": ".3f"}
    rows = [family_row(*shape, slots, seeds) for shape in shapes for slots in SLOTS]
    title = "Exact beside nine other settings of balancers"
    return {"families": Table(columns | {"median us": ".0f", "most us": ".0f"}, rows, title)}


def of_balancers(given: argparse.Namespace) -> Tables:
    """Return every balancer on the same loads: of recordings, if given, or of all others."""
    if given.loads:
        return balancers.tables(loads.served(recorded.read(given)))
    others = {} if given.quick else {"popular": balancers.popular()}
    return balancers.tables(loads.loads(given.quick)) | others


# ---- exact on recorded loads -----------------------------------------------------------

# ranks, experts, replica slots
RECORDED = ((8, 128, 4), (8, 256, 2), (16, 256, 2), (32, 256, 1), (32, 256, 2), (64, 256, 1), (64, 256, 2))
RECORDED += ((256, 256, 2),)
FRONTIERS = ((64, 2), (64, 1), (32, 2), (8, 4), (8, 2))
IN_JNP = ((8, 2), (16, 2), (32, 1), (64, 2))
ANY = 2**63 - 1
BINDING = 3
"""Fan-out bound below that of unbounded plans: 2 to 14 on recorded loads, mostly 4 to 8."""

RUN = jax.jit(exact_in_jax, static_argnums=(1, 2, 3, 4, 5))


def level(made: tuple, tokens: np.ndarray) -> tuple[float, int]:
    """Return max/mean load and replicas of a placement and a quota."""
    placement, quota = map(np.asarray, made)
    return quota.sum(0).max() * quota.shape[1] / tokens.sum(dtype=np.int64), int((placement >= 0).sum()) - len(tokens)


def planned(tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.0, fan_out: int = ANY) -> tuple[float, int]:
    """Return max/mean load and replicas of `Exact` in C++; the sources of the tokens change neither."""
    counts = recorded.on_first_rank(tokens, num_ranks)
    return level(_planning.exact(counts, len(tokens) // num_ranks + slots, num_ranks, eps, fan_out, False), tokens)


def in_jnp(tokens: np.ndarray, num_ranks: int, slots: int, eps: float, fan_out: int) -> tuple[float, int]:
    """Return the same of the search in jnp."""
    counts = recorded.on_first_rank(tokens, num_ranks)
    return level(RUN(counts, len(tokens) // num_ranks + slots, num_ranks, eps, fan_out, False), tokens)


def ultraep(tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.01) -> tuple[float, int]:
    """Return the same of UltraEP's rule, without a minimum replica size."""
    counts, width = recorded.on_first_rank(tokens, num_ranks), len(tokens) // num_ranks + slots
    start = plain_plan(counts, Topology.flat(num_ranks), width)
    return level(_planning.ultraep(start.placement, start.quota, num_ranks, eps, 1), tokens)


def means(rule: Callable[..., tuple[float, int]], layers: np.ndarray, *args: float) -> list[float]:
    """Return mean maximum and replicas of a rule over layers."""
    return np.mean([rule(layer, *args) for layer in layers], axis=0).tolist()


def recorded_table(layers: np.ndarray) -> Table:
    """Return the maximum of `Exact` by shape, and its gap to the optimum on 8 ranks, of every eighth layer."""
    rows: list[list[Value]] = []
    for ranks, experts, slots in RECORDED:
        levels, replicas = np.array([planned(layer[:experts], ranks, slots) for layer in layers]).T
        solved: list[Value] = [None] * 3
        if (ranks, slots) == (8, 2):
            best, bound = np.array([optimum(layer, 8, 34) for layer in layers[::8]]).T
            gaps = 100 * np.maximum(levels[::8] / best - 1, 0)
            solved = [float(gaps.mean()), float(gaps.max()), float(100 * (levels[::8] / bound - 1).max())]
        numbers = float(levels.mean()), float(levels.max()), float(replicas.mean())
        rows.append([f"{ranks} x {experts}", slots, *numbers, *solved])
    columns = {"ranks x experts": "", "S - L": "d", "mean": ".5f", "worst layer": ".5f", "replicas": ".1f"}
    columns |= dict.fromkeys(("gap, mean, %", "gap, worst, %", "proven within, %"), ".2f")
    return Table(columns, rows, f"Maximum over mean load at eps = 0, {len(layers)} layers")


def within_their_maximum(layer: np.ndarray, ranks: int, slots: int) -> tuple[float, int, bool]:
    """Return maximum and replicas of `Exact` within UltraEP's maximum, and whether it needs more replicas."""
    (theirs, count), (best, _) = ultraep(layer, ranks, slots), planned(layer, ranks, slots)
    half = 0.5 * ranks / layer.sum(dtype=np.int64)  # a token, halved
    found, replicas = planned(layer, ranks, slots, max(theirs - best + half, 0) / best)
    assert found <= theirs + half, "UltraEP's rule found a lower maximum"
    return found, replicas, replicas > count


def within_table(layers: np.ndarray) -> Table:
    """Return UltraEP's rule, `Exact` within its maximum, and the layers where that needs more replicas."""
    rows: list[list[Value]] = []
    for ranks, slots in FRONTIERS:
        within = np.array([within_their_maximum(layer, ranks, slots) for layer in layers])
        numbers = [*means(ultraep, layers, ranks, slots), *within[:, :2].mean(0), int(within[:, 2].sum())]
        rows.append([ranks, slots, *numbers])
    columns = {"ranks": "d", "S - L": "d", "UltraEP": ".4f", "its replicas": ".1f", "Exact within": ".4f"}
    columns |= {"replicas": ".1f", f"of {len(layers)} layers with more replicas": "d"}
    return Table(columns, rows)


def of_jnp(given: argparse.Namespace) -> Tables:
    """Return maximum and replicas of jnp beside C++ on every sixteenth layer; jnp takes long."""
    layers = np.concatenate(list(recorded.read(given).values()))[::16]
    rows: list[list[Value]] = []
    for (ranks, slots), fan_out in itertools.product(IN_JNP, (ANY, BINDING)):
        args = ranks, slots, 0.0, fan_out
        theirs, ours = (np.array([rule(layer, *args) for layer in layers]) for rule in (planned, in_jnp))
        above = 100 * (ours[:, 0] / theirs[:, 0] - 1)
        numbers = [*theirs.mean(0), *ours.mean(0), above.mean(), above.max()]
        bound = "any" if fan_out == ANY else str(fan_out)
        few = (means(rule, layers, ranks, slots, 0.01, fan_out)[1] for rule in (planned, in_jnp))
        rows.append([ranks, slots, bound, *map(float, np.array(numbers)[[0, 2, 4, 5, 1, 3]]), *few])
    columns = {"ranks": "d", "S - L": "d", "max_fan_out": "", "C++": ".5f", "jnp": ".5f"}
    columns |= {"mean, %": "+.3f", "worst, %": "+.2f", "replicas, C++": ".1f", "replicas, jnp": ".1f"}
    columns |= {"C++, eps 0.01": ".1f", "jnp, eps 0.01": ".1f"}
    return {"jnp": Table(columns, rows, f"{len(layers)} layers of {layers.shape[1]} experts, eps = 0")}


def of_exact(given: argparse.Namespace) -> Tables:
    """Return the tables of `Exact` on recorded loads."""
    layers = np.concatenate(list(recorded.read(given).values()))
    return {"recorded": recorded_table(layers), "within": within_table(layers)}


# ---- times -------------------------------------------------------------------------------


def of_times(given: argparse.Namespace) -> Tables:
    """Return the planning times of `Exact` for every fourth layer."""
    layers = np.concatenate(list(recorded.read(given).values()))[::4]
    return {"times": times.exact_times(layers)}


def of_planners(given: argparse.Namespace) -> Tables:
    rows = list(times.planner_rows(times.SIZES[1:2] if given.quick else times.SIZES))
    if given.write:
        times.write(rows)
    return {"planners": times.planner_table(rows)}


# ---- settings ----------------------------------------------------------------------------

LLAMA_4_MAVERICK = ModelShape(layers=1, hidden=5120, inner=8192, experts=128, per_token=1, tokens=8192, sequence=8192)
PRESETS = ("mixtral_8x7b", "qwen3_30b", "qwen3_235b", "deepseek_v3")
IMBALANCES = (1.02, 1.1, 1.3, 2.0, 3.0)


def models() -> dict[str, ModelShape]:
    found = {name: load_config("model", name, "model").model.build() for name in PRESETS}
    shapes = {name: replace(model, layers=1, other_s=0.0) for name, model in found.items()}
    return shapes | {"llama_4_maverick": LLAMA_4_MAVERICK}


def settings() -> dict[str, System]:
    """Return 64 settings of `exact` without a cost, and plain."""
    found = {"plain": plain()}
    for eps, fan_out, slots, relayed in itertools.product(
        (0.0, 0.01, 0.05, 0.2), (1, 2, 4, None), (1, 2), (False, True)
    ):
        system = System(Exact(eps=eps, max_fan_out=fan_out, cost=None), replica_slots=slots)
        name = f"eps {eps:g}, fan-out {fan_out or 'any'}, slots {slots}" + ", relays" * relayed
        found[name] = replace(system, replicate=Relay()) if relayed else system
    return found


def settings_row(name: str, model: ModelShape, cluster: Cluster, imbalances: tuple[float, ...]) -> list[Value]:
    """Return the worst of all loads over plain, and over the best setting with its imbalance and name."""
    over_plain, over_best = [], []
    for imbalance, shape in itertools.product(imbalances, (LoadShape.RANKS, LoadShape.LOGNORMAL)):
        try:
            counts = skewed_counts(model, cluster.num_ranks, imbalance, 1, 0, shape)
        except ValueError:  # few experts do not reach each imbalance
            continue
        times_s = {key: simulate(one, model, cluster, counts).step_s for key, one in settings().items()}
        own_s = simulate(exact(replica_slots=2), model, cluster, counts).step_s
        best = min(times_s, key=times_s.__getitem__)
        over_plain.append(own_s / times_s["plain"])
        over_best.append((own_s / times_s[best], imbalance, best))
    return [name, len(over_best), min(over_plain), max(over_plain), *max(over_best)]


def of_settings(given: argparse.Namespace) -> Tables:
    """Return `exact(2)` beside the best of 65 settings: a layer, forward and backward, planning included."""
    cluster = load_config("cluster", "h100_node", "cluster").cluster.build()
    found, imbalances = (list(models().items())[:1], (2.0,)) if given.quick else (models().items(), IMBALANCES)
    columns = {"model": "", "loads": "d", "over plain, least": ".3f", "over plain, most": ".3f"}
    columns |= {"over the best setting, most": ".3f", "imbalance there": ".2f", "best setting there": ""}
    return {"settings": Table(columns, [settings_row(*one, cluster, imbalances) for one in found])}


COMMANDS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "families": of_families,
    "balancers": of_balancers,
    "exact": of_exact,
    "jnp": of_jnp,
    "times": of_times,
    "planners": of_planners,
    "settings": of_settings,
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="Use few sizes and loads.")
    parser.add_argument("--write", action="store_true", help="Write the times of `planners` to the package.")
    text = "NumPy files of tokens [layers, experts]; 58 synthetic layers of 256 experts by default."
    parser.add_argument("--loads", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    parser.add_argument("--step", type=int, default=1, help="Use every STEP-th layer.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return COMMANDS[given.command](given)

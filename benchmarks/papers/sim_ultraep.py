"""UltraEP's paper (arXiv 2606.04101) in the simulator: published and simulated numbers, and our own systems.

See `ultraep_rack.py` for the fitted and assumed values. Loads are sampled for `--tokens` tokens and scaled to 8192, to
save time.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.papers import ultraep_rack as rack
from benchmarks.papers.published import Comparison, tables_of
from benchmarks.plans.popular_ranks import CASES, TOKENS_PER_RANK, Case
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, System
from jax_moe_lb.balancers import EPLBPlus, Exact, UltraEP
from jax_moe_lb.core import imbalance, load
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.planners import plan_relocation
from jax_moe_lb.sim import Cluster, Report, Step, simulate, simulate_uniform
from jax_moe_lb.transport import Direct, Gather, Relay

PUBLISHED = ("plain", "EPLB+", "UltraEP")
"""Systems of figure 11 with published numbers, in its order."""

BALANCED = ("experts", "dispatch", "combine")
"""Stages that take as long as the busiest rank."""


def parts(report: Report, layers: int, mark: str, whole_s: float) -> dict[str, float]:
    """Return the milliseconds of a layer in figure 13's parts: experts, token exchanges, and the rest."""
    moe, a2a = (
        sum(report.stages[name + mark].busy_s for name in names) for names in (("experts",), ("dispatch", "combine"))
    )
    return {name: 1e3 * s / layers for name, s in (("MoE", moe), ("a2a", a2a), ("others", whole_s - moe - a2a))}


def figure_13(cluster: Cluster, loads: np.ndarray) -> Comparison:
    """Return the parts of a layer; the ideal column was fitted."""
    table = Comparison(
        "figure_13", "Figure 13: ms of a layer, Qwen3 in training; the ideal one was fitted, in sums of both passes"
    )
    forward = Step(backward=False)
    plain, ultraep = rack.SYSTEMS["plain"], rack.SYSTEMS["UltraEP"]
    runs = {
        "Ideal": [simulate_uniform(rack.QWEN3, cluster, step=step) for step in (rack.STEP, forward)],
        "Megatron": [simulate(plain, rack.QWEN3, cluster, loads, step=step) for step in (rack.STEP, forward)],
        "UltraEP": [simulate(ultraep, rack.QWEN3, cluster, loads, step=step) for step in (rack.STEP, forward)],
    }
    for name, (both, once) in runs.items():
        published = {"Ideal": rack.IDEAL, **rack.MEASURED}[name]
        ahead = parts(once, rack.QWEN3.layers, "", once.step_s)
        back = parts(both, rack.QWEN3.layers, " (backward)", both.step_s - once.step_s)
        for part, (ahead_ms, back_ms) in published.items():
            table.add(f"{name}, {part}, forward", ahead[part], ahead_ms, fitted=name == "Ideal")
            table.add(f"{name}, {part}, backward", back[part], back_ms, fitted=name == "Ideal")
        total = sum(ahead.values()) + sum(back.values())
        table.add(f"{name}, sum", total, sum(map(sum, published.values())), fitted=name == "Ideal")
    table.notes.append(
        "Backward is twice forward here, and 1.6 (others) to 2.3 times (MoE) there. Megatron's a2a may hold waiting "
        "for late ranks in the published trace; here it does not. The layers of the trace are not published. Its "
        "MoE forward is 3.1 times ideal, and backward 2.4 times. The imbalance used here is Qwen3's mean, 2.86."
    )
    return table


def figure_11(cluster: Cluster, tokens: int) -> list[Comparison]:
    """Return throughput in percent of the ideal, its gains, and imbalance after balancing."""
    speed = Comparison("figure_11", "Figure 11: throughput in % of the ideal")
    gain = Comparison("figure_11_gains", "Figure 11: throughput gained by UltraEP, %")
    level = Comparison("figure_11_imbalance", "Figure 11: imbalance after balancing")
    for model, training in rack.FIGURE_11.items():
        loads, shape = training.loads(tokens), training.shape
        ideal_s = simulate_uniform(shape, cluster, step=rack.STEP).step_s
        published = dict(zip(PUBLISHED, zip(training.throughput, training.imbalance, strict=True), strict=True))
        two_tiers = moved(loads, rack.in_domains(cluster))
        runs = {name: (system, cluster, loads) for name, system in rack.SYSTEMS.items()}
        runs["Exact in domains of 8"] = rack.SYSTEMS["Exact"], rack.in_domains(cluster), loads
        runs["Exact in domains of 8, homes moved"] = rack.SYSTEMS["Exact"], rack.in_domains(cluster), two_tiers
        times_s = {}
        for name, (system, machine, given) in runs.items():
            report = simulate(system, shape, machine, given, step=rack.STEP)
            times_s[name] = report.step_s
            throughput, left = published.get(name, (None, None))
            percent = None if throughput is None else 100 * throughput / training.ideal
            speed.add(f"{model}, {name}", 100 * ideal_s / report.step_s, percent)
            level.add(f"{model}, {name}", report.imbalance_after, left)
        reached = dict(zip(PUBLISHED, training.throughput, strict=True))
        for name in ("plain", "EPLB+"):
            simulated, known = times_s[name] / times_s["UltraEP"], reached["UltraEP"] / reached[name]
            gain.add(f"{model}, over {name}", 100 * (simulated - 1), 100 * (known - 1))
    speed.notes.append(
        "EPLB and LPLB place replicas by the load of earlier steps. The drift of routing is not published, so they "
        "are omitted. Pipelines (DSV3), optimizer and embeddings are not modelled. Attention is four `H x H` products "
        "for all models, without DSV3's shared expert. The imbalance of EPLB+ deviates by -8 to 9 % here and in "
        "figure 12, as the shape of the popularity is unknown. `Exact` copies from home: without relays it is slower "
        "than UltraEP, with relays faster by less than half a percent. Domains of 8 without relocated homes are "
        "slower than both."
    )
    return [speed, gain, level]


def figure_11_terms(cluster: Cluster, tokens: int) -> Table:
    """Return the time that each system loses against the ideal, by terms, in percent of the ideal step.

    Experts and exchanges of tokens take as long as the busiest rank, so with another imbalance they lose
    `imbalance - 1` of their share of the ideal step.
    """
    rows: list[list[Value]] = []
    outside, step_s = [], {}
    for model, training in rack.FIGURE_11.items():
        loads, shape = training.loads(tokens), training.shape
        ideal = simulate_uniform(shape, cluster, step=rack.STEP)
        share = busy(ideal, BALANCED) / ideal.step_s
        for name, reached, left in zip(PUBLISHED, training.throughput, training.imbalance, strict=True):
            report = simulate(rack.SYSTEMS[name], shape, cluster, loads, step=rack.STEP)
            experts, exchanges = (
                (busy(report, stages) - busy(ideal, stages)) / ideal.step_s for stages in (BALANCED[:1], BALANCED[1:])
            )
            rest = report.step_s / ideal.step_s - 1 - experts - exchanges
            lost, known = training.ideal / reached - 1, share * (left - 1) + rest
            step_s[model, name] = report.step_s
            rows.append([f"{model}, {name}", *(100 * x for x in (lost, experts, exchanges, rest, known, lost - known))])
            if name == "plain" and lost < known:
                outside.append(f"{100 * (1 - lost / known):.0f} % for {model}")
    columns = {"": "", "lost, published": ".1f", "experts": ".1f", "exchanges": ".1f", "plan and weights": ".1f"}
    columns |= {"sum with the published imbalance": ".1f", "left of the published": "+.1f"}
    layers = {name: sum(map(sum, parts.values())) for name, parts in rack.MEASURED.items()}
    gain = 100 * (layers["Megatron"] / layers["UltraEP"] - 1)
    simulated = 100 * (step_s["Qwen3", "plain"] / step_s["Qwen3", "UltraEP"] - 1)
    reached = rack.FIGURE_11["Qwen3"].throughput
    notes = [
        f"Over plain, the paper's own layers of Qwen3 (figure 13) gain {gain:.1f} %, the simulated ones "
        f"{simulated:.1f} %, and the published steps (figure 11) {100 * (reached[2] / reached[0] - 1):.1f} %. Work "
        f"outside the layers that takes this share of an ideal step explains what plain loses less: "
        f"{', '.join(outside)}."
    ]
    return Table(columns, rows, "Figure 11 taken apart: time lost against the ideal, in % of its step", notes)


def busy(report: Report, stages: tuple[str, ...]) -> float:
    """Return the seconds of these stages in both passes."""
    return sum(report.stages[name + mark].busy_s for name in stages for mark in ("", " (backward)"))


def moved(loads: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Return loads after relocation: homes planned from other samples of the same popularity, layer by layer."""
    earlier = np.random.default_rng(0).poisson(loads.sum(1))
    order = plan_relocation(earlier, cluster.topology())
    return np.stack([layer[:, places] for layer, places in zip(loads, order, strict=True)])


def figure_12(cluster: Cluster, tokens: int) -> Comparison:
    table = Comparison("figure_12", "Figure 12: imbalance after balancing, in prefill")
    for name, (case, eplb_plus, ultraep) in rack.FIGURE_12.items():
        machine = replace(cluster, levels=(replace(cluster.levels[0], size=case.num_ranks),))
        loads = rack.drawn(case, 0, tokens)
        wanted = (("EPLB+", EPLBPlus(), eplb_plus), ("UltraEP", UltraEP(), ultraep), ("Exact", Exact(), None))
        for balancer_name, balancer, published in wanted:
            system = System(balancer, Relay(), Direct(Buffers(rack.ROOM)), case.replica_slots)
            after = load(rack.planned(system, machine, loads))
            table.add(f"{name} ({case.imbalance}), {balancer_name}", imbalance(after), published)
    table.notes.append(
        "Requests per second at a time to the first token are not simulated: there is no queue of requests here, "
        "and the lengths of requests are not published. SGLang's and EPLB's imbalances are from a "
        "recorded trace."
    )
    return table


def simulations(cluster: Cluster, tokens: int) -> list[Comparison]:
    """Return the paper's own simulations of plans: Table 3 and figure 15."""
    mean, figure = (
        Comparison("table_3", "Table 3: means over 15 cases"),
        Comparison("figure_15", "Figure 15: 128 experts, 1 slot"),
    )
    balancers = {"EPLB+": EPLBPlus(), "UltraEP": UltraEP(), "Exact": Exact(), "Exact, eps 0": Exact(eps=0.0)}
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in balancers}
    for case in CASES:
        loads = rack.drawn(case, 0, tokens)
        for name, balancer in balancers.items():
            plan = rack.planned(
                System(balancer, Gather(), Direct(Buffers(rack.ROOM)), case.replica_slots), cluster, loads
            )
            after, used = load(plan), plan.placement[:, plan.num_home :]
            copies = np.bincount(used[used >= 0], minlength=case.num_experts)
            found[name].append((float(imbalance(after)), int(copies.sum()), int(np.max(copies))))
            if (case.num_experts, case.replica_slots) == (128, 1) and case.imbalance >= 6:
                known = rack.FIGURE_15.get((name, case.imbalance))
                figure.add(f"{name}, {case.imbalance:g} before", found[name][-1][0], known)
    for name, rows in found.items():
        numbers = rack.TABLE_3.get(name, (None,) * 3)
        columns = zip(("imbalance", "replicas", "of one expert"), np.mean(rows, axis=0), numbers, strict=True)
        for what, value, number in columns:
            mean.add(f"{name}, {what}", value, number)
    return [mean, figure]


def figure_16(cluster: Cluster, tokens: int) -> list[Comparison]:
    what = "Figure 16: ms to distribute weights, 128 experts, 2 slots"
    tables = {
        way: Comparison(f"figure_16_{way.replace(' ', '_')}", f"{what}, {way}") for way in ("from home", "relays")
    }
    machine = replace(cluster, levels=(replace(cluster.levels[0], bytes_per_s=rack.WEIGHTS_BYTES_PER_S),))
    for before, (home, relayed) in rack.FIGURE_16.items():
        loads = rack.drawn(Case(128, rack.RANKS, 2, before), 0, tokens)
        for name, balancer, known in (("UltraEP", UltraEP(), (home, relayed)), ("Exact", Exact(), (None, None))):
            for way, replicate, number in (("from home", Gather(), known[0]), ("relays", Relay(), known[1])):
                system = System(balancer, replicate, Direct(Buffers(rack.ROOM)), 2)
                report = simulate(system, replace(rack.QWEN3, layers=1), machine, loads, step=Step(backward=False))
                label = f"{name}, {before:g} before, {way}"
                if way == "relays":
                    label += f" for {num_relayed(rack.planned(system, machine, loads))} experts"
                tables[way].add(label, 1e3 * report.stages["weights"].busy_s, number)
    tables["relays"].notes.append(
        "The rate of 710 GB/s per rank follows from the README's times. It is the only parameter of the times from "
        "home. With relays, a relay takes the time of its sends and forwards the first chunk at once. The rule of the "
        "released code relays more experts than the figure states (0, 0, 1, 2, 3). The README of that code has "
        "0.19 ms for three other loads. torch.distributed and DeepEP, the figure's other lines, are not modelled."
    )
    return [*tables.values()]


def num_relayed(plan: Plan) -> int:
    """Return the number of experts with a replica not sent from home."""
    if plan.relay is None:
        return 0
    there = (plan.placement >= 0) & (plan.relay >= 0) & (plan.relay != plan.placement // plan.num_home)
    return len(np.unique(plan.placement[there]))


def tables(tokens: int) -> list[Comparison]:
    cluster = rack.fitted()
    thirteen = figure_13(cluster, rack.FIGURE_11["Qwen3"].loads(tokens))
    thirteen.notes.append(
        f"Fitted: {cluster.gemm.peak_flops_per_s * 1e-12:.0f} TFLOP/s in experts, {cluster.flops_per_s * 1e-12:.0f} "
        f"before them, {cluster.levels[0].bytes_per_s * 1e-9:.0f} GB/s between ranks."
    )
    found = [thirteen, *figure_11(cluster, tokens), figure_12(cluster, tokens)]
    return [*found, *simulations(cluster, tokens), *figure_16(cluster, tokens)]


def divisor(text: str) -> int:
    """Return a number of tokens; type of an option."""
    if TOKENS_PER_RANK % int(text):
        raise argparse.ArgumentTypeError(f"it is {text}; expected a divisor of {TOKENS_PER_RANK}")
    return int(text)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=divisor, default=2048, help="Sampled tokens per rank; a divisor of 8192.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    terms = {"figure_11_terms": figure_11_terms(rack.fitted(), given.tokens)}
    return tables_of(tables(given.tokens)) | terms

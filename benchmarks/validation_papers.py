"""Validation of the simulator against published numbers: fitted and predicted values of each paper."""

from dataclasses import dataclass, replace

from benchmarks import bench_sim_feplb as feplb
from benchmarks import bench_sim_hybridep as hybridep
from benchmarks import bench_sim_rails as rails
from benchmarks import hybridep_clusters as clusters
from benchmarks import ultraep_rack as rack
from benchmarks.fabric.paths import rail_paths, spine_paths
from benchmarks.validation import Check, Pairs, ratios
from jax_moe_lb.sim import AnalyticGemm, Cluster, Collective, Communication, simulate, simulate_uniform

MICROBATCHES, SEED = 20, 0
"""Number of FEPLB's microbatches, and their seed."""

TOKENS = 512
"""Sampled tokens per rank of UltraEP's loads, which are then scaled."""


SHARING = "exchanges share links"


def sharing(cluster: Cluster, shares_links: bool) -> Cluster:
    """Return the same cluster, with or without link sharing between overlapping exchanges."""
    return replace(cluster, communication=replace(cluster.communication, shares_links=shares_links))


# ---- HybridEP ------------------------------------------------------------------


@dataclass(frozen=True)
class TableV:
    """Rows of Table V with one setting.

    Args:
        plain: predicted or fitted, and published seconds of Tutel.
        hybrid: predicted and published seconds of HybridEP.
        constant: fraction of each predicted time due to one fitted number.
    """

    plain: Pairs
    hybrid: Pairs
    constant: list[float]


def table_v(setting: clusters.Setting, names: str = "ML", shares_links: bool = False) -> TableV:
    """Return the seconds of a step."""
    plain, hybrid, constant = [], [], []
    for name in names:
        machine = sharing(setting.cluster(clusters.DATACENTERS[name]), shares_links)
        for size, published_s in clusters.TUTEL[name].items():
            sizes = size * clusters.MIB, clusters.EXPERT_BYTES, clusters.EXPERTS, clusters.DATACENTERS[name]
            shape = setting.model(*sizes)
            chosen = clusters.migration(shape, machine, clusters.SR)
            took_s = clusters.step(shape, machine, clusters.in_library(chosen)).step_s
            plain.append((clusters.step(shape, machine).step_s, published_s))
            hybrid.append((took_s, hybridep.HYBRIDEP[name][size]))
            constant.append(shape.other_s / took_s)
    return TableV(plain, hybrid, constant)


def of_hybridep() -> list[Check]:
    """Return checks of Table V and Table VI."""
    setting, assumed = clusters.fitted(), clusters.Assumed()
    settings = {
        "every block an MoE layer": clusters.fitted(clusters.Assumed(blocks_per_moe=1)),
        "every fourth block": clusters.fitted(clusters.Assumed(blocks_per_moe=4)),
        "half the compute rate": clusters.fitted(replace(assumed, flops_per_s=assumed.flops_per_s / 2)),
        "8 times the compute rate": clusters.fitted(replace(assumed, flops_per_s=8 * assumed.flops_per_s)),
        "half of PCIe": clusters.fitted(replace(assumed, pcie_bytes_per_s=assumed.pcie_bytes_per_s / 2)),
        "fitted to seconds instead of %": clusters.fitted(relative=False),
    }
    found, under = table_v(setting), {name: table_v(one).hybrid for name, one in settings.items()}
    # Other work of a step may scale differently from an all-reduce, so fit each cluster separately.
    for name in clusters.TUTEL:
        under[f"{name} alone, fitted to its own rows"] = table_v(clusters.fitted(names=name), name).hybrid
    under[SHARING] = table_v(setting, shares_links=True).hybrid
    low, high = 100 * min(found.constant), 100 * max(found.constant)
    known = f"2 numbers, from Tutel's 12 rows; one of them is {low:.0f} to {high:.0f} % of a predicted time"
    speedups = ratios(found.hybrid, found.plain)
    source = "HybridEP, Table V"
    return [
        Check(source, "seconds of a step with HybridEP", known, found.hybrid, "Tutel (fitted)", speedups, under),
        *_table_vi(setting, settings),
    ]


def _table_vi(setting: clusters.Setting, settings: dict[str, clusters.Setting]) -> list[Check]:
    checks = []
    for part, what in enumerate(("domains alone", "domains and compression")):
        values, others = _ablation(setting, part), {name: _ablation(one, part) for name, one in settings.items()}
        speedups = ratios(values, _ablation(setting, 0)) if part else ()
        known = "the same 2 numbers of Table V, no more"
        predicted = f"seconds of a step, {what}"
        checks.append(Check("HybridEP, Table VI", predicted, known, values, "domains alone" * part, speedups, others))
    return checks


def _ablation(setting: clusters.Setting, part: int) -> Pairs:
    pairs = []
    for (tokens, expert), rows in hybridep.ABLATION.items():
        for name, row in rows.items():
            machine = setting.cluster(clusters.DATACENTERS[name])
            sizes = tokens * clusters.MIB, expert * clusters.MIB, machine.num_ranks, clusters.DATACENTERS[name]
            shape = setting.model(*sizes)
            alone = clusters.migration(shape, machine, clusters.NO_CODEC, row[2])
            way = clusters.migration(shape, machine, clusters.SR) if part else alone
            pairs.append((clusters.step(shape, machine, clusters.in_library(way)).step_s, row[:2][part]))
    return pairs


# ---- UltraEP -------------------------------------------------------------------

WAYS = ("plain", "EPLB+", "UltraEP")
"""Systems in the order of figure 11."""


def of_ultraep() -> list[Check]:
    """Return checks of figure 11's throughput and figure 13's layer."""
    cluster = rack.fitted()
    ring = replace(cluster, communication=Communication(Collective.RING))
    gemm = cluster.gemm
    machines: dict[str, Cluster] = {
        "counts round a ring, as XLA's": ring,
        "no planner": replace(cluster, planner_s=0.0),
        "a planner of 200 us": replace(cluster, planner_s=200e-6),
        "0.8 of the links' rate": _links(cluster, 0.8),
        "1.2 of the links' rate": _links(cluster, 1.2),
        "0.8 of the products' rate": replace(cluster, gemm=AnalyticGemm(0.8 * gemm.peak_flops_per_s, 310.0, 0.0)),
        SHARING: sharing(cluster, True),
    }
    known = "3 rates, from the times of one model under ideal routing; imbalance before"
    under = {name: _figure_11(machine)["UltraEP"] for name, machine in machines.items()}
    under["DSV3 with its shared expert"] = _figure_11(cluster, 2048)["UltraEP"]
    found = _figure_11(cluster)
    checks = []
    for name, base in (("plain", ""), ("EPLB+", "plain"), ("UltraEP", "plain")):
        speedups = (
            ratios([(1 / a, 1 / b) for a, b in found[name]], [(1 / a, 1 / b) for a, b in found[base]]) if base else ()
        )
        mine = under if name == "UltraEP" else {}
        predicted = f"throughput over the ideal, {'Megatron' if name == 'plain' else name}"
        checks.append(Check("UltraEP, figure 11", predicted, known, found[name], base, speedups, mine))
    under = {name: _figure_13(machine) for name, machine in machines.items()}
    both = _figure_13(cluster)
    speedups, predicted = ratios(both[1:], both[:1]), "ms of a layer, Megatron and UltraEP"
    checks.append(Check("UltraEP, figure 13", predicted, known, both, "Megatron", speedups, under))
    return checks


def _links(cluster: Cluster, factor: float) -> Cluster:
    (links,) = cluster.levels
    return replace(cluster, levels=(replace(links, bytes_per_s=factor * links.bytes_per_s),))


def _figure_11(cluster: Cluster, shared_inner: int = 0) -> dict[str, Pairs]:
    """Return throughput as a fraction of the ideal, by system, for three models; DeepSeek-V3 has a shared expert."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for model, training in rack.FIGURE_11.items():
        loads, shape = rack.drawn(training.case, SEED, TOKENS), training.shape
        if model == "DSV3":
            shape = replace(shape, shared_inner=shared_inner)
        ideal_s = simulate_uniform(shape, cluster, step=rack.STEP).step_s
        for name, published in zip(WAYS, training.throughput, strict=True):
            report = simulate(rack.SYSTEMS[name], shape, cluster, loads, step=rack.STEP)
            pairs[name].append((ideal_s / report.step_s, published / training.ideal))
    return dict(pairs)


def _figure_13(cluster: Cluster) -> list[tuple[float, float]]:
    """Return the sums of a layer's parts: Megatron's, then UltraEP's."""
    loads, pairs = rack.drawn(rack.FIGURE_11["Qwen3"].case, SEED, TOKENS), []
    for name, system in (("Megatron", "plain"), ("UltraEP", "UltraEP")):
        report = simulate(rack.SYSTEMS[system], rack.QWEN3, cluster, loads, step=rack.STEP)
        pairs.append((1e3 * report.step_s / rack.QWEN3.layers, sum(map(sum, rack.MEASURED[name].values()))))
    return pairs


# ---- FEPLB ---------------------------------------------------------------------


def of_feplb() -> list[Check]:
    """Return checks of table 2, and of figure 5 in time."""
    fits = feplb.fitted(MICROBATCHES, SEED)
    found = _table_2(fits[0], feplb.NVLINK_BYTES_PER_S)
    under = {f"NVLink at {rate} GB/s": _table_2(fits[0], rate * 1e9) for rate in (180, 450)}
    under[SHARING] = _table_2(fits[0], feplb.NVLINK_BYTES_PER_S, shares_links=True)
    under |= {f"{fit.copies} copies, fitted": _table_2(fit, feplb.NVLINK_BYTES_PER_S) for fit in fits[1:]}
    known = "4 numbers, from the 9 of plain expert parallelism; stragglers before"
    checks = []
    for name in ("FasterMoE", "FEPLB"):
        times = found[name].layers
        others = {other: run[name].layers for other, run in under.items()}
        over = "before (fitted)"
        speedups = ratios(times, found["before"].layers)
        checks.append(Check("FEPLB, Table 2", f"ms of a layer, {name}", known, times, over, speedups, others))
        others = {other: run[name].stragglers for other, run in under.items()}
        predicted = f"straggler of the products, ms, {name}"
        checks.append(Check("FEPLB, figure 5", predicted, known, found[name].stragglers, assumptions=others))
    return checks


@dataclass(frozen=True)
class FeplbTimes:
    """Times of one system on 2, 4 and 8 ranks, in ms.

    Args:
        layers: forward, then backward.
        stragglers: stragglers of products, forward.
    """

    layers: Pairs
    stragglers: Pairs


def _table_2(fit: feplb.Fit, nvlink_bytes_per_s: float, shares_links: bool = False) -> dict[str, FeplbTimes]:
    times = {}
    all_loads = fit.loads(MICROBATCHES, SEED)
    for name in ("before", "FasterMoE", "FEPLB"):
        layers: list[tuple[float, float]] = []
        stragglers = []
        for ranks, loads in all_loads.items():
            model, cluster = fit.model(len(loads)), sharing(fit.cluster(ranks, nvlink_bytes_per_s), shares_links)
            report = simulate(feplb.SYSTEMS[name], model, cluster, loads, step=feplb.STEP)
            layers += zip(feplb.layer_ms(report, len(loads)), feplb.LAYER_MS[ranks][name], strict=True)
            stragglers.append((feplb.products_ms(report, len(loads)), feplb.PRODUCTS_MS[ranks][name]))
        times[name] = FeplbTimes(layers, stragglers)
    return times


# ---- RailS ---------------------------------------------------------------------


def of_rails() -> list[Check]:
    """Return checks of the published ranges over traffic and transports, for 4 domains."""
    spines = rails.PLANNED | rails.transports(spine_paths)
    by_rail = rails.PLANNED | rails.transports(rail_paths, rails.LANES_BY_RAIL)
    kinds = ("sparsity", "Zipf", "Mixtral")
    under = {
        f"{kind} alone": _range_of([name for name in rails.TRAFFIC if name.startswith(kind)], spines) for kind in kinds
    }
    under["transports that choose the rail"] = _range_of(list(rails.BY_RAIL), by_rail)
    found = _range_of(list(rails.TRAFFIC), spines)
    speedups = [(1 / ours, 1 / theirs) for ours, theirs in found]
    predicted = "time of an all-to-all over that of other transports: most and least"
    return [Check("RailS, abstract", predicted, "nothing; nor is traffic known", found, "transports", speedups, under)]


def _range_of(names: list[str], ways: dict[str, rails.Way]) -> Pairs:
    ratios_found = [
        (found.seconds[rails.RAILS] / seconds).mean()
        for found in (rails.run(rails.TRAFFIC[name], ways, rails.fabric_of(4), seeds=2) for name in names)
        for way, seconds in found.seconds.items()
        if way not in rails.PLANNED
    ]
    published = [1 + percent / 100 for percent in rails.PUBLISHED_TIME]
    return list(zip((max(ratios_found), min(ratios_found)), published, strict=True))

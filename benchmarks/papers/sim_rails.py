"""RailS against other route selections on a rail fabric, by flow simulation: completion time, bus bandwidth, Mixtral's
layer and iteration.

The fabric has NICs of 50 GB/s, 8 per node, 450 GB/s between GPUs of a node, and non-blocking leaf and spine switches.
Every GPU has 4096 tokens with two copies of 8192 bytes each, for any traffic. ECMP and the reactive transports select
the spine between fixed NICs; in a separate table they select the rail instead.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.papers.flows import Flows, Policy, simulate
from benchmarks.papers.paths import Fabric, PathsOf, rail_paths, spine_paths
from benchmarks.papers.policies import MinRtt, Recycle, Rehash, hashed_flows, planned_flows
from benchmarks.render.results import Table, Value
from jax_moe_lb.balancers import RailS
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.plan import rows_between

GPUS = 8
"""GPUs, and NICs, per node."""

TOKENS, PER_TOK, WIDTH, INNER, EXPERTS = 4096, 2, 4096, 14336, 8
"""Tokens per GPU, and the sizes of Mixtral 8x7B."""

LAYERS, VOCABULARY = 32, 32000
"""Further sizes of Mixtral 8x7B."""

NIC_BYTES_PER_S = (50e9, 25e9, 12.5e9, 6.25e9)
"""NICs of 400 Gbit/s, as in the other tables, and slower ones."""

ROW_BYTES = WIDTH * 2
ROUND_S = 40e-6
LANES, LANES_BY_RAIL = 4, GPUS
"""Lanes of a flow under spraying policies; by rail, one lane per rail."""

PEAK_FLOPS_PER_S, UTILISATION = 989e12, 0.4
"""Published bf16 peak of an H100, and the assumed utilisation of a training step."""

PUBLISHED_TIME, PUBLISHED_BUS = (-17, -78), (20, 78)
"""Ranges in the paper, in percent, from minimum to maximum."""


def fabric_of(num_nodes: int, over_subscribed: int = 1) -> Fabric:
    fabric = Fabric.non_blocking(num_nodes, GPUS, nic_bytes_per_s=50e9, gpu_bytes_per_s=450e9)
    return replace(fabric, spine_bytes_per_s=fabric.spine_bytes_per_s / over_subscribed)


# ---- traffic: counts [R, E] --------------------------------------------------------------


def sparse(rng: np.random.Generator, num_gpus: int, sparsity: float) -> np.ndarray:
    """Return sparse random shares (gamma of shape 2), a fraction of them zero, scaled to the rows of all GPUs."""
    share = rng.gamma(2, size=(num_gpus, num_gpus)) * (rng.random((num_gpus, num_gpus)) >= sparsity)
    return (share / share.sum() * num_gpus * TOKENS * PER_TOK).astype(np.int32)


def popular(rng: np.random.Generator, num_gpus: int, exponent: float) -> np.ndarray:
    """Return counts for one expert per GPU, with Zipf popularity in random order, the same on all GPUs."""
    share = rng.permutation(np.arange(1.0, num_gpus + 1) ** -exponent)
    return rng.multinomial(TOKENS * PER_TOK, share / share.sum(), num_gpus).astype(np.int32)


def mixtral(rng: np.random.Generator, num_gpus: int, spread: float) -> np.ndarray:
    """Return counts for eight experts, two per token, in groups of eight GPUs spread over the nodes.

    Expert `e` has one home in each group: its homes are adjacent, and GPU `r` uses number `r % (R / 8)` of them.
    Preferences differ between GPUs by a normal logit with standard deviation `spread`.
    """
    logits = spread * rng.normal(size=(num_gpus, 1, EXPERTS)) + rng.gumbel(size=(num_gpus, TOKENS, EXPERTS))
    chosen = np.argpartition(-logits, PER_TOK, -1)[:, :, :PER_TOK]
    rows = (chosen[:, :, :, None] == np.arange(EXPERTS)).sum((1, 2))
    groups = num_gpus // EXPERTS
    counts = np.zeros((num_gpus, num_gpus), np.int32)
    gpu = np.arange(num_gpus)[:, None]
    counts[gpu, np.arange(EXPERTS) * groups + gpu % groups] = rows
    return counts


TRAFFIC: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    **{f"sparsity {share:g}": partial(sparse, sparsity=share) for share in (0.0, 0.5, 0.8, 0.95)},
    **{f"Zipf {exponent}": partial(popular, exponent=exponent) for exponent in (0.4, 0.8, 1.2)},
    "Mixtral, nearly even": partial(mixtral, spread=0.3),
    "Mixtral, own preferences": partial(mixtral, spread=1.5),
}
BY_RAIL = ("sparsity 0.5", "sparsity 0.8", "sparsity 0.95", "Zipf 0.8", *list(TRAFFIC)[-2:])
MIXTRAL = tuple(name for name in TRAFFIC if name.startswith("Mixtral"))


# ---- route selections ----------------------------------------------------------------------

Way = Callable[[np.ndarray, Fabric, int], tuple[Flows, Policy | None]]
"""Function of counts, fabric and seed, returning the flows and their policy."""


def planned(counts: np.ndarray, fabric: Fabric, seed: int, *, balance: bool) -> tuple[Flows, None]:
    plan = plain_plan(counts, fabric.topology)
    if balance:
        plan, _ = RailS().rebalance(counts, plan, fabric.topology, ())
    return planned_flows(counts, plan, fabric, ROW_BYTES), None


def hashed(
    counts: np.ndarray, fabric: Fabric, seed: int, *, paths: PathsOf, policy: Policy | None = None, lanes: int = 1
) -> tuple[Flows, Policy | None]:
    rows = rows_between(counts, plain_plan(counts, fabric.topology))
    return hashed_flows(rows, fabric, ROW_BYTES, paths, lanes, seed), policy


RAILS, RECEIVERS_RAIL, ECMP = "RailS", "receiver's rail", "ECMP"
PLANNED: dict[str, Way] = {RAILS: partial(planned, balance=True), RECEIVERS_RAIL: partial(planned, balance=False)}


def transports(paths: PathsOf, lanes: int = LANES) -> dict[str, Way]:
    return {
        ECMP: partial(hashed, paths=paths),
        "PLB-like": partial(hashed, paths=paths, policy=Rehash()),
        "MinRTT": partial(hashed, paths=paths, policy=MinRtt(), lanes=lanes),
        "REPS-like": partial(hashed, paths=paths, policy=Recycle(), lanes=lanes),
    }


# ---- results -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """Results of all seeds, `[seeds]` each; bytes are the mean ones sent by a GPU to others."""

    floor_s: np.ndarray
    sent_bytes: np.ndarray
    busiest_rows: np.ndarray
    seconds: dict[str, np.ndarray]


def floor_s(rows: np.ndarray, fabric: Fabric) -> float:
    """Return a lower bound in seconds: theorem 2 for each node's NICs together, and the port traffic of each GPU."""
    gpus, nodes = fabric.gpus_per_node, fabric.num_nodes
    sent_bytes = rows * (1.0 - np.eye(fabric.num_gpus)) * ROW_BYTES
    node = np.arange(fabric.num_gpus) // gpus
    near = sent_bytes * (node[:, None] == node)
    far = (sent_bytes - near).reshape(nodes, gpus, nodes, gpus).sum((1, 3))
    nics = max(far.sum(0).max(), far.sum(1).max()) / gpus / fabric.nic_bytes_per_s
    ports = max(sent_bytes.sum(0).max(), sent_bytes.sum(1).max()) / (fabric.gpu_bytes_per_s + fabric.nic_bytes_per_s)
    inside = max(near.sum(0).max(), near.sum(1).max()) / fabric.gpu_bytes_per_s
    return max(nics, ports, inside)


def run(draw: Callable, ways: dict[str, Way], fabric: Fabric, seeds: int, round_s: float = ROUND_S) -> Results:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    beside = []
    for seed in range(seeds):
        # Use independent streams, so that hashes do not correlate with the traffic.
        traffic_seed, hash_seed, policy_seed = map(int, np.random.SeedSequence(seed).generate_state(3))
        counts = draw(np.random.default_rng(traffic_seed), fabric.num_gpus)
        rows = rows_between(counts, plain_plan(counts, fabric.topology))
        sent_bytes = (rows.sum() - np.trace(rows)) * ROW_BYTES / fabric.num_gpus
        beside.append((floor_s(rows, fabric), sent_bytes, rows.sum(0).max()))
        for name, way in ways.items():
            flows, policy = way(counts, fabric, hash_seed)
            seconds[name].append(simulate(flows, fabric, policy, round_s, policy_seed).seconds)
    return Results(*np.array(beside).T, {name: np.array(times) for name, times in seconds.items()})


def layer_s(busiest_rows: np.ndarray, utilisation: float) -> np.ndarray:
    """Return the compute time of one Mixtral layer, forward and backward, on the busiest GPU, in seconds.

    It counts attention projections with 8 key and value heads of 32, attention over half of 4096 tokens, and three
    products per expert; the backward pass takes twice as long. The four exchanges, there and back in both passes, each
    take the simulated time, as the return path has the same bytes on the reversed links. No overlap is assumed, and
    other work is ignored.
    """
    attention = TOKENS * (2 * 2.5 * WIDTH**2 + 2 * TOKENS * WIDTH)
    experts = busiest_rows * 6 * WIDTH * INNER
    return 3 * (attention + experts) / (PEAK_FLOPS_PER_S * utilisation)


# ---- tables --------------------------------------------------------------------------------


def spread(values: np.ndarray, scale: float) -> list[float]:
    return [float(scale * x) for x in (values.mean(), values.min(), values.max())]


def times(title: str, cases: dict[str, Results]) -> Table:
    rows: list[list[Value]] = [
        [name, *(spread(seconds, 1e3) for seconds in results.seconds.values())] for name, results in cases.items()
    ]
    columns = {"traffic": ""} | dict.fromkeys(next(iter(cases.values())).seconds, ".2f")
    return Table(columns, rows, f"{title}: completion time, ms; mean and range of the seeds")


def changes(num_nodes: int, all_results: dict[str, Results]) -> Table:
    """Return changes of time and bus bandwidth by RailS against other ways: means over seeds."""
    others = [way for way in next(iter(all_results.values())).seconds if way != RAILS]
    rows: list[list[Value]] = []
    for name, results in all_results.items():
        ratios = [results.seconds[RAILS] / results.seconds[way] for way in others]
        both = [100 * (mean - 1) for ratio in ratios for mean in (ratio.mean(), (1 / ratio).mean())]
        over = (results.seconds[RAILS] / results.floor_s).max()
        bus = spread(results.sent_bytes / results.seconds[RAILS], 1e-9)
        rows.append([name, *map(float, both), float(over), bus])
    columns = {"traffic": ""} | {f"{what}, {way}": "+.0f" for way in others for what in ("time", "bus")}
    columns |= {"time over the floor, worst seed": ".3f", "bus GB/s": ".1f"}
    return Table(columns, rows, f"{num_nodes} domains: RailS against others, time and bus bandwidth, %")


def iteration(seeds: int) -> Table:
    """Return the time of an iteration of Mixtral 8x7B, RailS over ECMP, by the rate of a NIC and of the spines."""
    rows: list[list[Value]] = []
    ways = {RAILS: PLANNED[RAILS], ECMP: transports(spine_paths)[ECMP]}
    output_s = 3 * TOKENS * 2 * WIDTH * VOCABULARY / (PEAK_FLOPS_PER_S * UTILISATION)
    for num_nodes, over_subscribed in ((4, 1), (4, 4), (8, 1)):
        for name in MIXTRAL:
            changed: list[Value] = []
            for rate in NIC_BYTES_PER_S:
                fabric = replace(fabric_of(num_nodes), nic_bytes_per_s=rate, spine_bytes_per_s=rate / over_subscribed)
                found = run(TRAFFIC[name], ways, fabric, seeds)
                compute_s = output_s + LAYERS * layer_s(found.busiest_rows, UTILISATION)
                ours, theirs = (compute_s + LAYERS * 4 * found.seconds[way] for way in (RAILS, ECMP))
                changed.append(float(100 * ((ours / theirs).mean() - 1)))
            rows.append([f"{num_nodes}, {over_subscribed}:1, {name}", *changed])
    columns = {"domains, spines, traffic": ""} | {f"NICs of {rate / 1e9:g} GB/s": "+.1f" for rate in NIC_BYTES_PER_S}
    return Table(columns, rows, "An iteration of Mixtral 8x7B: time of RailS against ECMP, %")


def published(all_results: dict[int, dict[str, Results]]) -> Table:
    """Return ranges over all rows of the first tables, against the paper; it does not include the receiver's rail.

    Deviations are differences of both ends from the published ones, in points: above 0 if RailS gains less time, or
    more bandwidth, here.
    """
    rows: list[list[Value]] = []
    for kind in ("sparsity", "Zipf", "Mixtral"):
        of_kind = (of for by in all_results.values() for name, of in by.items() if name.startswith(kind))
        others = ((of, s) for of in of_kind for way, s in of.seconds.items() if way not in PLANNED)
        cells = [(of.seconds[RAILS] / seconds).mean() for of, seconds in others]
        slow, fast = max(cells), min(cells)
        time, bus = (100 * (slow - 1), 100 * (fast - 1)), (100 * (1 / slow - 1), 100 * (1 / fast - 1))
        inside = np.mean([1 + PUBLISHED_TIME[1] / 100 <= cell <= 1 + PUBLISHED_TIME[0] / 100 for cell in cells])
        rows.append([kind, *_beside(time, PUBLISHED_TIME), *_beside(bus, PUBLISHED_BUS), float(100 * inside)])
    ends = [f"{low:+d} to {high:+d}" for low, high in (PUBLISHED_TIME, PUBLISHED_BUS)]
    rows.append(["published, all", ends[0], "", ends[1], "", None])
    columns = dict.fromkeys(("traffic", "time, %", "deviation of time", "bus bandwidth, %", "deviation of bus"), "")
    columns |= {"cells in the published range of time, %": ".0f"}
    return Table(columns, rows, "All domains: RailS against ECMP, PLB-like, MinRTT and REPS-like")


def _beside(ours: tuple[float, float], published: tuple[int, int]) -> list[str]:
    apart = [f"{a - b:+.0f}" for a, b in zip(ours, published, strict=True)]
    return [f"{ours[0]:+.0f} to {ours[1]:+.0f}", " and ".join(apart)]


# ---- command line --------------------------------------------------------------------------


def measure(domains: list[int], seeds: int) -> dict[str, Table]:
    spines, rails = PLANNED | transports(spine_paths), PLANNED | transports(rail_paths, LANES_BY_RAIL)
    middle = 8
    one = TRAFFIC["sparsity 0.8"]
    found = {d: {name: run(draw, spines, fabric_of(d), seeds) for name, draw in TRAFFIC.items()} for d in domains}
    by_ways = {name: run(TRAFFIC[name], rails, fabric_of(middle), seeds) for name in BY_RAIL}
    narrow = {f"{k}:1": run(one, spines, fabric_of(middle, k), seeds) for k in (1, 2, 4)}
    return {
        f"changes_{middle}": changes(middle, found[middle]),
        "published": published(found),
        "by_rail": times("8 domains, transports that choose the rail", by_ways),
        "over_subscribed": times("8 domains, sparsity 0.8, spine links over-subscribed by", narrow),
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--domains", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iteration", action="store_true", help="Time iterations of Mixtral only.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {"iteration": iteration(given.seeds)} if given.iteration else measure(given.domains, given.seeds)

"""Scaling of planners, split, legality check, layer and simulator with ranks, experts and tokens.

    python -m benchmarks.bench_scaling [--quick] [--plot docs/scaling.png] [--out benchmarks/results/bench_scaling.json]

Planners run as on a host: C++ on NumPy arrays. Split and check are jitted, as in a layer; the split is for one rank, as
each rank computes its own. The layer is forward and backward on 8 virtual devices, which share the cores. Counts are
sampled from a lognormal popularity, the same on all ranks.
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from benchmarks.loglog import draw, exponents
from benchmarks.results import Table, Value, out_option, picture_file, report, spread
from benchmarks.skewed_layer import Sizes, jitted_step, logits_by_popularity, tokens_of, weights_of
from benchmarks.timing import interleaved_s
from jax_moe_lb import Topology, exact, plain, use_virtual_cpu_devices
from jax_moe_lb.balancers import Exact, Greedy, UltraEP
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core import imbalance, load, nearest_first, plain_plan
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.validation import is_legal
from jax_moe_lb.sim import Cluster, Links, ModelShape, simulate

REPLICA_SLOTS = 2
COPIES_PER_RANK = 4096 * 8
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
EXPERTS = (64, 128, 256, 512, 1024)
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SIM_RANKS = RANKS[:-1]
LAYER = Sizes(num_ranks=8, num_tokens=0, width=128, inner=128, num_experts=32, per_tok=2)
PLANNERS: dict[str, Balancer] = {"exact": Exact(), "greedy": Greedy(), "ultraep": UltraEP(min_tokens=1)}
INSIDE = ("split", "legality")
FLOOR = 64
"""Minimum ranks, or tokens, of the points used in fits; below, call overhead dominates."""

Times = dict[str, np.ndarray]
"""Seconds of each repetition, by name."""


def drawn(num_ranks: int, num_experts: int) -> np.ndarray:
    """Return sampled counts `[R, E]`."""
    rng = np.random.default_rng(0)
    popularity = rng.lognormal(0.0, 1.0, num_experts)
    return rng.multinomial(COPIES_PER_RANK, popularity / popularity.sum(), num_ranks).astype(np.int32)


def planned(balancer: Balancer, counts: np.ndarray) -> Plan:
    """Return a plan computed on the host, with all ranks in one domain."""
    num_ranks, num_experts = counts.shape
    topology = Topology.flat(num_ranks)
    start = plain_plan(counts, topology, num_experts // num_ranks + REPLICA_SLOTS)
    return balancer.rebalance(counts, start, topology, ())[0]


def time_planning(num_ranks: int, num_experts: int, repeats: int) -> tuple[Times, list[float]]:
    """Return times of planners, split and check, and the imbalance before and after each planner."""
    counts = drawn(num_ranks, num_experts)
    plans = {name: planned(balancer, counts) for name, balancer in PLANNERS.items()}
    on_device, plan = jnp.asarray(counts), jax.tree.map(jnp.asarray, plans["exact"])
    rank = jnp.int32(num_ranks // 2)
    split, check = jax.jit(nearest_first, static_argnums=3), jax.jit(is_legal)
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(planned, balancer, counts) for name, balancer in PLANNERS.items()
    }
    calls["split"] = lambda: split(on_device, plan.quota, rank, num_ranks)
    calls["legality"] = lambda: check(plan, on_device)
    before = plain_plan(counts, Topology.flat(num_ranks))
    return interleaved_s(calls, repeats), [float(imbalance(load(one))) for one in (before, *plans.values())]


def time_layer(num_tokens: int, repeats: int) -> Times:
    """Return times of a layer's forward and backward pass, balanced and plain."""
    sizes = Sizes(LAYER.num_ranks, num_tokens, LAYER.width, LAYER.inner, LAYER.num_experts, LAYER.per_tok)
    mesh = jax.make_mesh((sizes.num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
    popularity = np.random.default_rng(0).lognormal(0.0, 1.0, sizes.num_experts)
    args = (tokens_of(mesh, sizes, logits_by_popularity(popularity, sizes, 0)), *weights_of(mesh, sizes))
    systems = {"exact": exact(REPLICA_SLOTS), "plain": plain()}
    steps = {name: jitted_step(mesh, one, sizes.router).lower((), *args).compile() for name, one in systems.items()}
    return interleaved_s({name: functools.partial(step, (), *args) for name, step in steps.items()}, repeats)


def time_simulator(num_ranks: int, repeats: int) -> Times:
    """Return times of one simulated layer with 1024 experts."""
    num_experts = EXPERTS[-1]
    model = ModelShape(1, 4096, 1536, num_experts, per_token=8, tokens=COPIES_PER_RANK // 8)
    cluster = Cluster((Links("gpu", num_ranks, 360e9),))
    counts = drawn(num_ranks, num_experts)
    systems = {"exact": exact(REPLICA_SLOTS), "plain": plain()}
    return interleaved_s(
        {name: functools.partial(simulate, one, model, cluster, counts) for name, one in systems.items()}, repeats
    )


def powers(times: dict[tuple[int, ...], Times], kinds: Sequence[str], where: Sequence[str]) -> list[list[Value]]:
    """Return rows with name, fitted exponents of the sizes, and geometric error of the fit."""
    rows: list[list[Value]] = []
    for name in where:
        points = [(sizes, np.median(of[name])) for sizes, of in times.items() if sizes[0] >= FLOOR]
        *found, off = exponents(np.array([sizes for sizes, _ in points]), np.array([time_s for _, time_s in points]))
        text = " ".join(f"{kind}^{power:.2f}" for kind, power in zip(kinds, found, strict=True))
        rows.append([name, text, off, len(points)])
    return rows


def curves(times: dict[tuple[int, ...], Times], names: Sequence[str]) -> dict:
    """Return curves over the first size."""
    sizes = sorted({key[0] for key in times})
    return {name: (sizes, [spread(times[key][name]) for key in sorted(times)]) for name in names}


def main() -> None:
    """Print the tables and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use few sizes and repetitions.")
    parser.add_argument("--plot", type=picture_file, help="Output PNG of the plot.")
    out_option(parser)
    given = parser.parse_args()
    use_virtual_cpu_devices(LAYER.num_ranks)
    every, repeats = (3, 3) if given.quick else (1, 5)
    shapes = [(r, e) for e in EXPERTS[-1::-every] for r in RANKS[::every] if r <= e]
    planning, found = {}, {}
    for shape in sorted(shapes):
        planning[shape], found[shape] = time_planning(*shape, repeats)
        print(f"planned {shape}", flush=True)
    layer = {(tokens,): time_layer(tokens, repeats) for tokens in TOKENS[: 7 : 2 * every - 1]}
    simulated = {(ranks,): time_simulator(ranks, repeats) for ranks in SIM_RANKS[::every]}
    names = (*PLANNERS, *INSIDE)
    report(
        {
            "planning": planning_table(planning, found, names),
            "layer": Table(
                {"tokens per rank": "d", "exact ms": ".0f", "plain ms": ".0f", "exact / plain": ".2f"},
                [
                    [tokens, *_ms(of, ("exact", "plain")), spread(of["exact"] / of["plain"])]
                    for (tokens,), of in layer.items()
                ],
            ),
            "simulator": Table(
                {"ranks": "d", "exact ms": ".1f", "plain ms": ".1f"},
                [[ranks, *_ms(of, ("exact", "plain"))] for (ranks,), of in simulated.items()],
            ),
            "powers": Table(
                {"quantity": "", "growth": "", "geometric error": ".2f", "points": "d"},
                powers(planning, "RE", names)
                + [[f"layer, {row[0]}", *row[1:]] for row in powers(layer, "T", ("exact", "plain"))]
                + [[f"simulator, {row[0]}", *row[1:]] for row in powers(simulated, "R", ("exact", "plain"))],
            ),
        },
        given.out,
    )
    if given.plot is not None:
        most = {shape: of for shape, of in planning.items() if shape[1] == EXPERTS[-1]}
        panels = {
            f"planning, {EXPERTS[-1]} experts": curves(most, names),
            "layer, forward and backward": curves(layer, ("exact", "plain")),
            "simulator, one layer": curves(simulated, ("exact", "plain")),
        }
        labels = dict(zip(panels, ("ranks", "tokens per rank", "ranks"), strict=True))
        draw(panels, labels, given.plot)


def planning_table(planning: dict[tuple[int, ...], Times], found: dict, names: Sequence[str]) -> Table:
    """Return times and imbalances of each shape."""
    columns = {"ranks": "d", "experts": "d"} | {f"{name} ms": ".2f" for name in names} | {"imbalance": ".2f"}
    columns |= {f"with {name}": ".3f" for name in PLANNERS}
    return Table(columns, [[*shape, *_ms(of, names), *found[shape]] for shape, of in planning.items()])


def _ms(of: Times, names: Sequence[str]) -> list[Value]:
    return [spread(of[name] * 1e3) for name in names]


if __name__ == "__main__":
    main()

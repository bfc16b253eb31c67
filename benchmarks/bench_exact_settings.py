"""The default `exact(2)` beside plain expert parallelism and the best of all its settings, in the simulator.

    python -m benchmarks.bench_exact_settings [--quick] [--out FILE.json]

One layer, forward and backward, of published models on the preset h100_node, planning included, on synthetic loads of
two shapes and several imbalances. The settings are 65: `eps`, `max_fan_out`, one or two slots, with and without relays,
each with `cost=None`, and no plan. A row has the loads of one model on which the default is worst.
"""

import argparse
import itertools
from dataclasses import replace

from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import System, exact, plain
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, LoadShape, ModelShape, simulate, skewed_counts
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.transport import Relay

LLAMA_4_MAVERICK = ModelShape(layers=1, hidden=5120, inner=8192, experts=128, per_token=1, tokens=8192, sequence=8192)
PRESETS = ("mixtral_8x7b", "qwen3_30b", "qwen3_235b", "deepseek_v3")
SHAPES = (LoadShape.RANKS, LoadShape.LOGNORMAL)
IMBALANCES = (1.02, 1.1, 1.3, 2.0, 3.0)
SLOTS = 2


def models() -> dict[str, ModelShape]:
    """Return one layer of each model."""
    found = {name: load_config("model", name, "model").model.build() for name in PRESETS}
    return {name: replace(model, layers=1, other_s=0.0) for name, model in found.items()} | {
        "llama_4_maverick": LLAMA_4_MAVERICK
    }


def settings() -> dict[str, System]:
    """Return all settings of `exact` without a cost, and plain."""
    found = {"plain": plain()}
    every = itertools.product((0.0, 0.01, 0.05, 0.2), (1, 2, 4, None), (1, SLOTS), (False, True))
    for eps, fan_out, slots, relayed in every:
        system = System(Exact(eps=eps, max_fan_out=fan_out, cost=None), replica_slots=slots)
        name = f"eps {eps:g}, fan-out {fan_out or 'any'}, slots {slots}" + ", relays" * relayed
        found[name] = replace(system, replicate=Relay()) if relayed else system
    return found


def row_of(name: str, model: ModelShape, cluster: Cluster, imbalances: tuple[float, ...]) -> list[Value]:
    """Return the worst of all loads over plain, and over the best setting with its imbalance and name."""
    over_plain, over_best, number = [], [], 0
    for imbalance, shape in itertools.product(imbalances, SHAPES):
        try:
            counts = skewed_counts(model, cluster.num_ranks, imbalance, 1, 0, shape)
        except ValueError:  # few experts do not reach each imbalance
            continue
        number += 1
        times_s = {key: simulate(one, model, cluster, counts).step_s for key, one in settings().items()}
        own_s = simulate(exact(replica_slots=SLOTS), model, cluster, counts).step_s
        best = min(times_s, key=times_s.__getitem__)
        over_plain.append(own_s / times_s["plain"])
        over_best.append((own_s / times_s[best], imbalance, best))
    worst, imbalance, best = max(over_best)
    return [name, number, min(over_plain), max(over_plain), worst, imbalance, best]


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use one imbalance and two models.")
    out_option(parser)
    given = parser.parse_args()
    cluster = load_config("cluster", "h100_node", "cluster").cluster.build()
    imbalances = IMBALANCES[3:4] if given.quick else IMBALANCES
    found = list(models().items())
    found = found[:2] if given.quick else found
    columns = {"model": "", "loads": "d", "over plain, least": ".3f", "over plain, most": ".3f"}
    columns |= {"over the best setting, most": ".3f", "imbalance there": ".2f", "best setting there": ""}
    report({"settings": Table(columns, [row_of(*one, cluster, imbalances) for one in found])}, given.out)


if __name__ == "__main__":
    main()

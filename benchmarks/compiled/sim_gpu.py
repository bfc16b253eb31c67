"""Time of a layer in the simulator beside the measured one of the slowest of eight ranks on one H100.

The simulator has the plans of the measurement and the rates of `core/devices/h100.toml`. Rows and replicas travel
at the rate of copies inside the device, as in the measurement; router, planner and the exchange of counts are left out.
The measured times are those of `benchmarks.gpu`.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu.comparison import LAYERS, Layer, Served, variants
from benchmarks.gpu.measured_rates import tables
from benchmarks.render.results import Table, Value
from jax_moe_lb.sim import Cluster, ModelShape, Step, simulate
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.hbm import SUMS_BYTES
from jax_moe_lb.sim.work import layer_work

OWN = ", own kernels"
"""Mark of systems whose kernels read weights in place; others join them."""

COLUMNS = {"layer": "", "skew": "", "system": "", "load / mean": ".2f"}
COLUMNS |= {"measured ms": ".2f", "simulated ms": ".2f", "deviation %": "+.1f"}


def machine(layer: Layer, *, joins: bool) -> Cluster:
    """Return a node of H100 whose ranks send at the rate of copies inside a device."""
    node = load_config("preset", "h100_node", "cluster").cluster.build()
    # A copy reads and writes; rows of the rank itself are copied, too, and use no link of the simulator.
    rate = node.hbm_bytes_per_s / 2 * (layer.ranks - 1) / layer.ranks
    links = replace(node.levels[0], bytes_per_s=rate, latency_s=0.0)
    return replace(node, levels=(links,), planner_s=0.0, copy_bytes_per_s=None, joins_weights=joins)


def simulated_ms(layer: Layer, name: str, skew: str) -> float:
    """Return the milliseconds of a layer, forward and backward, with a system and skew of the table of ranks."""
    variant = variants(layer)[name.removesuffix(OWN)]
    served = Served.of(layer, variant, float(skew) if skew[0].isdigit() else skew)
    sizes = (layer.hidden, layer.inner, layer.experts, layer.per_token, layer.tokens)
    model = ModelShape(1, *sizes, pre_expert_s=0.0)
    cluster = machine(layer, joins=not name.endswith(OWN))
    found = simulate(variant.system, model, cluster, served.counts[None], step=Step(exchange_counts=False))
    work, _ = layer_work(variant.system, model, cluster, served.counts)
    # The measured program copied and added the gradients of all replica slots.
    slots, joined_at_home = variant.system.replica_slots, work.joins * layer.experts // layer.ranks
    added = (3 + 4 * SUMS_BYTES / model.itemsize) * (slots > 0)
    more = (2 * joined_at_home + 4 * slots + added) * model.expert_bytes - work.arriving
    return 1e3 * (found.step_s + more / cluster.hbm_bytes_per_s)


def rows_of(name: str, skews: tuple[str, ...] = ()) -> Iterator[list[Value]]:
    """Yield the rows of a layer of `LAYERS`, with these skews or all."""
    measured: list[Mapping[str, Any]] = tables().get(f"rank-{name}", [])
    for row in measured:
        # A capacity limit is no part of the simulator.
        if row["ms"] is None or row["system"].startswith("capacity") or (skews and row["skew"] not in skews):
            continue
        ms = simulated_ms(LAYERS[name], row["system"], row["skew"])
        deviation = 100 * (ms / row["ms"] - 1)
        yield [name, row["skew"], row["system"], row["load / mean"], row["ms"], ms, deviation]


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    rows = [row for name in LAYERS for row in rows_of(name)]
    worst = float(np.max(np.abs([row[-1] for row in rows])))
    summary = Table({"rows": "d", "largest deviation %": ".1f"}, [[len(rows), worst]])
    return {"summary": summary, "layers": Table(COLUMNS, rows)}

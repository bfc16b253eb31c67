"""Time of an exchange of tokens on the links of TPU slices, by the form of the exchange.

Nothing is compiled. Routing is uniform, and links and routes are those of the estimates: a mesh without wraparound, and
routes in the order of its axes. A ring gathers the tokens of all ranks along one axis after another.
"""

import argparse
import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import LayerSizes, Target
from jax_moe_lb.aot.operation_time import rates_of
from jax_moe_lb.collectives.exchange_paths import ExchangePath
from jax_moe_lb.collectives.exchange_time import Machine, exchange_time
from jax_moe_lb.transport.wave_rows import share_in_member

SLICES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:2x4", "v6e:8x8", "v6e:16x16", "v5p:2x2x2", "v5p:4x4x4")
SIZES = LayerSizes()
ROW_BYTES = 2 * SIZES.hidden
EXPERTS = {256: 256}
"""Experts of slices with more ranks than the reference layer has experts."""


def options(parser: argparse.ArgumentParser) -> None:
    del parser


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    columns = {"slice": "", "rows, Direct": ".1f", "rows, Once": ".1f"}
    names = ("Direct", "Once", "along the first axis first", "along the last axis first", "ring, all links", "ring")
    columns |= dict.fromkeys((f"{name}, ms" for name in names), ".2f")
    title = "Estimated dispatch of 4096 tokens per rank to 8 of 128 experts, 256 on 256 ranks"
    return {"links": Table(columns, list(map(row, SLICES)), title)}


def row(name: str) -> list[Value]:
    """Return the rows of a token, and milliseconds by form."""
    target = Target.parse(name)
    machine = Machine(rates_of(target), target.num_devices, target.torus)
    ranks = math.prod(machine.torus)
    of_all = np.ones((ranks, ranks))
    direct, once = SIZES.per_token / ranks, share(ranks, ranks)
    ring_ms = 1e3 * (ranks - 1) * SIZES.tokens * ROW_BYTES / (machine.rates.link * machine.rates.link_share)
    axes = range(len(machine.torus))
    exchanges_ms = [ms(direct * of_all, machine), ms(once * of_all, machine)]
    hops_ms = [along_axes(order, machine) for order in (axes, axes[::-1])]
    return [f"`{name}`", direct * ranks, once * ranks, *exchanges_ms, *hops_ms, ring_ms / len(axes), ring_ms]


def share(members: int, ranks: int) -> float:
    """Return the share of tokens with an expert in one of several equal groups of ranks."""
    return share_in_member(EXPERTS.get(ranks, SIZES.experts), SIZES.per_token, members)


def ms(rows_per_token: np.ndarray, machine: Machine) -> float:
    """Return the milliseconds of an exchange of rows between ranks, in rows for each token of a rank."""
    sent = SIZES.tokens * ROW_BYTES * rows_per_token[:, :, None]
    return 1e3 * exchange_time(sent, ExchangePath.NATIVE, ROW_BYTES, SIZES.tokens, machine).seconds


def along_axes(order: Sequence[int], machine: Machine) -> float:
    """Return the milliseconds of an exchange per axis; a token travels once to each group of ranks with its experts."""
    shape, total, members = machine.torus, 0.0, 1
    places = np.indices(shape).reshape(len(shape), -1)
    for axis in order:
        differs = places[:, :, None] != places[:, None]
        is_on_line = ~np.delete(differs, axis, 0).any(0)
        sources, members = members, members * shape[axis]
        total += ms(np.where(is_on_line, sources * share(members, math.prod(shape)), 0), machine)
    return total

"""Estimated time of exchanges, by the implementation of the target.

The estimate of an exchange is a fixed cost plus the time of its bottleneck:

- **One-shot kernel** of XLA on NVIDIA GPUs: the busiest thread block, or the link of the busiest rank. A block copies
  1 KiB per iteration, and every update that it walks has a cost of its own (`one_shot_lists.py`).
- **Device kernel** of NCCL: the link of the busiest rank, at a share that falls with the updates per peer.
- **Sends and receives** of NCCL: a wait of the host for the lists and a cost per update and peer, then the link.
- **TPU**: the busiest link of the torus, with dimension-ordered routes.

`core/device_rates.py` has the rates. They are partly assumed, so the times are estimates.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.collectives.exchange_paths import ExchangePath
from jax_moe_lb.collectives.one_shot_lists import BLOCK_BYTES, VECTOR_BYTES, blocks_per_peer
from jax_moe_lb.core.device_rates import DeviceRates, GpuRates, TpuRates

UpdateBytes = Num[np.ndarray, "R R U"]
"""Bytes per update from rank (first) to rank (second)."""

PeerBytes = Num[np.ndarray, "R R"]
"""Bytes from rank (row) to rank (column)."""


@dataclass(frozen=True)
class Estimate:
    """Estimated time of an operation."""

    seconds: float  # the time
    bound: str  # its bottleneck: `blocks`, `link`, `network`, `updates` or `latency`


@dataclass(frozen=True)
class Machine:
    """Ranks of an exchange and the links."""

    rates: GpuRates | TpuRates  # rates of a device
    ranks_per_domain: int  # consecutive ranks with the fastest links to each other: an NVLink domain of GPUs
    torus: tuple[int, ...] = ()  # shape of a TPU slice, `()` (default) for GPUs


def exchange_time(sent: UpdateBytes, path: ExchangePath, row_bytes: int, operand_rows: int, on: Machine) -> Estimate:
    """Estimate the time of a ragged exchange."""
    between = sent.sum(2)
    rates = on.rates
    if isinstance(rates, TpuRates):
        return _plus(rates.collective, _on_torus(between, rates, on))
    if path is ExchangePath.ONE_SHOT:
        block_s = one_shot_block_s(sent, row_bytes, operand_rows, rates)
        return _plus(rates.one_shot, max(Estimate(block_s, "blocks"), _links(between, on, rates.link_share), key=_s))
    if path is ExchangePath.DEVICE_KERNEL:
        updates = sent.shape[2]
        links = _links(between, on, _share(rates, updates))
        return _plus(rates.one_shot, Estimate(links.seconds, "updates" if updates > 1 else links.bound))
    fixed = rates.host_wait + rates.nccl_update * sent.shape[2] * (len(sent) - 1)
    links = _links(between, on, rates.link_share)
    return Estimate(fixed + links.seconds, links.bound if links.seconds > fixed else "updates")


def collective_time(kind: str, nbytes: int, num_ranks: int, crosses: bool, on: Machine) -> Estimate:
    """Estimate the time of another collective, as a ring or an even exchange; a permute sends all of its bytes."""
    if num_ranks < 2:
        return Estimate(0.0, "latency")
    others = 1.0 if kind == "collective-permute" else (num_ranks - 1) / num_ranks
    passed = nbytes * (2 if kind == "all-reduce" else 1) * others
    link_s, name = passed / (on.rates.link * on.rates.link_share), "link"
    fixed = on.rates.collective
    if crosses and isinstance(on.rates, GpuRates):
        fixed += on.rates.network_latency
        outside = passed if kind != "all-to-all" else nbytes * (num_ranks - on.ranks_per_domain) / num_ranks
        link_s, name = max(outside, 0) / (on.rates.network * on.rates.network_share), "network"
    return Estimate(fixed + link_s, name if link_s > fixed else "latency")


def one_shot_block_s(sent: UpdateBytes, row_bytes: int, operand_rows: int, rates: GpuRates) -> float:
    """Return the seconds of the busiest thread block of XLA's one-shot kernel."""
    # Block `b` of the `z` blocks of a cluster copies the KiB whose number is `b + i` modulo `z` of update `i`.
    ranks, _, updates = sent.shape
    blocks = blocks_per_peer(updates, operand_rows)
    # Vectors are not wider than a row: 128 threads then copy less than a KiB.
    piece = BLOCK_BYTES * min(VECTOR_BYTES, row_bytes & -row_bytes) // VECTOR_BYTES
    pieces = -(-sent // piece).reshape(ranks, ranks, updates // blocks, blocks)
    done: np.ndarray = np.zeros(pieces.shape, np.int64)
    for update in range(blocks):
        first = (np.arange(blocks) + update) % blocks
        done += np.maximum(0, -(-(pieces[..., update, None] - first) // blocks))
    return float(done.max()) * rates.block_kib + blocks * rates.block_update


def busiest_rank_bytes(between: PeerBytes) -> float:
    """Return the most bytes sent or received by a rank, without its own."""
    others = np.where(np.eye(len(between), dtype=bool), 0, between)
    return float(max(others.sum(0).max(), others.sum(1).max()))


def _s(estimate: Estimate) -> float:
    return estimate.seconds


def _plus(fixed: float, estimate: Estimate) -> Estimate:
    return Estimate(fixed + estimate.seconds, estimate.bound if estimate.seconds > fixed else "latency")


def _links(between: PeerBytes, on: Machine, share: float) -> Estimate:
    """Return the time of the busiest rank's link, or of the network interface if ranks are in several domains."""
    assert isinstance(on.rates, GpuRates)
    domain = np.arange(len(between)) // on.ranks_per_domain
    is_inside = domain[:, None] == domain[None]
    inside = Estimate(busiest_rank_bytes(np.where(is_inside, between, 0)) / (on.rates.link * share), "link")
    outside_s = busiest_rank_bytes(np.where(is_inside, 0, between)) / (on.rates.network * on.rates.network_share)
    return max(inside, Estimate(outside_s, "network"), key=_s)


def _share(rates: GpuRates, updates: int) -> float:
    """Interpolate the share of the link reached by the device kernel, linearly in the logarithm of the updates."""
    known = sorted(rates.device_kernel)
    return float(np.interp(math.log(updates), np.log(known), [rates.device_kernel[one] for one in known]))


def _on_torus(between: PeerBytes, rates: DeviceRates, on: Machine) -> Estimate:
    """Return the time of the busiest link of a mesh without wraparound, and of the longest route."""
    assert isinstance(rates, TpuRates)
    shape = on.torus if math.prod(on.torus) == len(between) else (len(between),)
    places = np.array(list(itertools.product(*map(range, shape))))
    busiest = max((_busiest_of_axis(between, places, axis) for axis in range(len(shape))), default=0.0)
    link_s = busiest / (rates.link * rates.link_share) + rates.hop * sum(size - 1 for size in shape)
    return Estimate(link_s, "link")


def _busiest_of_axis(between: PeerBytes, places: Int[np.ndarray, "R A"], axis: int) -> float:
    """Return the most bytes on a link along an axis, if routes take the axes in order."""
    ranks, others = np.arange(len(places)), [a for a in range(places.shape[1]) if a != axis]
    source, target = np.meshgrid(ranks, ranks, indexing="ij")
    # Earlier axes have the target's position already, later ones still have the source's.
    line = np.zeros_like(source)
    for other in others:
        place = places[target if other < axis else source, other]
        line = line * (places[:, other].max() + 1) + place
    start, end = places[source, axis], places[target, axis]
    busiest = 0.0
    for cut in range(int(places[:, axis].max())):
        for crosses in ((start <= cut) & (end > cut), (end <= cut) & (start > cut)):
            loads = np.bincount(line[crosses], weights=between[crosses].astype(float))
            busiest = max(busiest, float(loads.max(initial=0.0)))
    return busiest

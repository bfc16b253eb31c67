"""Measurements of `calibrate` as a file for the simulator, with warnings about implausible ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.config import load_config

FAR = 3.0
"""Factor above or below a preset's value that raises a warning."""

BUSY = 0.5
"""Load average per core that raises a warning about other work on the host."""

PRESETS = {"H100": "h100_node", "H200": "h100_node", "B200": "nvl72", "cpu": "cpu_2_cores"}
"""Presets by a part of the device's name, or by platform. Other devices have no preset for comparison."""


@dataclass(frozen=True)
class MeasuredExchange:
    """Measurements of one level."""

    level: str  # `"node"` or `"gpu"`
    size: int  # members inside one member of the next outer level
    bytes_per_s: float  # rate at which one rank sends in an exchange of all ranks, in bytes per second
    latency_s: float  # seconds of an exchange of few rows inside a program


@dataclass(frozen=True)
class Measured:
    """Measurements of one machine."""

    machine: str  # name of the host and its devices
    platform: str  # `"cpu"`, `"gpu"` or `"tpu"`
    date: str  # day of the measurement, as `2026-01-31`
    busy: float  # load average of the last minute before the measurements
    cores: int  # number of cores of the host
    ranks: int  # number of devices in the measurements
    exchanges: tuple[MeasuredExchange, ...]  # every level visible to JAX, outermost first
    rows: tuple[float, ...]  # points of the GEMM curve, in rows of one expert
    # Rate of one rank at each point with all ranks computing, in floating-point operations per second
    flops_per_s: tuple[float, ...]
    dense_flops_per_s: float  # rate of one large product on every rank, in floating-point operations per second
    copy_bytes_per_s: float  # rate at which a rank receives copies of weights, in bytes per second
    planner_s: float  # seconds of `Greedy` on the host
    hbm_bytes_per_s: float  # reads and writes of a rank in a permutation of rows, together, in bytes per second
    # Memory that a device can allocate, in bytes; None (default) for CPUs and devices that do not report it
    memory_bytes: int | None = None
    backward_factor: float = 3.0  # time of the experts' backward pass over that of their forward pass; 3 by default
    padded: bool = False  # whether exchanges are those between processes on CPUs; False by default

    @property
    def preset(self) -> str | None:
        """Preset of this kind of machine, or None."""
        # The name of the host may be that of another device.
        device = self.machine.rpartition(" x ")[2]
        return next((name for part, name in PRESETS.items() if part in device or part == self.platform), None)


def warnings(found: Measured) -> Iterator[str]:
    """Yield warnings about the measurements: other work on the host, or values far from a preset's."""
    if found.busy > BUSY * found.cores:
        yield (
            f"the load average was {found.busy:.1f} on {found.cores} cores before the measurements; rates may be "
            "lower, and times longer, than on the idle machine"
        )
    if found.preset is not None:
        cluster = load_config("preset", found.preset).cluster
        yield from _far(found, found.preset, cluster.build()) if cluster else ()


def _far(found: Measured, preset: str, cluster: Cluster) -> Iterator[str]:
    level = cluster.levels[-1]
    inner = found.exchanges[-1]
    pairs: dict[str, tuple[float, float | None, str]] = {
        f"the rate of level {inner.level}": (inner.bytes_per_s, level.bytes_per_s, "B/s"),
        f"the latency of level {inner.level}": (inner.latency_s, level.latency_s, "s"),
        "the experts' best rate": (max(found.flops_per_s), cluster.gemm.peak_flops_per_s, "FLOP/s"),
        "compute": (found.dense_flops_per_s, cluster.flops_per_s, "FLOP/s"),
        "copy_engines": (found.copy_bytes_per_s, cluster.copy_bytes_per_s, "B/s"),
        "planner": (found.planner_s, cluster.planner_s, "s"),
        "hbm": (found.hbm_bytes_per_s, cluster.hbm_bytes_per_s, "B/s"),
    }
    for name, (mine, its, unit) in pairs.items():
        # A preset without this value cannot be compared.
        if its and not its / FAR <= mine <= its * FAR:
            times = mine / its if mine > its else its / max(mine, 1e-300)
            side = "above" if mine > its else "below"
            yield f"{name} is {mine:.3g} {unit}, {times:.1f} times {side} the {its:.3g} of {preset}"


def to_yaml(found: Measured, hidden: int, inner: int) -> str:
    """Format a file for `simulate`, with this machine as a cluster and a small model as an example."""
    cluster: dict[str, Any] = {
        "levels": _levels(found),
        "gemm": {
            "rows": list(found.rows),
            "speeds": [f"{speed / 1e9:.4g} GFLOP/s" for speed in found.flops_per_s],
        },
        "compute": f"{found.dense_flops_per_s / 1e9:.4g} GFLOP/s",
        "copy_engines": f"{found.copy_bytes_per_s / 1e9:.4g} GB/s",
        "planner": f"{found.planner_s * 1e6:.4g} us",
        "hbm": f"{found.hbm_bytes_per_s / 1e9:.4g} GB/s",
    }
    if found.backward_factor != Cluster.backward_factor:
        cluster["backward"] = float(f"{found.backward_factor:.3g}")
    if found.platform != "gpu":
        cluster["joins_weights"] = True
    if found.padded:
        cluster["communication"] = {"padded": True}
    if found.memory_bytes is not None:
        cluster["memory"] = f"{found.memory_bytes / 1e9:.4g} GB"
    model = {"layers": 4, "hidden": hidden, "inner": inner, "experts": 8 * found.ranks, "per_token": 2, "tokens": 2048}
    small: dict[str, Any] = {**model, "itemsize": 4, "sequence": 256}
    data = {"version": 1, "cluster": cluster, "model": small, "routing": {"imbalance": 1.5}}
    head = [
        f"Measured by `jax-moe-lb calibrate` on {found.date}: {found.machine}. The model is an example.",
        f"The load average before it was {found.busy:.1f} on {found.cores} cores.",
        *(f"Warning: {line}." for line in warnings(found)),
    ]
    body = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in head) + body


def _levels(found: Measured) -> list[dict[str, Any]]:
    written, inside = [], found.ranks
    for one in found.exchanges:
        inside //= one.size
        rates = {"rate": f"{one.bytes_per_s / 1e9:.4g} GB/s", "latency": f"{one.latency_s * 1e6:.4g} us"}
        # The rate was measured per rank while all ranks sent, so each rank gets a link of its own.
        links = {"links": inside} if inside > 1 else {}
        written.append({"name": one.level, "size": one.size, **links, **rates})
    return written

"""`measure` finds out what this machine does, through the library's own calls, for the simulator to read.

Every number is the median of a few calls. Ranks of one CPU share its cores, so what they measure there is what they
take at once.
"""

import contextlib
import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AxisType, PartitionSpec

from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.experts import Experts
from jax_moe_lb.measure import median_s
from jax_moe_lb.ops.grouped_ffn import grouped_ffn
from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all
from jax_moe_lb.plan import Plan, plain_plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.peer_copy import PeerCopy
from jax_moe_lb.virtual_devices import use_virtual_cpu_devices

HIDDEN, INNER, GROUPS = 256, 512, 4
ROWS = (1, 4, 16, 64, 256, 1024)
"""The curve is measured at so many rows of each expert."""

FEW_ROWS, MANY_ROWS = 8, 8192
"""Of exchanges of so many rows the first shows latency, the second bandwidth."""

REPEATS = 7

MOST_RANKS = 256
"""So many virtual devices at most share the cores of a CPU: each of them takes tens of MB."""


@dataclass(frozen=True)
class Measured:
    """These are the measurements of one machine.

    Args:
        machine: its name and its devices, in words.
        date: the day of the measurement, as `2026-01-31`.
        ranks: the devices that took part.
        rows: the points of the GEMM curve, rows of an expert.
        flops_per_s: the rate of one rank at each point, all ranks computing at once, in operations per second.
        dense_flops_per_s: the rate of one large product on every rank, in operations per second.
        exchange_bytes_per_s: what one rank sends in an exchange, each way, in bytes per second.
        exchange_latency_s: the seconds of an exchange of few rows.
        copy_bytes_per_s: what copies of weights bring into one rank, in bytes per second.
        planner_s: the seconds of `Greedy` on the host.
    """

    machine: str
    date: str
    ranks: int
    rows: tuple[float, ...]
    flops_per_s: tuple[float, ...]
    dense_flops_per_s: float
    exchange_bytes_per_s: float
    exchange_latency_s: float
    copy_bytes_per_s: float
    planner_s: float


def measure(ranks: int) -> Measured:
    """Measures everything, on all accelerators or on virtual CPU devices.

    Args:
        ranks: virtual devices to make where there is only a CPU, at least 2.

    Raises:
        ValueError: there are fewer than two ranks, so there is nothing to exchange.
    """
    if ranks < 2:
        raise ValueError(f"--ranks is {ranks}; expected at least 2, as there is nothing to exchange otherwise")
    # Where devices are up already it is too late to make more, and those have to do.
    with contextlib.suppress(RuntimeError):
        use_virtual_cpu_devices(ranks)
    devices = jax.devices() if jax.default_backend() != "cpu" else jax.devices()[:ranks]
    mesh = jax.sharding.Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,))
    few_s, many_s = (_exchange_s(mesh, rows) for rows in (FEW_ROWS, MANY_ROWS))
    # What a rank sends to itself passes no link.
    travelling = MANY_ROWS * HIDDEN * 4 * (len(devices) - 1) / len(devices)
    return Measured(
        machine=f"{platform.node()}, {len(devices)} x {devices[0].device_kind}",
        date=datetime.date.today().isoformat(),
        ranks=len(devices),
        rows=tuple(map(float, ROWS)),
        # Three matrices of a gated expert, with two operations for each of their numbers.
        flops_per_s=tuple(GROUPS * rows * 6.0 * HIDDEN * INNER / _ffn_s(mesh, rows) for rows in ROWS),
        dense_flops_per_s=2.0 * 1024 * 1024 * 1024 / _product_s(mesh),
        # The difference of both times leaves latency out; on a noisy machine it may be 0.
        exchange_bytes_per_s=travelling / max(many_s - few_s, 1e-9),
        exchange_latency_s=few_s,
        copy_bytes_per_s=3.0 * HIDDEN * INNER * 4 * GROUPS / _copy_s(mesh),
        planner_s=_planner_s(len(devices)),
    )


def to_yaml(found: Measured) -> str:
    """Writes a file for `simulate`: this machine as a cluster, and a small model as an example."""
    cluster = {
        "levels": [
            {
                "name": "gpu",
                "size": found.ranks,
                "rate": f"{found.exchange_bytes_per_s / 1e9:.4g} GB/s",
                "latency": f"{found.exchange_latency_s * 1e6:.4g} us",
            }
        ],
        "gemm": {
            "rows": list(found.rows),
            "speeds": [f"{speed / 1e9:.4g} GFLOP/s" for speed in found.flops_per_s],
        },
        "compute": f"{found.dense_flops_per_s / 1e9:.4g} GFLOP/s",
        "copy_engines": f"{found.copy_bytes_per_s / 1e9:.4g} GB/s",
        "planner": f"{found.planner_s * 1e6:.4g} us",
    }
    model = {"layers": 4, "hidden": HIDDEN, "inner": INNER, "experts": 8 * found.ranks, "per_token": 2, "tokens": 2048}
    small: dict[str, Any] = {**model, "itemsize": 4, "sequence": 256}
    data = {"version": 1, "cluster": cluster, "model": small, "routing": {"imbalance": 1.5}}
    head = f"# Measured by `jax-moe-lb calibrate` on {found.date}: {found.machine}. The model is an example.\n"
    return head + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _on_ranks(mesh: jax.sharding.Mesh, one_rank: Callable, *arrays: np.ndarray) -> Callable[[], Any]:
    """Compiles a call of `one_rank` on all ranks, each with the same arrays."""
    spec = PartitionSpec("expert")
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    placed = [jax.device_put(np.concatenate([array] * mesh.size), sharding) for array in arrays]
    return lambda: run(*placed)


def _weights() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((GROUPS, HIDDEN, INNER), (GROUPS, INNER, HIDDEN), (GROUPS, HIDDEN, INNER))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def _ffn_s(mesh: jax.sharding.Mesh, rows: int) -> float:
    def one_rank(x: jax.Array, up: jax.Array, down: jax.Array, gate: jax.Array) -> jax.Array:
        sizes = jnp.full(GROUPS, rows, jnp.int32)
        return grouped_ffn(x, Experts(up, down, gate), jax.lax.pcast(sizes, ("expert",), to="varying"))

    call = _on_ranks(mesh, one_rank, np.ones((GROUPS * rows, HIDDEN), np.float32), *_weights())
    return median_s(call, REPEATS)


def _product_s(mesh: jax.sharding.Mesh) -> float:
    square = np.ones((1024, 1024), np.float32)
    return median_s(_on_ranks(mesh, jnp.matmul, square, square), REPEATS)


def _exchange_s(mesh: jax.sharding.Mesh, rows: int) -> float:
    each = rows // mesh.size

    def one_rank(x: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        lands = jax.lax.axis_index("expert").astype(jnp.int32) * each + jnp.zeros_like(starts)
        return ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, lands, sizes, axis_name=("expert",))

    starts = np.arange(mesh.size, dtype=np.int32) * each
    sizes = np.full(mesh.size, each, np.int32)
    return median_s(_on_ranks(mesh, one_rank, np.ones((rows, HIDDEN), np.float32), starts, sizes), REPEATS)


def _copy_s(mesh: jax.sharding.Mesh) -> float:
    """Times copies in which every rank takes the experts of the next one."""
    experts = np.arange(GROUPS * mesh.size, dtype=np.int32).reshape(mesh.size, GROUPS)
    # Each rank sends and receives equally much, so the time of all is that of one.
    placement = np.concatenate([experts, np.roll(experts, -1, 0)], 1)
    topology = Topology.from_mesh(mesh)

    def one_rank(up: jax.Array, down: jax.Array, gate: jax.Array) -> Experts:
        plan = Plan(jnp.asarray(placement), jnp.zeros((experts.size, mesh.size), jnp.int32), domain=mesh.size)
        return PeerCopy()(Experts(up, down, gate), plan, topology)

    return median_s(_on_ranks(mesh, one_rank, *_weights()), REPEATS)


def _planner_s(ranks: int) -> float:
    counts = np.random.default_rng(0).integers(0, 1000, (ranks, 8 * ranks), np.int32)
    topology = Topology.flat(ranks)
    start = plain_plan(counts, topology, 10)
    return median_s(lambda: Greedy().rebalance(counts, start, topology, ()), REPEATS)

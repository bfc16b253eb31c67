"""Measurements of this machine through the library's own calls, for the simulator.

Each number is the median of a few calls. Ranks on one CPU share its cores, so the measured times include this sharing.
`benchmark_seconds` times a part of a user's model.
"""

import contextlib
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import LEVEL_NAMES, Topology
from jax_moe_lb.core.torus import has_limited_routing
from jax_moe_lb.core.virtual_devices import use_virtual_cpu_devices
from jax_moe_lb.kernels.grouped_ffn import grouped_ffn, grouped_ffn_gradients
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups
from jax_moe_lb.sim.machine_profile import Measured, MeasuredExchange
from jax_moe_lb.transport.replicate import PeerCopy


def benchmark_seconds(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Measure the median seconds of a compiled call until its results are ready.

    Use it for `Work.pre_expert_s`: pass the model's computation between the experts of one layer and those of the next,
    with arguments placed on the devices as in training. In a program of several processes, all of them must call it.

    Args:
        function: Function to time, jitted or not.
        *args: Its arguments, which are not donated.
        repeats: Number of measured calls, 5 by default; two warm-up calls precede them.

    Returns:
        Median time of a call, in seconds.

    Raises:
        ValueError: `repeats` is below 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.sim import benchmark_seconds
        >>> benchmark_seconds(jnp.sin, jnp.zeros(8)) > 0
        True
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected at least 1")
    program = jax.jit(function)
    return median_s(lambda: program(*args), repeats)


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Measure the median seconds of a call until its results are ready, after two warm-up calls."""
    times_s = []
    for _ in range(2 + repeats):
        start_s = time.perf_counter()
        # JAX returns before the devices finish; without this wait, only the launch would be timed.
        jax.block_until_ready(call())
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])


HIDDEN, INNER, GROUPS = 256, 512, 4
ROWS = (1, 4, 16, 64, 256, 1024)
"""Points of the curve, in rows per expert."""

FEW_ROWS, MANY_ROWS = 8, 8192
"""Rows per rank of the measured exchanges: the first shows the latency, the second the bandwidth."""

MORE_FEW, MORE_MANY = 15, 3
"""Exchanges of few and of many rows in one program, after the first one."""

REPEATS = 7

MOST_RANKS = 256
"""Maximum number of virtual devices on a CPU; each of them takes tens of MB."""


def measure(ranks: int) -> Measured:
    """Measure all rates on all accelerators, or on virtual CPU devices."""
    # In a program of several processes, initialized by `jax.distributed`, all of them must call it. Nodes are then a
    # level of their own.
    # Read the load average before the measurements, which raise it.
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    # If devices are already initialized, virtual devices cannot be added, so use the existing ones.
    with contextlib.suppress(RuntimeError):
        use_virtual_cpu_devices(ranks)
    alone_on_cpu = jax.default_backend() == "cpu" and jax.process_count() == 1
    mesh = mesh_of(jax.devices()[:ranks] if alone_on_cpu else jax.devices())
    device = mesh.devices.flat[0]
    if mesh.size == 1:
        raise ValueError(f"the machine has one device, {device}; expected at least 2, as one rank has no exchanges")
    ffn_s = [_ffn_s(mesh, rows) for rows in ROWS]
    return Measured(
        machine=f"{platform.node()}, {mesh.size} x {device.device_kind}",
        platform=device.platform,
        date=datetime.date.today().isoformat(),
        busy=busy,
        cores=cores,
        ranks=mesh.size,
        exchanges=tuple(_exchange(mesh, level) for level in mesh.axis_names),
        rows=tuple(map(float, ROWS)),
        # A gated expert has three matrices, with two operations per element.
        flops_per_s=tuple(GROUPS * rows * 6.0 * HIDDEN * INNER / s for rows, s in zip(ROWS, ffn_s, strict=True)),
        backward_factor=max(1.0, _ffn_s(mesh, ROWS[-1], backward=True) / ffn_s[-1]),
        dense_flops_per_s=2.0 * 1024 * 1024 * 1024 / _product_s(mesh),
        copy_bytes_per_s=3.0 * HIDDEN * INNER * 4 * GROUPS / _copy_s(mesh),
        planner_s=_planner_s(mesh.size),
        # Each row is read once and written once.
        hbm_bytes_per_s=2.0 * MANY_ROWS * HIDDEN * 4 / _permutation_s(mesh),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None,
        padded=device.platform == "cpu" and jax.process_count() > 1,
    )


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Create a mesh with an axis for every level visible to JAX: nodes, and the devices of a node."""
    grid = by_node(devices)
    # A level of one member has no links. Nodes without an inner level become the innermost level, which copies weights.
    grid = grid.reshape([size for size in grid.shape if size > 1] or [1])
    return Mesh(grid, LEVEL_NAMES[-grid.ndim :], axis_types=(AxisType.Auto,) * grid.ndim)


def by_node(devices: Sequence[Any]) -> np.ndarray:
    """Return the devices in an array with one row per node."""
    # A node is a slice in JAX's terms: GPUs connected by NVLink, or TPUs connected by ICI. On CPUs it is a process. JAX
    # does not report datacenters; add them to the file by hand.
    nodes: dict[int, list[Any]] = {}
    for device in devices:
        nodes.setdefault(_node(device), []).append(device)
    sizes = sorted({len(node) for node in nodes.values()})
    if len(sizes) > 1:
        raise ValueError(f"nodes have {' and '.join(map(str, sizes))} devices; expected equally many in all of them")
    return np.array([nodes[number] for number in sorted(nodes)])


def _node(device: Any) -> int:
    found = None if device.platform == "cpu" else getattr(device, "slice_index", None)
    return int(device.process_index if found is None else found)


def _on_ranks(mesh: Mesh, one_rank: Callable, *arrays: np.ndarray) -> Callable[[], Any]:
    """Compile a call of `one_rank` on all ranks, each with the same arrays."""
    spec = PartitionSpec(mesh.axis_names)
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    placed = [jax.device_put(np.concatenate([array] * mesh.size), sharding) for array in arrays]
    return lambda: run(*placed)


def _weights() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((GROUPS, HIDDEN, INNER), (GROUPS, INNER, HIDDEN), (GROUPS, HIDDEN, INNER))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def _ffn_s(mesh: Mesh, rows: int, *, backward: bool = False) -> float:
    """Time the forward pass, or the backward pass, which computes the hidden activations again."""

    def one_rank(x: jax.Array, up: jax.Array, down: jax.Array, gate: jax.Array) -> jax.Array | tuple[Any, Any]:
        experts = Experts(up, down, gate)
        sizes = jax.lax.pcast(jnp.full(GROUPS, rows, jnp.int32), mesh.axis_names, to="varying")
        if not backward:
            return grouped_ffn(x, experts, sizes)
        batch = BackwardRows(x, jnp.ones_like(x[:, :1]), x)
        of_rows, _, of_experts, *_ = grouped_ffn_gradients(batch, experts, RowGroups(sizes), jnp.float32)
        return of_rows, of_experts

    return median_s(_on_ranks(mesh, one_rank, np.ones((GROUPS * rows, HIDDEN), np.float32), *_weights()), REPEATS)


def _product_s(mesh: Mesh) -> float:
    square = np.ones((1024, 1024), np.float32)
    return median_s(_on_ranks(mesh, jnp.matmul, square, square), REPEATS)


def _exchange(mesh: Mesh, level: str) -> MeasuredExchange:
    """Measure one level: every rank sends to the ranks differing from it at this level only, all groups at once."""
    size = mesh.shape[level]
    # In one program, as in a layer: a call of its own takes longer than its exchange.
    few_s, many_s = (
        max(_exchange_s(mesh, level, rows, 1 + more) - _exchange_s(mesh, level, rows, 1), 1e-9) / more
        for rows, more in ((FEW_ROWS, MORE_FEW), (MANY_ROWS, MORE_MANY))
    )
    # Rows sent to itself use no link.
    travelling = MANY_ROWS * HIDDEN * 4 * (size - 1) / size
    # The difference of both times excludes the latency; on a noisy machine it may be 0.
    return MeasuredExchange(level, size, travelling / max(many_s - few_s, 1e-9), few_s)


def _exchange_s(mesh: Mesh, level: str, rows: int, times: int) -> float:
    """Time exchanges in sequence, each of the rows received by the one before."""
    # At least one row for each member.
    size = mesh.shape[level]
    each = max(1, rows // size)
    group = Group((level,), limited_routing=has_limited_routing(mesh.devices.flat[0]))

    def one_rank(x: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        lands = jax.lax.axis_index(level).astype(jnp.int32) * each + jnp.zeros_like(starts)

        def exchange(_: jax.Array | int, x: jax.Array) -> jax.Array:
            return ragged_all_to_all(x, jnp.zeros_like(x), Slices(starts, sizes, lands, sizes), group)

        return exchange(0, x) if times == 1 else jax.lax.fori_loop(0, times, exchange, x)

    starts = np.arange(size, dtype=np.int32) * each
    sizes = np.full(size, each, np.int32)
    return median_s(_on_ranks(mesh, one_rank, np.ones((size * each, HIDDEN), np.float32), starts, sizes), REPEATS)


def _permutation_s(mesh: Mesh) -> float:
    order = np.random.default_rng(0).permutation(MANY_ROWS).astype(np.int32)
    rows = np.ones((MANY_ROWS, HIDDEN), np.float32)
    return median_s(_on_ranks(mesh, lambda rows, order: rows[order], rows, order), REPEATS)


def _copy_s(mesh: Mesh) -> float:
    """Time copies in which every rank receives the experts of the next rank, inside the innermost level."""
    size = mesh.shape[mesh.axis_names[-1]]
    experts = np.arange(GROUPS * size, dtype=np.int32).reshape(size, GROUPS)
    # Each rank sends and receives equally much, so the total time is each rank's time.
    placement = np.concatenate([experts, np.roll(experts, -1, 0)], 1)
    topology = Topology.from_mesh(mesh, mesh.axis_names[-1])

    def one_rank(up: jax.Array, down: jax.Array, gate: jax.Array) -> Experts:
        plan = Plan(jnp.asarray(placement), jnp.zeros((experts.size, size), jnp.int32), domain=size)
        return PeerCopy()(Experts(up, down, gate), plan, topology)

    return median_s(_on_ranks(mesh, one_rank, *_weights()), REPEATS)


def _planner_s(ranks: int) -> float:
    counts = np.random.default_rng(0).integers(0, 1000, (ranks, 8 * ranks), np.int32)
    topology = Topology.flat(ranks)
    start = plain_plan(counts, topology, 10)
    return median_s(lambda: Greedy().rebalance(counts, start, topology, ()), REPEATS)

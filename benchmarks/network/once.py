"""Bytes and seconds of `Direct`, `Once` and `Forward` between two nodes on a shaped link.

Requires a sandbox, see `sandbox.py`. One layer of four ranks, on two
nodes of two, runs forward and backward in two processes of two devices and in four processes of one. The link between
the nodes is rate-limited and its bytes are counted; links inside a node are not limited.

Between processes on CPUs an exchange sends whole steps of `P / R` rows, for `P` rows of the operand, to each rank. With
even routing, in which each token has two experts on every rank, the steps of `Direct` are full. Outputs of `Once`
return from buffers for copies, so its steps have room for twice as many rows.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.network import sandbox
from benchmarks.network.jax_ranks import launch_jax, timed_at
from benchmarks.network.launch import Rank
from benchmarks.network.layer import MESH_AXES, placed, whole_mesh
from benchmarks.network.topologies import two_datacenters
from benchmarks.render.results import Table, Value, spread
from jax_moe_lb import Buffers, Experts, MoEParams, System, TopK, Topology, moe, transport

NODES, MEMBERS = 2, 2
RANKS = NODES * MEMBERS
PROCESSES = ((2, 2), (4, 1))
"""Processes, and devices of each."""

TOKENS, WIDTH, INNER, EXPERTS, PER_TOKEN = 512, 256, 32, 32, 8
RATES_BITS_PER_S = (100e6, 300e6)
DISPATCHES = ("Direct", "Once", "Forward")

EXCHANGES = 5
"""Exchanges of rows in a step: dispatch and combine, and three backward, in which rows travel again."""

REPEATS = 3
"""Steps at each rate."""

DEADLINE_S = 2400
"""Time limit of all programs of one division into processes, in seconds."""


def routed() -> np.ndarray:
    """Return the experts of all tokens, `[R * T, K]` int32: two of each rank."""
    rng = np.random.default_rng(0)
    of_rank = EXPERTS // RANKS
    chosen = np.argsort(rng.random((RANKS * TOKENS, RANKS, of_rank)), 2)[..., : PER_TOKEN // RANKS]
    return (chosen + of_rank * np.arange(RANKS)[:, None]).reshape(-1, PER_TOKEN).astype(np.int32)


def rows_between_nodes(dispatch: str) -> int:
    """Return the rows of the busier node for the other one in one exchange of plain expert parallelism."""
    experts = routed().reshape(NODES, MEMBERS * TOKENS, PER_TOKEN)
    members = {"Direct": EXPERTS, "Once": RANKS, "Forward": NODES}[dispatch]
    member = experts // (EXPERTS // members)
    visits = (member[..., None] == np.arange(members)).any(2).reshape(NODES, -1, NODES, members // NODES)
    return max(int(visits[0, :, 1].sum()), int(visits[1, :, 0].sum()))


# ---- a rank --------------------------------------------------------------------


def step_of(name: str) -> tuple[Any, tuple]:
    """Return the jitted gradients of a layer, and its arguments, sharded over processes."""
    mesh = whole_mesh()
    topology, by_rank = Topology.from_mesh(mesh, MESH_AXES), PartitionSpec(MESH_AXES)
    buffers = Buffers(1.0, max_rounds=1)
    system = System(dispatch=getattr(transport, name)(buffers))
    specs = by_rank, by_rank, PartitionSpec(), by_rank

    def one_rank(x: jax.Array, experts: jax.Array, kernel: jax.Array, weights: Experts) -> jax.Array:
        def router(logits: jax.Array, bias: Any, info: Any) -> Any:
            del bias, info
            return TopK(PER_TOKEN).with_experts(logits, experts)

        return moe(x, MoEParams(kernel, weights), router, system, topology)[0]

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=by_rank)

    def loss(x: jax.Array, kernel: jax.Array, weights: Experts, experts: jax.Array) -> jax.Array:
        return (run(x, experts, kernel, weights) ** 2).sum()

    rng = np.random.default_rng(1)
    draw, place = partial(rng.standard_normal, dtype=np.float32), partial(placed, mesh)
    up, down = draw((EXPERTS, WIDTH, INNER)), draw((EXPERTS, INNER, WIDTH))
    weights = Experts(place(0.1 * up, by_rank), place(0.1 * down, by_rank))
    kernel = place(0.1 * draw((WIDTH, EXPERTS)), PartitionSpec())
    args = place(draw((RANKS * TOKENS, WIDTH)), by_rank), kernel, weights, place(routed(), by_rank)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), args


def body(rank: Rank) -> list[dict[str, Any]]:
    """Time every program at every rate on all ranks; rank 0 also sets the rate and reads the counters."""
    found = []
    for name in DISPATCHES:
        timed = timed_at(rank, *step_of(name), RATES_BITS_PER_S, REPEATS, name)
        times = [seconds for seconds, _ in timed.values()]
        sent = [max(of_nodes, default=0) for _, steps in timed.values() for of_nodes in steps]
        found.append({"dispatch": name, "seconds": times, "sent_bytes": sent})
    return found


# ---- the parent ----------------------------------------------------------------


def rows_of(processes: int, devices: int) -> list[list[Value]]:
    """Return the rows of the table for one division into processes."""
    with two_datacenters(processes // NODES) as network:
        ranks = launch_jax(network, body, devices_per_process=devices, deadline_s=DEADLINE_S)
    table: list[list[Value]] = []
    for of_ranks in zip(*ranks, strict=True):
        first = of_ranks[0]
        rows = rows_between_nodes(first["dispatch"])
        expected = 4 * WIDTH * EXCHANGES * rows
        counted = float(np.median(first["sent_bytes"]))
        # The slowest rank determines the step.
        seconds = np.max([one["seconds"] for one in of_ranks], 0)
        cells = [f"{processes} x {devices}", first["dispatch"], rows, expected / 1e6]
        table.append([*cells, counted / 1e6, counted / expected, *map(spread, seconds)])
    return table


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    sandbox.enter()
    of_each = [rows_of(*processes) for processes in PROCESSES]
    rows = [row for rows in of_each for row in rows]
    columns = {"processes x devices": "", "dispatch": "", "rows": "d", "expected MB": ".2f"}
    columns |= {"counted MB": ".2f", "counted / expected": ".2f"}
    columns |= {f"s at {rate / 1e6:.0f} Mbit/s": ".2f" for rate in RATES_BITS_PER_S}
    title = f"A step of a layer on two nodes of two ranks, {TOKENS} tokens per rank, {PER_TOKEN} experts per token"
    return {"links": Table(columns, rows, title)}

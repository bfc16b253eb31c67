"""Rates of exchanges between two domains of ranks, and inside them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb.collectives.ragged_all_to_all import ragged_all_to_all
from jax_moe_lb.sim.measure import HIDDEN, median_s

ROWS = (2, 2048)
"""Rows for each peer: few and many."""

MORE = 3
"""Exchanges in one program after the first one."""

REPEATS = 5


def level_rates(mesh: Mesh) -> dict[str, float]:
    """Return the bytes per second of the link between domains, and of a rank inside its domain.

    All ranks of a domain send at once. The few rows give the latency, which is subtracted.
    """
    peers = {"node": mesh.devices.shape[1], "gpu": mesh.devices.shape[1] - 1}
    # The link carries the rows of all ranks of a domain.
    senders = {"node": mesh.devices.shape[1], "gpu": 1}
    found = {}
    for level in peers:
        few_s, many_s = (_exchange_s(mesh, level == "node", rows) for rows in ROWS)
        sent = senders[level] * peers[level] * (ROWS[1] - ROWS[0]) * HIDDEN * 4
        found[level] = sent / max(many_s - few_s, 1e-9)
    return found


def _exchange_s(mesh: Mesh, across: bool, rows: int) -> float:
    """Time one exchange of `rows` rows for every rank of the other domain, or of the own one."""
    return (_seconds(mesh, across, rows, 1 + MORE) - _seconds(mesh, across, rows, 1)) / MORE


def _seconds(mesh: Mesh, across: bool, rows: int, times: int) -> float:
    axes, size = mesh.axis_names, mesh.devices.shape[1]

    def one_rank(x: jax.Array) -> jax.Array:
        me, peer = jax.lax.axis_index(axes), jnp.arange(mesh.size, dtype=jnp.int32)
        is_far = peer // size != me // size
        sizes = jnp.where(is_far if across else ~is_far & (peer != me), rows, 0).astype(jnp.int32)
        starts, lands = peer * rows, jnp.full(mesh.size, rows, jnp.int32) * me
        starts = starts + jnp.zeros_like(lands)

        def exchange(_: jax.Array | int, x: jax.Array) -> jax.Array:
            return ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, lands, sizes, axis_name=axes)

        return jax.lax.fori_loop(0, times, exchange, x)

    spec = PartitionSpec(axes)
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec))
    whole = np.ones((mesh.size * mesh.size * rows, HIDDEN), np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])
    return median_s(lambda: run(x), REPEATS)

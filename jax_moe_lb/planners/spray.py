"""`spray` cuts rows for other nodes into chunks and puts them on the rails of a node, longest processing time first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import AnyArray, iota
from jax_moe_lb.planners.base import alike, run_planner

MAX_TICKS = 32767
"""The longest time per row of a rail. Products of loads and ticks then have at most 46 bits: two halves in int32."""

MAX_CHUNKS = 4096
"""The most chunks of a pair of nodes on each rail, which bounds the loop over them."""

RowsBetween = Int[AnyArray, "R R"]
Ticks = Int[AnyArray, "N"]
Rails = Int[AnyArray, "R R N"]


def spray(rows: RowsBetween, ticks: Ticks, ranks_per_node: int, chunks: int) -> Rails:
    """Puts the rows from rank to rank on rails; the rule to the letter stands in `ffi/planning/spray.h`.

    `RailS` calls it; call it yourself to plan an exchange of something else than tokens. Every sending node is planned
    from its own rows alone, for each receiving node on its own: what it sends there is cut into chunks, which go one
    after the other to the rail that is done with them first. Of rails of equal speed none carries more than its share
    and one chunk less an `N`-th of it.

    Args:
        rows: `[R, R]` int32, the rows from rank to rank, at least 0; their sum must stay below `2**31`.
        ticks: `[N]` int32, the time per row of each rail, 1 to `MAX_TICKS`; 0 for a dead one, which gets nothing, but
            not for all. `ticks_of` makes them of speeds.
        ranks_per_node: how many ranks a node has.
        chunks: how many chunks to make of each pair of nodes on each rail, where there are so many rows, or a little
            more; 1 to `MAX_CHUNKS`, 16 in `RailS`.

    Returns:
        `[R, R, N]` int32, which adds up to `rows`. Rows inside a node are put on the rail of the receiver. Bad values
        stop the program on a CPU with the custom call; on a GPU with it all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    num_ranks, num_rails = rows.shape[0], ticks.shape[0]
    if ranks_per_node < 1 or num_ranks % ranks_per_node or rows.shape[1] != num_ranks:
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}; expected a divisor of the ranks of rows, which has shape {rows.shape}"
        )
    if num_rails < 1 or ranks_per_node % num_rails:
        raise ValueError(f"ticks has {num_rails} rails; expected a divisor of the {ranks_per_node} ranks of a node")
    if not 1 <= chunks <= MAX_CHUNKS:
        raise ValueError(f"chunks is {chunks}; expected 1 to {MAX_CHUNKS}")
    # The custom call's result is a matrix.
    flat = ((num_ranks, num_ranks * num_rails),)
    (rails,) = run_planner(
        "spray", flat, rows, ticks, reference=spray_reference, ranks_per_node=ranks_per_node, chunks=chunks
    )
    return rails.reshape(num_ranks, num_ranks, num_rails)


def spray_reference(rows: RowsBetween, ticks: Ticks, ranks_per_node: int, chunks: int) -> Rails:
    """Computes `spray` as a loop over chunks and rests, all pairs of nodes side by side."""
    rows, ticks = alike(rows, ticks)
    num_ranks, num_rails = rows.shape[0], ticks.shape[0]
    num_nodes = num_ranks // ranks_per_node
    # The shape is [pairs of nodes, pairs of ranks]: what one node sends to another is planned for itself.
    pairs = (
        rows.reshape(num_nodes, ranks_per_node, num_nodes, ranks_per_node)
        .swapaxes(1, 2)
        .reshape(num_nodes**2, ranks_per_node**2)
    )
    number = iota(num_nodes)
    first = ((number[:, None] + number[None]) % num_rails).reshape(-1)
    near = (number[:, None] == number[None]).reshape(-1, 1)
    # Pairs inside a node take part as pairs without rows, which keeps the shape of the batch.
    far = jnp.where(near, 0, pairs)
    sprayed = jax.vmap(_between, in_axes=(0, None, 0, None))(far, ticks, first, chunks)
    receiver = jnp.tile(iota(ranks_per_node), ranks_per_node) * num_rails // ranks_per_node
    own_rail = receiver[None, :, None] == iota(num_rails)[None, None]
    sprayed = jnp.where(near[:, :, None], jnp.where(own_rail, pairs[:, :, None], 0), sprayed)
    shape = num_nodes, num_nodes, ranks_per_node, ranks_per_node, num_rails
    return sprayed.reshape(shape).swapaxes(1, 2).reshape(num_ranks, num_ranks, num_rails)


def _between(rows: Int[Array, "P"], ticks: Int[Array, "N"], first: Int[Array, ""], chunks: int) -> Int[Array, "P N"]:
    """Puts the rows of all pairs of ranks of two nodes on rails."""
    num_rails = ticks.shape[0]
    chunk = jnp.maximum(rows.sum(dtype=jnp.int32) // num_rails // chunks, 1)
    ends = (rows // chunk).cumsum(dtype=jnp.int32)
    rest = rows % chunk
    # Stable, so that of equal rests the lower pair goes first, as in the C++ planner.
    by_size = jnp.argsort(rest, descending=True, stable=True).astype(jnp.int32)
    num_rests = (rest > 0).sum(dtype=jnp.int32)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        load, rails = carry
        is_chunk = i < ends[-1]
        pair = jnp.where(is_chunk, (ends <= i).sum(dtype=jnp.int32), by_size[jnp.maximum(i - ends[-1], 0)])
        size = jnp.where(is_chunk, chunk, rest[pair])
        best = _soonest(load + size, ticks, first)
        return load.at[best].add(size), rails.at[pair, best].add(size)

    # Zeros that vary over the same mesh axes as the rows: the carry of a loop must keep its type.
    nothing = vary_like(jnp.zeros((rows.shape[0], num_rails), jnp.int32), rows)
    return jax.lax.fori_loop(0, ends[-1] + num_rests, step, (nothing[0], nothing))[1]


def _soonest(load: Int[Array, "N"], ticks: Int[Array, "N"], first: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the rail of the smallest `load * ticks`; of equal ones the first from `first` on."""
    num_rails = ticks.shape[0]
    # A load times ticks may need 46 bits, and JAX has 32 by default.
    low = (load & 0xFFFF) * ticks
    high = (load >> 16) * ticks + (low >> 16)
    low = low & 0xFFFF
    # The largest integer stands for rails that must not be chosen: dead ones, then those with a larger high half.
    far = jnp.iinfo(jnp.int32).max
    high = jnp.where(ticks > 0, high, far)
    low = jnp.where(high == high.min(), low, far)
    # The first rail in turn, from node to node: if ties always went to rail 0, what is left over of small flows would
    # gather there.
    turn = (iota(num_rails) - first) % num_rails
    return jax.lax.argmin(jnp.where(low == low.min(), turn, num_rails), 0, jnp.int32)

"""Assignment of rows between nodes to rails, in chunks, by longest processing time first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.types import AnyArray, iota
from jax_moe_lb.planners.base import run_planner

MAX_TICKS = 32767
"""Maximum time per row of a rail. Products of loads and ticks then need at most 46 bits, two halves in int32."""

MAX_CHUNKS = 4096
"""Maximum number of chunks per pair of nodes and rail, which bounds the loop over chunks."""

RowsBetween = Int[AnyArray, "R R"]
Ticks = Int[AnyArray, "N"]
Rails = Int[AnyArray, "R R N"]


def spray(rows: RowsBetween, ticks: Ticks, ranks_per_node: int, chunks: int) -> Rails:
    """Assign the rows from rank to rank to rails; `ffi/planning/spray.h` specifies the rule."""
    # `RailS` calls it. Call it directly for exchanges of other data than tokens. Each sending node is planned from its
    # own rows only, for each receiving node separately. Its rows are cut into chunks, assigned one after the other to
    # the rail finishing them first. With rails of equal speed, none carries more than its share plus one chunk minus an
    # `N`-th of a chunk.
    # Returns `[R, R, N]` int32, with the sum `rows` over rails. Rows inside a node get the rail of the receiver. For
    # invalid values, the custom call stops the program on a CPU, and returns -1 in all entries on a GPU.
    num_ranks, num_rails = rows.shape[0], ticks.shape[0]
    if ranks_per_node < 1 or num_ranks % ranks_per_node or rows.shape[1] != num_ranks:
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}; expected a divisor of the ranks of rows, which has shape {rows.shape}"
        )
    if num_rails < 1 or ranks_per_node % num_rails:
        raise ValueError(f"ticks has {num_rails} rails; expected a divisor of the {ranks_per_node} ranks of a node")
    if not 1 <= chunks <= MAX_CHUNKS:
        raise ValueError(f"chunks is {chunks}; expected 1 to {MAX_CHUNKS}")
    # The custom call returns a matrix.
    flat = ((num_ranks, num_ranks * num_rails),)
    (rails,) = run_planner(
        "spray", flat, rows, ticks, reference=spray_reference, ranks_per_node=ranks_per_node, chunks=chunks
    )
    return rails.reshape(num_ranks, num_ranks, num_rails)


def spray_reference(rows: RowsBetween, ticks: Ticks, ranks_per_node: int, chunks: int) -> Rails:
    """Compute `spray` in jnp as a loop over chunks and remainders, all pairs of nodes side by side."""
    rows, ticks = alike(rows, ticks)
    num_ranks, num_rails = rows.shape[0], ticks.shape[0]
    num_nodes = num_ranks // ranks_per_node
    # Shape [pairs of nodes, pairs of ranks]: each pair of nodes is planned separately.
    pairs = (
        rows.reshape(num_nodes, ranks_per_node, num_nodes, ranks_per_node)
        .swapaxes(1, 2)
        .reshape(num_nodes**2, ranks_per_node**2)
    )
    number = iota(num_nodes)
    first = ((number[:, None] + number[None]) % num_rails).reshape(-1)
    near = (number[:, None] == number[None]).reshape(-1, 1)
    # Pairs inside a node count as pairs without rows, to keep the shape of the batch.
    far = jnp.where(near, 0, pairs)
    sprayed = jax.vmap(_between, in_axes=(0, None, 0, None))(far, ticks, first, chunks)
    receiver = jnp.tile(iota(ranks_per_node), ranks_per_node) * num_rails // ranks_per_node
    own_rail = receiver[None, :, None] == iota(num_rails)[None, None]
    sprayed = jnp.where(near[:, :, None], jnp.where(own_rail, pairs[:, :, None], 0), sprayed)
    shape = num_nodes, num_nodes, ranks_per_node, ranks_per_node, num_rails
    return sprayed.reshape(shape).swapaxes(1, 2).reshape(num_ranks, num_ranks, num_rails)


def _between(rows: Int[Array, "P"], ticks: Int[Array, "N"], first: Int[Array, ""], chunks: int) -> Int[Array, "P N"]:
    """Assign the rows of all pairs of ranks of two nodes to rails."""
    num_rails = ticks.shape[0]
    chunk = jnp.maximum(rows.sum(dtype=jnp.int32) // num_rails // chunks, 1)
    ends = (rows // chunk).cumsum(dtype=jnp.int32)
    rest = rows % chunk
    # The stable sort puts the lower of equal pairs first, as in C++.
    by_size = jnp.argsort(rest, descending=True, stable=True).astype(jnp.int32)
    num_rests = (rest > 0).sum(dtype=jnp.int32)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        load, rails = carry
        is_chunk = i < ends[-1]
        pair = jnp.where(is_chunk, (ends <= i).sum(dtype=jnp.int32), by_size[jnp.maximum(i - ends[-1], 0)])
        size = jnp.where(is_chunk, chunk, rest[pair])
        best = _soonest(load + size, ticks, first)
        return load.at[best].add(size), rails.at[pair, best].add(size)

    # Zeros varying over the mesh axes of the rows: the carry of a loop must keep its type.
    nothing = vary_like(jnp.zeros((rows.shape[0], num_rails), jnp.int32), rows)
    return jax.lax.fori_loop(0, ends[-1] + num_rests, step, (nothing[0], nothing))[1]


def _soonest(load: Int[Array, "N"], ticks: Int[Array, "N"], first: Int[Array, ""]) -> Int[Array, ""]:
    """Return the rail of the smallest `load * ticks`; on a tie, the first from `first` on."""
    num_rails = ticks.shape[0]
    # A product of load and ticks needs up to 46 bits, but JAX has 32 by default.
    low = (load & 0xFFFF) * ticks
    high = (load >> 16) * ticks + (low >> 16)
    low = low & 0xFFFF
    # The int32 maximum excludes failed rails, then rails with a larger high half.
    far = jnp.iinfo(jnp.int32).max
    high = jnp.where(ticks > 0, high, far)
    low = jnp.where(high == high.min(), low, far)
    # Start ties at a rail depending on the node: otherwise the remainders of small flows would accumulate on rail 0.
    turn = (iota(num_rails) - first) % num_rails
    return jax.lax.argmin(jnp.where(low == low.min(), turn, num_rails), 0, jnp.int32)

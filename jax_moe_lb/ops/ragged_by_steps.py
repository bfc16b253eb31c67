"""The exact-size exchange out of XLA's other collectives, in `O(P + Q)` rows of memory.

It takes padded steps, as many as the largest pair of ranks needs, in two forms: `all_to_all`s, which each group of
ranks does on its own, and, for networks, permutes in which no rank sends to the rank that it receives from
(`one_way.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.ops.one_way import (
    Axes,
    from_wire,
    largest,
    one_way_permutes,
    other_manual_axes,
    permute,
    to_wire,
    way_round_of,
)
from jax_moe_lb.ops.row_blocks import concatenated, starts
from jax_moe_lb.types import iota

Sizes = Int[Array, "U"]
"""One number for each of the `U` slices that a rank sends, or that it receives."""
PerPeer = Int[Array, "R"]
"""One number for each of the `R` ranks of the group."""


def padded_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: Axes,
    disjoint: bool = False,
) -> Shaped[Array, "Q *X"]:
    """Computes `ragged_all_to_all` out of `all_to_all` alone, with the same arguments.

    It is the form for CPUs of one process without the custom call.
    """
    where = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _by_pairs(_all_to_all_steps, operand, output, where, axis_name, disjoint)


def one_way_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: Axes,
    disjoint: bool = False,
) -> Shaped[Array, "Q *X"]:
    """Computes `ragged_all_to_all` out of permutes, with the same arguments.

    It is the form between processes on CPUs. A permute is one operation of all devices of the mesh: all of them must
    call this equally often, also in groups side by side.
    """
    where = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _by_pairs(_permute_steps, operand, output, where, axis_name, disjoint)


@dataclass(frozen=True)
class _Pairs:
    """One slice from this rank to every rank, and one from every rank to this one."""

    starts: PerPeer
    sizes: PerPeer
    landings: PerPeer
    arriving: PerPeer


def _by_pairs(
    steps: Callable[[Array, Array, _Pairs, Axes], Array],
    operand: Array,
    output: Array,
    where: tuple[Sizes, Sizes, Sizes, Sizes],
    axis_name: Axes,
    disjoint: bool,
) -> Array:
    first, sizes, output_offsets, arriving = where
    # Only the sender was told where its rows land, but here the receiver puts them there. This comes before the return
    # below, since all ranks of a group must take part.
    landings = jax.lax.all_to_all(output_offsets, axis_name, 0, 0, tiled=True)
    if operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    dtype, per_pair = operand.dtype, sizes.shape[0] // jax.lax.axis_size(axis_name)
    # As integers: XLA:CPU sends a narrow float as a wider one.
    operand, output = to_wire(operand), to_wire(output)
    if disjoint and per_pair > 1:
        return from_wire(_packed(steps, operand, output, _Pairs(first, sizes, landings, arriving), axis_name), dtype)
    for i in range(per_pair):
        pairs = _Pairs(*(array[i::per_pair] for array in (first, sizes, landings, arriving)))
        output = _exchanged(steps, operand, output, pairs, axis_name)
    return from_wire(output, dtype)


def _packed(
    steps: Callable[[Array, Array, _Pairs, Axes], Array], operand: Array, output: Array, slices: _Pairs, axis_name: Axes
) -> Array:
    """All slices for one rank travel as one, side by side, and are put where they belong when they are there."""
    num_ranks = jax.lax.axis_size(axis_name)
    sent, come = (sizes.reshape(num_ranks, -1).sum(1, dtype=jnp.int32) for sizes in (slices.sizes, slices.arriving))
    # The operand has room for all of them, as none of its rows is in two.
    packed = operand[concatenated(slices.starts, slices.sizes, operand.shape[0])]
    pairs = _Pairs(starts(sent), sent, starts(come), come)
    arrived = _exchanged(steps, packed, jnp.zeros_like(output), pairs, axis_name)
    into = concatenated(slices.landings, slices.arriving, output.shape[0])
    into = jnp.where(iota(output.shape[0]) < come.sum(dtype=jnp.int32), into, output.shape[0])
    return output.at[into].set(arrived, mode="drop")


def _exchanged(
    steps: Callable[[Array, Array, _Pairs, Axes], Array], operand: Array, output: Array, pairs: _Pairs, axis_name: Axes
) -> Array:
    return steps(operand, _copy_own(operand, output, pairs, axis_name), pairs, axis_name)


def _all_to_all_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    # Rows for one rank in one step. All ranks together then send no more than the operand holds, which bounds the
    # memory, and a balanced exchange takes one step.
    chunk = -(-operand.shape[0] // num_ranks)
    lane = iota(chunk)[None]
    # Own rows are there already, by `_copy_own`: else the largest pair would often be a rank with itself.
    from_me = iota(num_ranks) == jax.lax.axis_index(axis_name)
    most = jnp.where(from_me, 0, pairs.sizes).max()
    num_steps = jax.lax.pmax((most + chunk - 1) // chunk, axis_name)

    def step(i: Array, output: Array) -> Array:
        offset = i * chunk + lane
        # Beyond a slice the rows are those of another, clipped into range: the receiver knows how many to keep.
        rows = operand.at[pairs.starts[:, None] + offset].get(mode="clip")
        rows = jax.lax.all_to_all(rows, axis_name, 0, 0)
        arrives = (offset < pairs.arriving[:, None]) & ~from_me[:, None]
        # Padding gets an index beyond the rows and is dropped.
        into = jnp.where(arrives, pairs.landings[:, None] + offset, output.shape[0])
        return output.at[into].set(rows, mode="drop")

    return jax.lax.fori_loop(0, num_steps, step, output)


def _permute_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    chunk = -(-operand.shape[0] // num_ranks)
    me, lane = jax.lax.axis_index(axis_name), iota(chunk)
    way_round = way_round_of(operand, axis_name)
    ways = one_way_permutes(num_ranks, swaps=way_round is not None)
    # One rank alone has nobody to send to.
    if not ways:
        return output
    to = jnp.stack([_partner(way, num_ranks)[me] for way in ways])
    source = jnp.stack([_partner([(b, a) for a, b in way], num_ranks)[me] for way in ways])
    num_chunks = (jnp.where(to == me, 0, pairs.sizes[to]) + chunk - 1) // chunk
    # Groups side by side too.
    num_steps = largest(num_chunks, axis_name + other_manual_axes(axis_name))
    for n, way in enumerate(ways):

        def step(i: Array, output: Array, n: int = n, way: list[tuple[int, int]] = way) -> Array:
            offset = i * chunk + lane
            rows = operand.at[pairs.starts[to[n]] + offset].get(mode="clip")
            rows = permute(rows, axis_name, way, way_round)
            arrives = (source[n] != me) & (offset < pairs.arriving[source[n]])
            into = jnp.where(arrives, pairs.landings[source[n]] + offset, output.shape[0])
            return output.at[into].set(rows, mode="drop")

        output = jax.lax.fori_loop(0, num_steps[n], step, output)
    return output


def _partner(way: list[tuple[int, int]], num_ranks: int) -> PerPeer:
    """The rank that each rank sends to; itself if it sends to none."""
    partner = dict(way)
    return jnp.asarray([partner.get(rank, rank) for rank in range(num_ranks)], jnp.int32)


def _copy_own(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    """What a rank keeps never travels, however much it is."""
    me = jax.lax.axis_index(axis_name)
    place = iota(output.shape[0]) - pairs.landings[me]
    kept = (place >= 0) & (place < pairs.sizes[me])
    # Clipped where nothing is kept, and then not selected.
    rows = operand.at[pairs.starts[me] + place].get(mode="clip")
    return jnp.where(kept.reshape(-1, *[1] * (output.ndim - 1)), rows, output)

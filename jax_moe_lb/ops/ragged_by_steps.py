"""The exact-size exchange out of XLA's other collectives, in `O(P + Q)` rows of memory.

Padded steps, as many as the largest pair of ranks needs. Two forms: `all_to_all`s, which
each group of ranks does on its own, and, for networks, permutes in which no rank sends to
the rank that it receives from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.types import iota

Axes = tuple[str, ...]
Sizes = Int[Array, "U"]
PerPeer = Int[Array, "R"]


def padded_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: Axes,
) -> Shaped[Array, "Q *X"]:
    """`ragged_all_to_all` out of `all_to_all` alone; see there."""
    where = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _slice_by_slice(_all_to_all_steps, operand, output, where, axis_name)


def shifted_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: Axes,
) -> Shaped[Array, "Q *X"]:
    """`ragged_all_to_all` out of permutes; see there.

    Between processes XLA:CPU talks over TCP, one connection per pair of ranks. A rank that
    sends to and receives from the same peer gets half the speed as soon as the two come at
    different times, so rank `r` sends to `r + s` and receives from `r - s`, for every `s`;
    where these are the same rank, one half of the ranks sends first, then the other. All
    devices of the mesh must take part.
    """
    where = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _slice_by_slice(_permute_steps, operand, output, where, axis_name)


@dataclass(frozen=True)
class _Pairs:
    """One slice from this rank to every rank, and one from every rank to this one."""

    starts: PerPeer
    sizes: PerPeer
    landings: PerPeer
    arriving: PerPeer


def _slice_by_slice(
    steps: Callable[[Array, Array, _Pairs, Axes], Array],
    operand: Array,
    output: Array,
    where: tuple[Sizes, Sizes, Sizes, Sizes],
    axis_name: Axes,
) -> Array:
    starts, sizes, output_offsets, arriving = where
    landings = jax.lax.all_to_all(output_offsets, axis_name, 0, 0, tiled=True)
    per_pair = sizes.shape[0] // jax.lax.axis_size(axis_name)
    if operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    # XLA:CPU sends a narrow float as a wider one.
    dtype, wire = operand.dtype, _wire_dtype(operand)
    operand, output = (_cast(array, wire) for array in (operand, output))
    for i in range(per_pair):
        pairs = _Pairs(*(array[i::per_pair] for array in (starts, sizes, landings, arriving)))
        output = _copy_own(operand, output, pairs, axis_name)
        output = steps(operand, output, pairs, axis_name)
    return _cast(output, dtype)


def _all_to_all_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    chunk = -(-operand.shape[0] // num_ranks)
    lane = iota(chunk)[None]
    from_me = iota(num_ranks) == jax.lax.axis_index(axis_name)
    largest = jnp.where(from_me, 0, pairs.sizes).max()
    num_steps = jax.lax.pmax((largest + chunk - 1) // chunk, axis_name)

    def step(i: Array, output: Array) -> Array:
        offset = i * chunk + lane
        rows = operand.at[pairs.starts[:, None] + offset].get(mode="clip")
        rows = jax.lax.all_to_all(rows, axis_name, 0, 0)
        arrives = (offset < pairs.arriving[:, None]) & ~from_me[:, None]
        into = jnp.where(arrives, pairs.landings[:, None] + offset, output.shape[0])
        return output.at[into].set(rows, mode="drop")

    return jax.lax.fori_loop(0, num_steps, step, output)


def _permute_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    chunk = -(-operand.shape[0] // num_ranks)
    me, lane = jax.lax.axis_index(axis_name), iota(chunk)
    for shift in range(1, num_ranks):
        to, source = (me + shift) % num_ranks, (me - shift) % num_ranks
        num_steps = jax.lax.pmax((pairs.sizes[to] + chunk - 1) // chunk, axis_name)
        for way in one_way_permutes(num_ranks, shift):
            receives = jnp.asarray([i in [to for _, to in way] for i in range(num_ranks)])[me]

            def step(
                i: Array, output: Array, to: Array = to, source: Array = source, way: list = way, on: Array = receives
            ) -> Array:
                offset = i * chunk + lane
                rows = operand.at[pairs.starts[to] + offset].get(mode="clip")
                rows = jax.lax.ppermute(rows, axis_name, way)
                arrives = on & (offset < pairs.arriving[source])
                into = jnp.where(arrives, pairs.landings[source] + offset, output.shape[0])
                return output.at[into].set(rows, mode="drop")

            output = jax.lax.fori_loop(0, num_steps, step, output)
    return output


def one_way_permutes(num_ranks: int, shift: int) -> list[list[tuple[int, int]]]:
    """From every rank to the one `shift` above, so that no permute holds a pair and its reverse."""
    pairs = [(i, (i + shift) % num_ranks) for i in range(num_ranks)]
    if 2 * shift != num_ranks:
        return [pairs]
    return [pairs[:shift], pairs[shift:]]


def _copy_own(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    """What a rank keeps never travels, however much it is."""
    me = jax.lax.axis_index(axis_name)
    place = iota(output.shape[0]) - pairs.landings[me]
    kept = (place >= 0) & (place < pairs.sizes[me])
    rows = operand.at[pairs.starts[me] + place].get(mode="clip")
    return jnp.where(kept.reshape(-1, *[1] * (output.ndim - 1)), rows, output)


def _wire_dtype(array: Array) -> jnp.dtype:
    """An integer of the same width for floats of 16 bits or less."""
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize > 2:
        return array.dtype
    return jnp.dtype(f"uint{8 * array.dtype.itemsize}")


def _cast(array: Array, dtype: jnp.dtype) -> Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)

"""Exact-size exchange of rows between the ranks of a mesh axis.

On accelerators it is `jax.lax.ragged_all_to_all`. XLA:CPU has no such collective: between the devices of one process a
custom call copies the rows. Between processes, or without the custom call, it is a sequence of padded steps of XLA's
other collectives, in `O(P + Q)` rows of memory. The number of steps follows from the largest pair of ranks. Steps are
`all_to_all`s, which each group of ranks runs on its own, or unidirectional permutes for networks (`permutes.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.collectives.one_shot_lists import for_one_shot_kernel
from jax_moe_lb.collectives.permutes import (
    Axes,
    from_wire,
    largest,
    other_manual_axes,
    permute,
    ring_direction,
    to_wire,
    unidirectional_permutes,
)
from jax_moe_lb.core.custom_calls import call, is_built, like
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import iota


def concatenated(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Puts blocks of rows one after the other: returns the row that each row comes from.

    Rows beyond the blocks get their own number, so that the result is a permutation where the blocks together are the
    first rows.

    Args:
        first: int32, the row at which each block starts.
        size: int32, the rows of each block; `num_rows` or fewer in all.
        num_rows: how many rows are asked for.
    """
    first, size = first.reshape(-1), size.reshape(-1)
    row = iota(num_rows)
    # `total_repeat_length` keeps the shape static. It also repeats the last block to the end, which is masked below.
    block = jnp.repeat(iota(size.shape[0]), size, total_repeat_length=num_rows)
    return jnp.where(row < size.sum(dtype=jnp.int32), row + (first - starts(size))[block], row)


def starts(sizes: Int[Array, "N"]) -> Int[Array, "N"]:
    """Returns where blocks of these sizes start, one after the other."""
    return sizes.cumsum(dtype=jnp.int32) - sizes


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
    way_round = ring_direction(operand, axis_name)
    ways = unidirectional_permutes(num_ranks, swaps=way_round is not None)
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


LANES = 128
"""A TPU's vector has so many words."""


def ragged_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: tuple[str, ...],
    disjoint: bool = False,
    in_one_process: bool = False,
    site: str | None = None,
    timeout_s: float = 120.0,
) -> Shaped[Array, "Q *X"]:
    """Sends slices of `operand` to the ranks of `axis_name`; returns `output` with what arrived written over it.

    Use it wherever ranks send each other different numbers of rows. It has the signature and meaning of
    `jax.lax.ragged_all_to_all`. It is not differentiable: the transports that call it know their own transposes.
    Between processes on CPUs groups side by side must call it equally often: see `one_way.agreed`.

    Args:
        operand: `[P, ...]`, the rows to send.
        output: `[Q, ...]`, whose rows keep their value where nothing is written. It varies over the mesh axes that the
            result varies over.
        input_offsets: `[U]` int32, `U` a multiple of `R`: where in `operand` a slice starts. Slices `i * U / R` to
            `(i + 1) * U / R` go to rank `i`.
        send_sizes: `[U]` int32, the rows of each slice.
        output_offsets: `[U]` int32, where in the *receiver's* `output` each slice lands.
        recv_sizes: `[U]` int32, the rows that arrive, in the order of the senders.
        axis_name: the mesh axes of the ranks, outermost first.
        disjoint: whether no row of `operand` is in two slices. Where the exchange is made of XLA's other collectives,
            all slices for a rank then travel as one.
        in_one_process: if True, all ranks are devices of one process, and NVIDIA GPUs run XLA's one-shot kernel. The
            lists are then filled for it, see `one_shot_lists`. False by default.
        site: the name of this exchange in messages; its axes by default.
        timeout_s: how long the custom call waits for ranks that do not come, in seconds, before all ranks that did come
            stop with an error that names those that did not. 120, the default, is far more than an exchange takes.

    Raises:
        ValueError: `U` is not a multiple of `R`. Where the custom call runs, offsets and sizes that are out of range,
            or that sender and receiver disagree on, stop the program on all ranks.
    """
    num_ranks = jax.lax.axis_size(axis_name)
    if send_sizes.shape[0] % num_ranks:
        raise ValueError(f"send_sizes has {send_sizes.shape[0]} entries; expected a multiple of the {num_ranks} ranks")
    args = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)

    # Of its own it cannot be mapped where only some operands are.
    @jax.custom_batching.sequential_vmap
    def on_accelerators(*args: Array) -> Array:
        return jax.lax.ragged_all_to_all(*args, axis_name=axis_name)

    def on_one_shot_kernel(operand: Array, output: Array, *updates: Array) -> Array:
        rows, into, filled = for_one_shot_kernel(operand, output, updates, num_ranks)
        return on_accelerators(rows, into, *filled).reshape(output.shape)

    def in_process(*args: Array) -> Array:
        return _in_process(*args, axis_name=axis_name, site=site or "axis " + ", ".join(axis_name), timeout_s=timeout_s)

    def by_steps(*args: Array) -> Array:
        return exchange_by_steps(*args, axis_name=axis_name, disjoint=disjoint)

    on_cpu = in_process if moves_in_process() else by_steps
    on_cuda = on_one_shot_kernel if in_one_process else on_accelerators
    return jax.lax.platform_dependent(*args, cpu=on_cpu, cuda=on_cuda, default=on_accelerators)


def empty_buffer(rows: Array, num_rows: int) -> Array:
    """Makes rows for an exchange to write, which hold anything until then; on CPUs zeros.

    Args:
        rows: `[P, ...]`, rows of the same shape and dtype, which vary over the same mesh axes.
        num_rows: how many.
    """
    return vary_like(jax.lax.empty((num_rows, *rows.shape[1:]), rows.dtype), rows)


def empty_buffer_after(rows: Array, num_rows: int) -> Array:
    """Makes what `empty_buffer` makes, for an exchange that comes much later.

    The compiler for TPUs makes what nobody has to write long before it is needed, and so keeps it longer: there it is
    cleared.

    Args:
        rows: `[P, ...]`, as of `empty_buffer`.
        num_rows: how many.
    """

    def cleared(rows: Array) -> Array:
        return jnp.zeros_like(rows, shape=(num_rows, *rows.shape[1:]))

    return jax.lax.platform_dependent(rows, tpu=cleared, default=lambda rows: empty_buffer(rows, num_rows))


def as_words(rows: Shaped[Array, "A W"]) -> Shaped[Array, "A *X"]:
    """Returns rows in the shape in which a TPU exchanges them: `[A, P, W / P]`, `P` of them in each word of 4 bytes.

    There the words of a row lie side by side, where products have those of eight rows. Gather rows of an exchange in
    this shape, and hand them from one round of a loop to the next in it: then they are not turned around for that.
    Elsewhere it costs nothing.

    Args:
        rows: `[A, W]`. Their shape stays as it is where a row is no whole number of a TPU's vectors.
    """
    num_rows, width = rows.shape
    if rows.dtype.itemsize > 4 or width * rows.dtype.itemsize % (4 * LANES):
        return rows
    per_word = 4 // rows.dtype.itemsize
    return rows.reshape(num_rows, per_word, width // per_word)


def as_rows(words: Shaped[Array, "A *X"]) -> Shaped[Array, "A W"]:
    """Returns what `as_words` was given."""
    return words.reshape(words.shape[0], math.prod(words.shape[1:]))


def moves_in_process() -> bool:
    """Says whether an exchange on CPUs copies each row once: all devices belong to this process, and the call was
    built.
    """
    return is_built("cpu") and jax.process_count() == 1


def exchange_by_steps(*args: Array, axis_name: tuple[str, ...], disjoint: bool = False) -> Array:
    """Computes `ragged_all_to_all` out of XLA's other collectives, in the form for one process or for several."""
    by_steps = one_way_all_to_all if jax.process_count() > 1 else padded_all_to_all
    return by_steps(*args, axis_name=axis_name, disjoint=disjoint)


def _in_process(
    operand: Array, output: Array, *where: Array, axis_name: tuple[str, ...], site: str, timeout_s: float
) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    others = other_manual_axes(axis_name)
    rank, group = jax.lax.axis_index(axis_name), jax.lax.axis_index(others) if others else jnp.int32(0)
    # Over axes that are not manual here every device makes the same call with the same data.
    num_lanes = math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    return call(
        "ragged_exchange",
        like(output),
        operand,
        output,
        *where,
        # Ranks of one group meet each other, and nobody else.
        jnp.stack([rank, group]),
        # The result is written over `output`, whose other rows so keep their value without a copy.
        aliases={1: 0},
        num_ranks=jax.lax.axis_size(axis_name),
        num_lanes=num_lanes,
        site=f"ragged_exchange at {site}",
        timeout_s=np.float64(timeout_s),
    )

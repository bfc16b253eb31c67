"""Exact-size exchange of rows between the ranks of a mesh axis.

On accelerators it is `jax.lax.ragged_all_to_all`; for one rank on a GPU, a gather. XLA has none for CPUs, and none for
large slices of TPU v5e, which exchange padded steps.
Between CPU devices of one process, a custom call copies the rows. Between processes, or without the custom call, it is
a sequence of padded steps of XLA's other collectives, in `O(P + Q)` rows of memory. The number of steps follows from
the largest pair of ranks. The steps are `all_to_all`s, one per group of ranks, or unidirectional permutes for networks
(`permutes.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_default_device
from jaxtyping import Array, Float, Int, Shaped

from jax_moe_lb.collectives.one_shot_lists import MAX_ONE_SHOT_RANKS, for_one_shot_kernel
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
from jax_moe_lb.core.custom_calls import call, is_built, like, why_older_jax
from jax_moe_lb.core.manual_axes import vary_alike, vary_like
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.tpu_vectors import LANES, OLDEST_JAX, allocate_after
from jax_moe_lb.core.types import iota


def concatenated(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Return the source row per row after blocks are concatenated."""
    # Rows after the blocks keep their own index, so the result is a permutation if the blocks together are the first
    # rows.
    first, size = first.reshape(-1), size.reshape(-1)
    row = iota(num_rows)
    # `total_repeat_length` keeps the shape static. It also repeats the last block to the end, which is masked below.
    block = jnp.repeat(iota(size.shape[0]), size, total_repeat_length=num_rows)
    return jnp.where(row < size.sum(dtype=jnp.int32), row + (first - starts(size))[block], row)


def _landing_rows(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Return the destination per received row; `num_rows`, which a scatter drops, after the last one."""
    return jnp.where(iota(num_rows) < size.sum(dtype=jnp.int32), concatenated(first, size, num_rows), num_rows)


def starts(sizes: Int[Array, "*N"], axis: int | None = None) -> Int[Array, "*N"]:
    """Return the offsets of contiguous blocks of these sizes, along an axis if there are several."""
    return sizes.cumsum(axis, dtype=jnp.int32) - sizes


Sizes = Int[Array, "U"]
"""One number per slice to send or to receive, of `U`."""
PerPeer = Int[Array, "R"]
"""One number per rank of the group, of `R`."""


class Slices(NamedTuple):
    """Slices of rows from a rank to every rank of a group and back, with equally many per rank, rank by rank."""

    first: Sizes  # first row of each sent slice, in the operand
    sent: Sizes  # rows of these slices
    lands: Sizes  # first row of these slices in the output of the receiver
    arriving: Sizes  # rows of each received slice


class Group(NamedTuple):
    """Ranks that exchange rows."""

    axes: Axes  # names of their mesh axes, outermost first
    in_one_process: bool = False  # whether they are devices of one process; false (default) if unknown
    limited_routing: bool = False  # whether XLA has no ragged exchange between them; see `Topology`

    @classmethod
    def of(cls, topology: Topology, axes: Axes | None = None) -> "Group":
        """Return the ranks that differ along some expert axes, by default along all."""
        if axes is None:
            return cls(topology.expert_axes, topology.in_one_process, topology.limited_routing)
        sizes = [level.size for level in topology.levels][-len(topology.expert_axes) :]
        # Consecutive ranks that differ along these axes.
        span, per_process = math.prod(sizes[topology.expert_axes.index(axes[0]) :]), topology.ranks_per_process
        return cls(axes, per_process is not None and per_process % span == 0, topology.limited_routing)

    @property
    def me(self) -> Int[Array, ""]:
        """Index of this rank."""
        return jax.lax.axis_index(self.axes)


@dataclass(frozen=True)
class _Pairs:
    """One slice from this rank to every rank, and one from every rank to this one."""

    starts: PerPeer
    sizes: PerPeer
    landings: PerPeer
    arriving: PerPeer
    of_ranks: Int[Array, "G R"]  # sizes of the slices from every rank of the group (row)


def _by_pairs(
    steps: Callable[[Array, Array, _Pairs, Axes], Array],
    operand: Array,
    output: Array,
    slices: Slices,
    axis_name: Axes,
    disjoint: bool = False,
    known: Slices | None = None,
) -> Array:
    """Compute `ragged_all_to_all` by steps between pairs of ranks; `known` has the slices of all ranks."""
    first, sizes, lands, arriving = slices
    # Senders have the landing offsets, but here receivers place the rows, and all ranks take the steps of the longest
    # slice. The gather precedes the early return below, because all ranks of a group must take part.
    if known is None:
        every = jax.lax.all_gather(jnp.stack(vary_alike((lands, sizes))), axis_name)
        of_ranks, landings = every[:, 1], _to_me(every[:, 0], axis_name)
    else:
        of_ranks, landings = known.sent, _to_me(known.lands, axis_name)
    if operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    per_pair = sizes.shape[0] // jax.lax.axis_size(axis_name)
    pairs = _Pairs(first, sizes, landings, arriving, of_ranks)
    if disjoint and per_pair > 1:
        return _packed(steps, operand, output, pairs, axis_name)
    for i in range(per_pair):
        parts = (array[..., i::per_pair] for array in (first, sizes, landings, arriving, of_ranks))
        output = _exchanged(steps, operand, output, _Pairs(*parts), axis_name)
    return output


def _to_me(lands: Int[Array, "R U"], axis_name: Axes) -> Sizes:
    """Return the first row of every slice for this rank, from those of all ranks to all ranks."""
    by_rank = lands.reshape(lands.shape[0], lands.shape[0], -1)
    return by_rank[:, jax.lax.axis_index(axis_name)].reshape(-1)


def _packed(
    steps: Callable[[Array, Array, _Pairs, Axes], Array], operand: Array, output: Array, slices: _Pairs, axis_name: Axes
) -> Array:
    """Exchange all slices for a rank as one contiguous slice, and scatter the rows after arrival."""
    num_ranks = jax.lax.axis_size(axis_name)
    sent, come = (sizes.reshape(num_ranks, -1).sum(1, dtype=jnp.int32) for sizes in (slices.sizes, slices.arriving))
    # All slices fit into an array of the operand's size, because they are disjoint.
    packed = operand[concatenated(slices.starts, slices.sizes, operand.shape[0])]
    of_ranks = slices.of_ranks.reshape(num_ranks, num_ranks, -1).sum(2, dtype=jnp.int32)
    pairs = _Pairs(starts(sent), sent, starts(come), come, of_ranks)
    arrived = _exchanged(steps, packed, jnp.zeros_like(output), pairs, axis_name)
    into = _landing_rows(slices.landings, slices.arriving, output.shape[0])
    return output.at[into].set(arrived, mode="drop")


def _exchanged(
    steps: Callable[[Array, Array, _Pairs, Axes], Array], operand: Array, output: Array, pairs: _Pairs, axis_name: Axes
) -> Array:
    return steps(operand, _copy_own(operand, output, pairs, axis_name), pairs, axis_name)


LEAST_CHUNK = 4
"""Least rows for a rank in a step, if the rows can be split."""


def _in_parts(operand: Array, output: Array, pairs: _Pairs) -> tuple[Array, Array, _Pairs]:
    """Split few wide rows, such as experts: a step has rows for every rank, and so fewer bytes."""
    width, least = math.prod(operand.shape[1:]), LEAST_CHUNK * pairs.sizes.shape[0]
    parts = math.gcd(width, 1 << max(0, -(-least // operand.shape[0]) - 1).bit_length())
    if parts == 1:
        return operand, output, pairs
    sent, into = (rows.reshape(rows.shape[0] * parts, width // parts) for rows in (operand, output))
    return sent, into, _Pairs(*(parts * rows for rows in vars(pairs).values()))


def _all_to_all_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    # A single rank has no peer.
    if num_ranks == 1:
        return output
    shape = output.shape
    operand, output, pairs = _in_parts(operand, output, pairs)
    # Rows for one rank in one step. All ranks together then send at most the rows of the operand, which bounds the
    # memory. A balanced exchange takes one step.
    chunk = -(-operand.shape[0] // num_ranks)
    lane = iota(chunk)[None]
    # `_copy_own` has already copied the own rows: otherwise the largest pair would often be a rank with itself.
    from_me = iota(num_ranks) == jax.lax.axis_index(axis_name)
    most = jnp.where(jnp.eye(num_ranks, dtype=bool), 0, pairs.of_ranks).max()
    num_steps = (most + chunk - 1) // chunk

    def step(i: Array, output: Array) -> Array:
        offset = i * chunk + lane
        # Rows beyond a slice belong to other slices, or are clipped into range; the receiver drops them.
        rows = operand.at[pairs.starts[:, None] + offset].get(mode="clip")
        rows = jax.lax.all_to_all(rows, axis_name, 0, 0)
        arrives = (offset < pairs.arriving[:, None]) & ~from_me[:, None]
        # Padding gets an index out of range, which the scatter drops.
        into = jnp.where(arrives, pairs.landings[:, None] + offset, output.shape[0])
        return output.at[into].set(rows, mode="drop")

    return jax.lax.fori_loop(0, num_steps, step, output).reshape(shape)


def _permute_steps(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    num_ranks = pairs.sizes.shape[0]
    chunk = -(-operand.shape[0] // num_ranks)
    me, lane = jax.lax.axis_index(axis_name), iota(chunk)
    way_round = ring_direction(operand, axis_name)
    ways = unidirectional_permutes(num_ranks, swaps=way_round is not None)
    # A single rank has no peer.
    if not ways:
        return output
    partners = jnp.stack([_partner(way, num_ranks) for way in ways])
    to = partners[:, me]
    source = jnp.stack([_partner([(b, a) for a, b in way], num_ranks)[me] for way in ways])
    rank = iota(num_ranks)[None]
    most = jnp.where(partners == rank, 0, pairs.of_ranks[rank, partners]).max(1)
    # Other groups must run the same number of steps.
    num_steps = largest((most + chunk - 1) // chunk, other_manual_axes(axis_name))
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
    """Return the rank that a rank sends to; itself if it sends to none."""
    partner = dict(way)
    return jnp.asarray([partner.get(rank, rank) for rank in range(num_ranks)], jnp.int32)


def _copy_own(operand: Array, output: Array, pairs: _Pairs, axis_name: Axes) -> Array:
    """Copy the rows staying on a rank, without an exchange and of any number."""
    me = jax.lax.axis_index(axis_name)
    place = iota(output.shape[0]) - pairs.landings[me]
    kept = (place >= 0) & (place < pairs.sizes[me])
    # Clipped if no rows are kept, and then not selected.
    rows = operand.at[pairs.starts[me] + place].get(mode="clip")
    return jnp.where(kept.reshape(-1, *[1] * (output.ndim - 1)), rows, output)


padded_all_to_all = partial(_by_pairs, _all_to_all_steps)
"""`ragged_all_to_all` from `all_to_all` steps: on CPUs in one process, and on large slices of TPU v5e."""

# A permute is one operation of all devices of the mesh. So all devices must call this function equally often, including
# those of other groups.
one_way_all_to_all = partial(_by_pairs, _permute_steps)
"""`ragged_all_to_all` from permutes, along the axes of a group: between processes on CPUs."""


def ragged_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    slices: Slices,
    group: Group,
    *,
    disjoint: bool = False,
    of_rank: Callable[[Int[Array, ""]], Slices] | None = None,
    site: str | None = None,
    timeout_s: float = 120.0,
) -> Shaped[Array, "Q *X"]:
    """Send slices of `operand` to the ranks of the group, and write the received slices into `output`."""
    # `of_rank` derives the slices of any rank from values that all ranks have. Steps then start without a gather.
    # It has the semantics of `jax.lax.ragged_all_to_all`. It is not differentiable; its callers implement their
    # transposes. Between processes on CPUs, all groups must call it equally often; see `permutes.agreed`.
    axis_name = group.axes
    num_ranks = jax.lax.axis_size(axis_name)
    if slices.sent.shape[0] % num_ranks:
        raise ValueError(f"sent has {slices.sent.shape[0]} entries; expected a multiple of the {num_ranks} ranks")
    args = operand, output, *slices

    # It has no batching rule for partly mapped operands.
    @jax.custom_batching.sequential_vmap
    def on_accelerators(*args: Array) -> Array:
        return jax.lax.ragged_all_to_all(*args, axis_name=axis_name)

    def on_one_shot_kernel(operand: Array, output: Array, *updates: Array) -> Array:
        rows, into, filled = for_one_shot_kernel(operand, output, updates, num_ranks)
        return on_accelerators(rows, into, *filled).reshape(output.shape)

    def in_process(*args: Array) -> Array:
        return _in_process(*args, axis_name=axis_name, site=site or "axis " + ", ".join(axis_name), timeout_s=timeout_s)

    def by_steps(steps: Callable[..., Array], operand: Array, output: Array, *slices: Array) -> Array:
        known = None if of_rank is None else jax.vmap(of_rank)(iota(num_ranks))
        return steps(operand, output, Slices(*slices), axis_name, disjoint, known)

    def as_integers(operand: Array, output: Array, *slices: Array) -> Array:
        # XLA:CPU sends narrow floats as wider ones.
        steps = one_way_all_to_all if jax.process_count() > 1 else padded_all_to_all
        return from_wire(by_steps(steps, to_wire(operand), to_wire(output), *slices), operand.dtype)

    on_cpu = in_process if moves_in_process() else as_integers
    on_tpu = partial(by_steps, padded_all_to_all) if group.limited_routing else on_accelerators
    on_cuda = on_one_shot_kernel if group.in_one_process and num_ranks <= MAX_ONE_SHOT_RANKS else on_accelerators
    if num_ranks == 1:
        on_cuda = on_one_rank
    return jax.lax.platform_dependent(*args, cpu=on_cpu, cuda=on_cuda, tpu=on_tpu, default=on_accelerators)


def on_one_rank(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    *slices: Sizes,
) -> Shaped[Array, "Q *X"]:
    """Compute `ragged_all_to_all` of a single rank by a gather."""
    # It is used on NVIDIA GPUs, where XLA's kernel would copy with few thread blocks.
    if operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    num_rows, (first, sizes, lands, arriving) = output.shape[0], slices
    into = _landing_rows(lands, arriving, num_rows)
    sent = concatenated(first, sizes, num_rows)
    # Each row's source first, so that rows move once.
    source = jnp.full(num_rows, -1, jnp.int32).at[into].set(sent, mode="drop")
    rows = operand.at[jnp.maximum(source, 0)].get(mode="clip")
    return jnp.where((source >= 0).reshape(-1, *[1] * (output.ndim - 1)), rows, output)


def empty_buffer(rows: Array, num_rows: int) -> Array:
    """Allocate an uninitialized receive buffer (zeros on CPU)."""
    return vary_like(jax.lax.empty((num_rows, *rows.shape[1:]), rows.dtype), rows)


def empty_buffer_after(rows: Array, num_rows: int) -> Array:
    """Allocate a buffer as `empty_buffer` does, for an exchange much later in the program."""
    # The TPU compiler allocates uninitialized arrays long before their first use, which raises memory. So on TPUs the
    # buffer is initialized to 0.
    return jax.lax.platform_dependent(
        rows, tpu=partial(_cleared_buffer, num_rows), default=lambda rows: empty_buffer(rows, num_rows)
    )


def empty_buffer_now(rows: Float[Array, "A W"], num_rows: int) -> Float[Array, "B W"]:
    """Allocate a buffer as `empty_buffer` does, when `rows` exist."""

    def after_rows(rows: Array) -> Array:
        has_kernels = get_default_device().platform == "tpu" and why_older_jax(OLDEST_JAX) is None
        if has_kernels and rows.size and (words := as_words(rows[:1])).ndim == 3:
            return as_rows(allocate_after(words, (num_rows, *words.shape[1:])))
        return _cleared_buffer(num_rows, rows)

    return jax.lax.platform_dependent(rows, tpu=after_rows, default=lambda rows: empty_buffer(rows, num_rows))


def _cleared_buffer(num_rows: int, rows: Array) -> Array:
    return jnp.zeros_like(rows, shape=(num_rows, *rows.shape[1:]))


def as_words(rows: Shaped[Array, "A W"]) -> Shaped[Array, "A *X"]:
    """Reshape rows to the shape of exchanges on TPUs: `[A, P, W / P]`, with `P` numbers in each 4-byte word."""
    # In this shape the words of a row are contiguous; products interleave the words of eight rows. Gather exchanged
    # rows and carry them through loops in this shape, to avoid layout changes. On other platforms the reshape is free.
    num_rows, width = rows.shape
    if rows.dtype.itemsize > 4 or width * rows.dtype.itemsize % (4 * LANES):
        return rows
    per_word = 4 // rows.dtype.itemsize
    return rows.reshape(num_rows, per_word, width // per_word)


def as_rows(words: Shaped[Array, "A *X"]) -> Shaped[Array, "A W"]:
    """Return the rows passed to `as_words`."""
    return words.reshape(words.shape[0], math.prod(words.shape[1:]))


def moves_in_process() -> bool:
    """Return whether exchanges on CPUs copy a row once: in a single process with the custom call."""
    return is_built("cpu") and jax.process_count() == 1


def _in_process(
    operand: Array, output: Array, *where: Array, axis_name: tuple[str, ...], site: str, timeout_s: float
) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    others = other_manual_axes(axis_name)
    rank, group = jax.lax.axis_index(axis_name), jax.lax.axis_index(others) if others else jnp.int32(0)
    # Along axes that are not manual, all devices make the same call with the same data.
    num_lanes = math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    return call(
        "ragged_exchange",
        like(output),
        operand,
        output,
        *where,
        # Only ranks of one group meet each other.
        jnp.stack([rank, group]),
        # The result aliases `output`, so rows that are not written keep their value without a copy.
        aliases={1: 0},
        num_ranks=jax.lax.axis_size(axis_name),
        num_lanes=num_lanes,
        site=f"ragged_exchange at {site}",
        timeout_s=np.float64(timeout_s),
    )

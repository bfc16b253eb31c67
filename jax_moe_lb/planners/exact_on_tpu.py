"""`fill` of `exact` as one Pallas kernel for TPUs.

XLA would run every step of the chains as about twenty kernels, each of them shorter than its launch. Here the chains of
a pass stay in the memory beside the vector registers. A step visits the ranks once, a vector at a time: it makes the
replicas that the step before has chosen, and chooses the next ones.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.tpu_vectors import OLDEST_JAX, SUBLANES, num_vectors
from jax_moe_lb.planners.exact_packing import Candidates, Filled, start_of_chains

MOST_VECTORS = 512
"""Maximum number of vectors of the experts and slots of a pass: 2 MB, with noise and results below 10 MB."""


def why_no_kernel(num_home: int, num_ranks: int, slots: int, width: int) -> str | None:
    """Return the reason why the kernel cannot fill such a domain, or `None`."""
    if (reason := why_older_jax(OLDEST_JAX)) is not None:
        return reason
    vectors = (num_home + slots) * num_vectors(num_ranks, width)
    if vectors > MOST_VECTORS:
        return f"experts and slots are {vectors} vectors; expected at most {MOST_VECTORS}"
    return None


def fill_in_kernel(given: Candidates, slots: int, max_fan_out: int, *, interpret: bool = False) -> Filled:
    """Do the same as `fill`, in one kernel."""
    # Other platforms do not import Mosaic.
    from jax.experimental.pallas import tpu as pltpu

    (num_home, num_ranks, _), width = given.tokens.shape, given.limit.shape[1]
    manual_axes = jax.typeof(given.tokens).manual_axis_type

    def result(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, num_ranks, width), jnp.int32, manual_axis_type=manual_axes)

    kernel: Any = pl.pallas_call(
        lambda given, *of: _run(given, _Memory(*of), max_fan_out),
        out_shape=(result(slots), result(slots), result(num_home), result()),
        scratch_shapes=3 * [pltpu.VMEM((num_ranks, width), jnp.int32)],
        name="moe_exact_fill",
        interpret=interpret,
    )
    return Filled(*kernel(vary_like(given, given.tokens)))


class _Memory(NamedTuple):
    """References of the kernel: fields of `Filled` and `OffloadChain`."""

    expert: Any
    tokens: Any
    left: Any
    load: Any
    goal: Any
    used: Any
    sent: Any


class _Chosen(NamedTuple):
    """The next replica of each candidate."""

    tokens: Int[Array, "1 C"]  # token copies of the replica; 0 for none
    to: Int[Array, "1 C"]  # rank of the replica
    of: Int[Array, "1 C"]  # home rank of its expert
    hottest: Int[Array, "1 C"]  # index of the expert on this rank


class _Best(NamedTuple):
    """The highest value so far in every sublane, and numbers beside it."""

    value: Float[Array, "B C"]
    rank: Int[Array, "B C"]
    beside: tuple[Int[Array, "B C"], ...]  # at least 0

    def of_lane(self) -> "_Best":
        """Return the highest of all sublanes; of equal values that of the first rank."""
        value = self.value.max(0, keepdims=True)
        rank = jnp.where(self.value == value, self.rank, jnp.iinfo(jnp.int32).max).min(0, keepdims=True)
        here = self.rank == rank
        return _Best(value, rank, tuple(jnp.where(here, one, 0).max(0, keepdims=True) for one in self.beside))


def _higher(one: _Best, other: _Best) -> _Best:
    """Return the higher one; of equal values the first."""
    is_higher = other.value > one.value
    return jax.tree.map(lambda old, new: jnp.where(is_higher, new, old), one, other)


def _run(given: Candidates, memory: _Memory, max_fan_out: int) -> None:
    values = jax.tree.map(lambda ref: ref[...], given)
    start = start_of_chains(values, memory.expert.shape[0], max_fan_out)
    for ref, value in zip(memory, (*jax.tree.leaves(start.now), start.goal, start.used, start.sent), strict=True):
        ref[...] = value
    none = 0 * start.number
    first = _step(_Chosen(none, none - 1, none - 1, none), start.number, given, memory, max_fan_out)
    jax.lax.while_loop(lambda now: now[0].tokens.max() > 0, lambda now: _step(*now, given, memory, max_fan_out), first)


def _step(
    chosen: _Chosen, number: Int[Array, "1 C"], given: Candidates, memory: _Memory, max_fan_out: int
) -> tuple[_Chosen, Int[Array, "1 C"]]:
    """Make the chosen replicas and choose the next ones, as `_give` does."""
    ranks = memory.load.shape[0]
    size = ranks if ranks < SUBLANES else math.gcd(ranks, SUBLANES)

    def visit(first: int) -> tuple[_Best, _Best]:
        at = slice(first, first + size)
        _make(chosen, given, memory, at)
        return _room(given, memory, at), _heat(given, memory, at, max_fan_out)

    # Vectors are visited one after the other, so few of them are in registers.
    best = reduce(
        lambda old, new: (_higher(old[0], new[0]), _higher(old[1], new[1])), map(visit, range(0, ranks, size))
    )
    room, heat = (one.of_lane() for one in best)
    number += (chosen.tokens > 0).astype(jnp.int32)
    tokens = jnp.where(number < given.most[...], jnp.minimum(room.beside[0], heat.beside[0]), 0)
    # A rank is -1, unless it has a replica to make.
    to, of = (jnp.where(tokens > 0, best.rank, -1) for best in (room, heat))
    return _Chosen(tokens, to, of, heat.beside[1]), number


def _make(chosen: _Chosen, given: Candidates, memory: _Memory, at: slice) -> None:
    """Make the chosen replicas on and of some ranks."""
    rank = at.start + jax.lax.broadcasted_iota(jnp.int32, memory.load[at].shape, 0)
    to, of = rank == chosen.to, rank == chosen.of
    expert = chosen.of * memory.left.shape[0] + chosen.hottest
    for slot in range(memory.expert.shape[0]):
        here = to & (memory.used[at] == slot)
        memory.expert[slot, at] = jnp.where(here, expert, memory.expert[slot, at])
        memory.tokens[slot, at] = jnp.where(here, chosen.tokens, memory.tokens[slot, at])
    for home in range(memory.left.shape[0]):
        served = of & (chosen.hottest == home)
        memory.left[home, at] -= jnp.where(served, chosen.tokens, 0)
    load = memory.load[at] + jnp.where(to, chosen.tokens, jnp.where(of, -chosen.tokens, 0))
    memory.load[at] = load
    memory.goal[at] = jnp.where(load <= memory.goal[at], given.limit[...], memory.goal[at])
    memory.used[at] += to.astype(jnp.int32)
    memory.sent[at] += of.astype(jnp.int32)


def _room(given: Candidates, memory: _Memory, at: slice) -> _Best:
    """Return the room of some ranks, weighed."""
    is_closed = (memory.load[at] > memory.goal[at]) | (memory.used[at] == memory.expert.shape[0])
    room = jnp.where(is_closed, 0, given.limit[...] - memory.load[at])
    rank = at.start + jax.lax.broadcasted_iota(jnp.int32, room.shape, 0)
    return _Best(room.astype(jnp.float32) * given.order.welcome[at], rank, (room,))


def _heat(given: Candidates, memory: _Memory, at: slice, max_fan_out: int) -> _Best:
    """Return the hottest expert of some ranks, weighed."""
    load, order = memory.load[at], given.order
    rank = at.start + jax.lax.broadcasted_iota(jnp.int32, load.shape, 0)

    def liked(home: int) -> _Best:
        left = memory.left[home, at]
        return _Best(left.astype(jnp.float32) * order.liking[home, at], 0 * rank + home, (left,))

    hottest = reduce(_higher, map(liked, range(memory.left.shape[0])))
    pressing = order.pressing[...]
    if order.urgent is not None:
        pressing += order.urgent[...] / jnp.maximum(max_fan_out - memory.sent[at], 1).astype(jnp.float32)
    heat = hottest.value + (load - given.limit[...]).astype(jnp.float32) * pressing
    may = (load > memory.goal[at]) & (memory.sent[at] < max_fan_out)
    amount = jnp.where(may, hottest.beside[0], 0)
    return _Best(jnp.where(may, heat, -jnp.inf), rank, (amount, hottest.rank))

"""Replicas gathered from the home weights of all ranks, and the gradients summed at home.

Each replica travels once by `ragged_all_to_all`, and a rank stores `O(S)` experts at a time. Gradients are added
sequentially and in place to the gradients of the home experts, without further accumulators.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jax_moe_lb.collectives.exchange_paths import exchange_path
from jax_moe_lb.collectives.home_slices import HomeSlices, one_row
from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.collectives.ragged_all_to_all import (
    Group,
    Slices,
    as_words,
    empty_buffer_after,
    empty_buffer_now,
    ragged_all_to_all,
    starts,
)
from jax_moe_lb.core.experts import usual_layout
from jax_moe_lb.core.manual_axes import vary_alike, vary_like
from jax_moe_lb.core.schedule import in_order_on_cuda
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import iota, wide_dtype

WeightsOfKind = Float[Array, "..."]
"""One weight array of `G` experts, `[G, ...]`."""

Kinds = tuple[WeightsOfKind, ...]
"""All weight arrays of the same experts."""

Wanted = Int[Array, "R P"]
"""Expert per rank and replica slot, of `P = S - L` slots; -1 for empty ones."""

Pull = Callable[[Wanted], Callable[[Int[Array, ""]], Kinds]]
"""Transport of replicas home.

It takes the positions of the slots' replicas at home, -1 for none. It returns a function from a position to all weight
arrays of the replica there. Callers pass occupied positions only."""


def accumulate_sequentially(
    sums: Kinds, wanted: Wanted, num_home: int, domain: int, group: Group, pull: Pull, like: Kinds
) -> Kinds:
    """Add the gradients of all replicas to the gradients of the home experts."""
    # The number of replicas that return at once is limited by `max_incoming_replicas`. In small groups this is all of
    # them; otherwise they return in several turns. The gradients of an expert are added by rank, then by slot, in
    # float32 or wider, and rounded once.
    room = max_incoming_replicas(wanted.shape[1], num_home, domain)
    owner, number = owner_of(wanted, num_home), _number_at_home(wanted, num_home)
    # Keep the sum of an expert wide over its replicas: rounding after each would lose small gradients. The wide sum
    # belongs to the expert `last`. Sums of a wide dtype take the addends in place.
    are_wide = all(kind.dtype == wide_dtype(kind) for kind in sums)
    wide = tuple(
        empty_buffer_after(jnp.zeros_like(kind, dtype=wide_dtype(kind), shape=(0, *kind.shape[1:])), 1)[0]
        for kind in (() if are_wide else like)
    )
    takes_turns = room < most_at_home(wanted.shape[1], num_home, domain)
    # An illegal plan may send more replicas than fit: make their sums NaN.
    is_whole = takes_turns or number.max() < room

    def one_turn(turn: Array, carry: PyTree) -> PyTree:
        place = jnp.where(number // room == turn, number % room, -1)
        landed = pull(place)
        mine = (owner == group.me) & (place >= 0)
        # Empty positions, and those of other ranks, get an index after the last expert.
        to = jnp.where(mine, place, room).reshape(-1)
        expert = jnp.full(room, num_home, jnp.int32).at[to].set((wanted % num_home).reshape(-1), mode="drop")

        def add_one(i: Array, carry: PyTree) -> PyTree:
            sums, total, last = carry
            e = expert[i]
            before = [kind[e] for kind in sums]
            if not are_wide:
                pairs = zip(total, before, strict=True)
                before = [jnp.where(e == last, so_far, kind.astype(so_far.dtype)) for so_far, kind in pairs]
            pairs = zip(before, landed(i), strict=True)
            after = tuple(so_far + jnp.where(is_whole, came.astype(so_far.dtype), jnp.nan) for so_far, came in pairs)
            pairs = zip(sums, after, strict=True)
            sums = tuple(usual_layout(kind.at[e].set(new.astype(kind.dtype))) for kind, new in pairs)
            return sums, () if are_wide else after, vary_like(e, last)

        return jax.lax.fori_loop(0, mine.sum(dtype=jnp.int32), add_one, carry)

    sums, wide, none = _alike(sums, wide, jnp.int32(-1), wanted, *like)
    carry = one_turn(jnp.int32(0), (sums, wide, none))
    if takes_turns:
        # The maximum over ranks, so all ranks take part in every exchange.
        turns = agreed(number.max() // room + 1, group.axes)
        # `aot/execution_counts.py` finds these turns by this name: a balanced step runs none of them.
        with jax.named_scope("further_rounds"):
            carry = jax.lax.fori_loop(1, turns, one_turn, carry)
    return carry[0]


def max_incoming_replicas(replica_slots: int, num_home: int, domain: int) -> int:
    """Return the maximum number of replicas that return to a rank at once; all in domains of at most 8 ranks."""
    # At least 1: exchanges do not accept empty arrays.
    return max(1, min(most_at_home(replica_slots, num_home, domain), max(2 * num_home, 8 * replica_slots)))


def most_at_home(replica_slots: int, num_home: int, domain: int) -> int:
    """Return the maximum number of replicas of a rank's home experts: one each on the other ranks of the domain."""
    return (domain - 1) * min(replica_slots, num_home)


def owner_of(wanted: Wanted, num_home: int) -> Wanted:
    """Return the home rank per wanted expert; `R` for empty slots."""
    return jnp.where(wanted >= 0, wanted // num_home, wanted.shape[0])


def zero_sums(like: Kinds, num_experts: int) -> Kinds:
    """Return zero accumulators of `num_experts` experts, float32 or wider: bfloat16 sums lose small addends."""
    return tuple(jnp.zeros_like(kind, dtype=wide_dtype(kind), shape=(num_experts, *kind.shape[1:])) for kind in like)


def rounded(sums: Kinds, like: Kinds) -> Kinds:
    """Return sums in the dtypes of the addends."""
    return tuple(total.astype(kind.dtype) for total, kind in zip(sums, like, strict=True))


def _number_at_home(wanted: Wanted, num_home: int) -> Wanted:
    """Number the replicas per home rank, by expert, then rank and slot; -1 for empty slots."""
    flat, owner = wanted.reshape(-1), owner_of(wanted, num_home).reshape(-1)
    at = iota(flat.size)
    earlier = (flat[None] < flat[:, None]) | ((flat[None] == flat[:, None]) & (at[None] < at[:, None]))
    number = (earlier & (owner[None] == owner[:, None])).sum(1, dtype=jnp.int32)
    return jnp.where(flat >= 0, number, -1).reshape(wanted.shape)


def _alike(sums: Kinds, wide: Kinds, none: Array, *others: Array) -> tuple[Kinds, Kinds, Array]:
    """Make the loop carry vary over all mesh axes of the other arrays in the loop."""
    every = vary_alike((*sums, *wide, none), *others)
    return every[: len(sums)], every[len(sums) : -1], every[-1]


def fetch(home: WeightsOfKind, wanted: Wanted, num_home: int, group: Group) -> WeightsOfKind:
    """Return the replicas of this rank from the home weights of all ranks; a replica travels once, as a slice."""
    # `Gather` calls it by `fetch_all`. It is not differentiable; `add_at_home` is its transpose.
    # Returns `[P, ...]`. Empty slots are 0; on GPUs they are uninitialized, and products skip them.
    num_ranks, num_replicas = wanted.shape
    owner = owner_of(wanted, num_home)
    slot = jnp.broadcast_to(iota(num_replicas), wanted.shape)

    def slices_of(rank: Int[Array, ""]) -> Slices:
        return Slices(
            first=(wanted % num_home).reshape(-1),
            sent=one_row(owner == rank),
            lands=slot.reshape(-1),
            arriving=one_row(owner[rank][None] == iota(num_ranks)[:, None]),
        )

    buffer = empty_buffer_after(home, num_replicas)
    return ragged_all_to_all(home, buffer, slices_of(group.me), group, of_rank=slices_of, site="replicate")


def fetch_all(home: Kinds, wanted: Wanted, num_home: int, domain: int, topology: Topology) -> Kinds:
    """Return the replicas of all weight arrays, in the form of exchange estimated to be fastest."""
    # - One exchange for each array, with one slice per slot of each rank.
    # - One exchange for all arrays. It copies the home experts side by side, because any of them may be wanted.
    # - The same with one slice per rank. It copies each expert for every rank wanting it, into memory for all replicas
    #   of a rank's experts. These must not exceed `max_incoming_replicas`.
    group = Group.of(topology)
    fetch_one = partial(fetch, wanted=wanted, num_home=num_home, group=group)
    num_ranks, num_replicas = wanted.shape
    expert_bytes, peers = sum(kind.nbytes for kind in home) // num_home, num_ranks - 1
    forms = [(0, len(home) * num_replicas * peers)]
    if len({kind.dtype for kind in home}) == 1:
        forms.append(((num_home + num_replicas) * expert_bytes, num_replicas * peers))
        room = most_at_home(num_replicas, num_home, domain)
        # Copies before the exchange, and the order of slots after it.
        if 0 < room <= max_incoming_replicas(num_replicas, num_home, domain):
            forms.append(((room + num_replicas) * expert_bytes, peers))
    form = exchange_path(topology).fastest(forms)
    if form == 0:
        return tuple(fetch_one(kind) for kind in home)
    if form == 1:
        rows = fetch_one(jnp.concatenate([kind.reshape(num_home, -1) for kind in home], 1))
    else:
        rows = fetch_by_rank(home, wanted, room, group)
    return _split(rows, home)


def fetch_by_rank(home: Kinds, wanted: Wanted, room: int, group: Group) -> Array:
    """Return the replicas of this rank by one exchange with one slice per rank."""
    (num_ranks, num_replicas), num_home = wanted.shape, home[0].shape[0]
    me, owner = group.me, owner_of(wanted, num_home)
    # An illegal plan may send more replicas than fit. All ranks skip the same ones.
    owner = jnp.where(_number_at_home(wanted, num_home) < room, owner, num_ranks)
    # Replicas of each rank (row) from each home (column).
    moved = (owner[:, :, None] == iota(num_ranks)[None, None]).sum(1, dtype=jnp.int32)
    goes = (owner == me).reshape(-1)
    place = jnp.where(goes, goes.cumsum(dtype=jnp.int32) - 1, room)
    expert = jnp.zeros(room, jnp.int32).at[place].set((wanted % num_home).reshape(-1), mode="drop")
    rows = jnp.concatenate([kind[expert].reshape(room, -1) for kind in home], 1)
    landed = ragged_all_to_all(
        rows,
        empty_buffer_now(rows, num_replicas),
        Slices(
            first=starts(moved[:, me]),
            sent=moved[:, me],
            # Replicas land sorted by source, and then by slot.
            lands=jnp.where(iota(num_ranks)[None] < me, moved, 0).sum(1, dtype=jnp.int32),
            arriving=moved[me],
        ),
        group,
        site="replicate",
    )
    return landed[jnp.argsort(jnp.argsort(owner[me], stable=True))]


def add_at_home(
    sums: Kinds,
    upstream: Kinds,
    wanted: Wanted,
    num_home: int,
    domain: int,
    group: Group,
    in_place: bool = False,
) -> Kinds:
    """Add the gradients of all replicas to those of the home experts, in an order that depends on `wanted` only."""
    if in_place and len(sums) > 1:
        done: list[WeightsOfKind] = []
        for total, kind in zip(sums, upstream, strict=True):
            if len(done) > 1:
                # A buffer has room for all replicas of a home. An exchange overlaps with the sums of one earlier array,
                # so two buffers serve all.
                done[-2], kind = in_order_on_cuda(done[-2], kind)
            done += add_at_home((total,), (kind,), wanted, num_home, domain, group, in_place)
        return tuple(done)
    num_replicas = wanted.shape[1]
    me, owner = group.me, owner_of(wanted, num_home)
    room = max_incoming_replicas(num_replicas, num_home, domain)
    flat = [kind.reshape(num_replicas, -1) for kind in upstream]
    order = iota(num_replicas)
    if not in_place:
        # Concatenate all weight arrays into one row per replica, for a single exchange. Sort the rows by home, and
        # there by number: those of one turn and home are then contiguous.
        order = jnp.argsort(owner[me] * wanted.size + _number_at_home(wanted, num_home)[me])
        flat = [jnp.concatenate([kind[order] for kind in flat], 1)]

    def pull(place: Wanted) -> Callable[[Int[Array, ""]], Kinds]:
        lists = partial(HomeSlices.by_slot if in_place else HomeSlices.by_rank, place, owner, order)
        home = lists(me)

        def send(rows: Float[Array, "P W"]) -> Array:
            landed = ragged_all_to_all(
                rows,
                empty_buffer_now(rows, room),
                home.slices,
                group,
                # The first rows are those of this rank's order, but no rank reads the first rows of others.
                of_rank=lambda rank: lists(rank).slices,
                site="gradients of replicas",
            )
            return as_words(landed)

        words = [send(rows) for rows in flat]
        at = jnp.zeros(room, jnp.int32).at[jnp.where(home.row < 0, room, place)].set(home.row, mode="drop")

        def replica(i: Int[Array, ""]) -> Kinds:
            parts = [kind[at[i]].reshape(-1) for kind in words]
            if not in_place:
                return _split(parts[0], upstream)
            return tuple(part.reshape(like.shape[1:]) for part, like in zip(parts, upstream, strict=True))

        return replica

    return accumulate_sequentially(sums, wanted, num_home, domain, group, pull, upstream)


def sends_in_place(like: Kinds, topology: Topology) -> bool:
    """Return whether gradients of replicas travel in place, by the exchange estimated to be fastest."""
    # In place, each array has an exchange, with one slice per slot of each rank. Otherwise all arrays of all slots,
    # also of empty ones, are copied side by side, and each rank has one slice. Arrays side by side have one dtype.
    if len({kind.dtype for kind in like}) > 1:
        return True
    peers, num_replicas = topology.num_ranks - 1, like[0].shape[0]
    forms = (0, len(like) * num_replicas * peers), (sum(kind.nbytes for kind in like), peers)
    return exchange_path(topology).fastest(forms) == 0


def _split(rows: Float[Array, "*B W"], like: Kinds) -> Kinds:
    """Split rows of one expert each into its weight arrays, in their own shapes."""
    parts = jnp.split(rows, np.cumsum([kind[0].size for kind in like])[:-1], -1)
    return tuple(part.reshape(*rows.shape[:-1], *kind.shape[1:]) for part, kind in zip(parts, like, strict=True))

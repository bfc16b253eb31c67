"""Lists of the exchange that brings gradients of replicas home."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.collectives.ragged_all_to_all import Slices, starts
from jax_moe_lb.core.types import iota

PerReplica = Int[Array, "R P"]


class HomeSlices(NamedTuple):
    """Lists of an exchange of replicas' rows, with `n` slices per rank; rows land sorted by source."""

    slices: Slices  # slices for each rank and from each rank
    row: PerReplica  # row of each replica in the buffer of this rank; -1 for replicas of other ranks or turns

    @classmethod
    def by_rank(cls, place: PerReplica, owner: PerReplica, order: Int[Array, "P"], me: Int[Array, ""]) -> "HomeSlices":
        """Derive the lists with one slice per rank from the plan, without an exchange."""
        goes, first_landed, landed = _landings(place, owner)
        sent = goes.sum(1, dtype=jnp.int32)
        row = jnp.where(goes[:, :, me], landed, -1)
        # The index of the first row for each rank; 0 if there is none.
        first = jnp.argmax(goes[me][order], 0).astype(jnp.int32)
        return cls(Slices(first, sent[me], first_landed[me], sent[:, me]), row)

    @classmethod
    def by_slot(cls, place: PerReplica, owner: PerReplica, order: Int[Array, "P"], me: Int[Array, ""]) -> "HomeSlices":
        """Derive the lists with one slice for every slot of a rank; arguments as for `by_rank`, rows in `order`."""
        goes, _, landed = _landings(place, owner)
        first_sent, first_landed = (jnp.broadcast_to(one, place.shape).reshape(-1) for one in (order, landed[me]))
        arriving = goes[:, :, me]
        slices = Slices(first_sent, one_row(goes[me].T), first_landed, one_row(arriving))
        return cls(slices, jnp.where(arriving, landed, -1))


def _landings(place: PerReplica, owner: PerReplica) -> tuple[Bool[Array, "R P R"], Int[Array, "R R"], PerReplica]:
    """Return destinations of replicas, the first row per source at home, and the rows of replicas."""
    goes = (place >= 0)[:, :, None] & (owner[:, :, None] == iota(owner.shape[0])[None, None])
    sent = goes.sum(1, dtype=jnp.int32)
    first = starts(sent, 0)
    # Replicas of the same source and home, by their number.
    earlier = (owner[:, :, None] == owner[:, None]) & (place[:, None] >= 0) & (place[:, None] < place[:, :, None])
    at_home = jnp.where(goes, first[:, None], 0).sum(2, dtype=jnp.int32)
    return goes, first, at_home + earlier.sum(2, dtype=jnp.int32)


def one_row(where: Bool[Array, "R P"]) -> Int[Array, "U"]:
    """Return the sizes of slices that have one row or none."""
    return where.astype(jnp.int32).reshape(-1)

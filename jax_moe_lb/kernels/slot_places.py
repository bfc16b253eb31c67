"""Places of token copies in the order of the slots, and weighted sums of rows at these places.

A rank receives a row once, with the slots of all its copies there. A running sum over slots and rows gives the place of
every copy in the operand of the grouped products, without a sort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.types import DType, GroupSizes, Rows, iota, wide_dtype


class SlotPlaces(NamedTuple):
    """Copies of received rows, sorted by slot, then by row."""

    place: Int[Array, "B K"]  # place of each copy; `A` for none
    copy: Int[Array, "A"]  # copy `row * K + k` at each place; 0 beyond the copies
    group_sizes: GroupSizes  # copies of each slot

    def owners(self, weights: Float[Array, "B K"] | None) -> "RowOwners":
        """Return the received row per copy, for sums of outputs in the order of slots."""
        num_rows, per_row = self.place.shape
        is_copy = iota(self.copy.shape[0]) < self.group_sizes.sum(dtype=jnp.int32)
        entry = jnp.where(is_copy, self.copy // per_row, num_rows)
        return RowOwners(entry, None if weights is None else weights.reshape(-1)[self.copy])


def slot_places(codes: Int[Array, "B K"], num_slots: int, num_places: int) -> SlotPlaces:
    """Compute the place of every copy in the order of slots, by a running sum."""
    num_rows, per_row = codes.shape
    slots = iota(num_slots)[:, None, None] + 1
    # [S, B]: in this order one running sum gives the start of each slot and the copies of earlier rows.
    copies = (codes[None] == slots).sum(2, dtype=jnp.int32)
    before = copies.reshape(-1).cumsum(dtype=jnp.int32) - copies.reshape(-1)
    first = before[jnp.maximum(codes - 1, 0) * num_rows + iota(num_rows)[:, None]]
    earlier = [(codes[:, :k] == codes[:, k, None]).sum(1, dtype=jnp.int32) for k in range(per_row)]
    place = jnp.where(codes > 0, first + jnp.stack(earlier, 1), num_places)
    copy = jnp.zeros_like(place, shape=num_places).at[place.reshape(-1)].set(iota(num_rows * per_row), mode="drop")
    return SlotPlaces(place, copy, copies.sum(1, dtype=jnp.int32))


class RowOwners(NamedTuple):
    """Entry per row: the inverse of places, for kernels that read rows in any order."""

    entry: Int[Array, "A"]  # entry of each row; `B` for rows of no entry
    weights: Float[Array, "A"] | None = None  # weight of each row; `None` for 1


def sum_rows(
    rows: Rows,
    place: Int[Array, "B K"],
    weights: Float[Array, "B K"] | None = None,
    owners: RowOwners | None = None,
) -> Float[Array, "B H"]:
    """Sum the rows at the places of each entry, in float32 or wider and in the order of choices."""
    # XLA compiles a reduction over gathered rows into one kernel on NVIDIA GPUs, and into an array of all of them
    # elsewhere. A kernel of Pallas reads rows once on TPUs, and rounds their sums to the dtype of rows.
    forms: dict[str, Any] = {"cuda": _in_one_kernel, "default": _by_choice}
    if owners is None or not _is_on_tpu():
        return jax.lax.platform_dependent(rows, place, weights, **forms)
    # Other platforms do not import Mosaic.
    from jax_moe_lb.kernels.tpu_rows import sum_rows_of_entries, why_not_sum

    def in_tpu_kernel(rows: Rows, *_: object) -> Float[Array, "B H"]:
        return sum_rows_of_entries(rows, *owners, place.shape[0]).astype(_sum_dtype(rows, weights))

    if why_not_sum(rows, owners.weights is not None) is None:
        forms["tpu"] = in_tpu_kernel
    return jax.lax.platform_dependent(rows, place, weights, **forms)


def take_rows(rows: Rows, at: Int[Array, "B"], otherwise: Callable[[Array, Array], Array]) -> Float[Array, "B H"]:
    """Return `rows[at]` for grouped products, by a kernel on TPUs if it can take them."""
    if not _is_on_tpu():
        return otherwise(rows, at)
    from jax_moe_lb.kernels.tpu_rows import gather_rows, why_not_gather

    if why_not_gather(rows, at) is not None:
        return otherwise(rows, at)
    return jax.lax.platform_dependent(rows, at, tpu=gather_rows, default=otherwise)


def _is_on_tpu() -> bool:
    return bool(get_default_device().platform == "tpu")


def _in_one_kernel(
    rows: Rows, place: Int[Array, "B K"], weights: Float[Array, "B K"] | None = None
) -> Float[Array, "B H"]:
    dtype, there = _sum_dtype(rows, weights), _is_there(rows, place)
    parts = rows[jnp.where(there, place, 0)].astype(dtype)
    parts = parts if weights is None else parts * weights[:, :, None].astype(dtype)
    # A thread adds the choices of its element in their order.
    return jnp.where(there[:, :, None], parts, 0).sum(1)


def _by_choice(rows: Rows, place: Int[Array, "B K"], weights: Float[Array, "B K"] | None) -> Float[Array, "B H"]:
    dtype = _sum_dtype(rows, weights)
    total = jnp.zeros((place.shape[0], rows.shape[1]), dtype)
    # Unrolled over the few choices, in their order: equal inputs give equal bits.
    for k in range(place.shape[1]):
        at = place[:, k]
        there = _is_there(rows, at)
        # Absent rows all read the first row, which stays in a cache.
        part = rows[jnp.where(there, at, 0)].astype(dtype)
        part = part if weights is None else part * weights[:, k, None].astype(dtype)
        total = total + jnp.where(there[:, None], part, 0)
    return total


def _sum_dtype(rows: Rows, weights: Float[Array, "B K"] | None) -> DType:
    return wide_dtype(rows) if weights is None else jnp.promote_types(wide_dtype(rows), weights.dtype)


def _is_there(rows: Rows, place: Int[Array, "*B"]) -> Bool[Array, "*B"]:
    return (place >= 0) & (place < rows.shape[0])

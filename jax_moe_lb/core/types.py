"""Dimension letters and array types of all signatures.

==== =================================================================
`R`  ranks in the expert-parallel group
`M`  ranks per domain; expert weights move inside a domain only
`N`  rails per node
`E`  experts
`L`  home experts per rank, `E / R`
`S`  slots per rank, `S >= L`; the first `L` hold the home experts
`T`  tokens per rank
`K`  experts per token
`H`  model width
`F`  expert inner width
`A`  rows that a rank can receive in one round
`D`  independent expert-parallel groups side by side (data parallelism)
==== =================================================================

A *row* is one token copy: a token routed to `K` experts makes `K` rows.

The decorator `pytree` makes a class a frozen dataclass and a pytree.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    # Any: the union of the two array types lacks the methods common to both.
    AnyArray = Any
else:
    AnyArray = Array | np.ndarray
    """JAX or NumPy array: planning arithmetic runs in jitted programs and on the host."""

Axes = tuple[str, ...]
"""Names of mesh axes, outermost first."""

Counts = Int[AnyArray, "R E"]
"""Token copies routed from each rank to each expert in this microbatch."""

Placement = Int[AnyArray, "R S"]
"""Expert in each slot; -1 for an empty slot."""

Quota = Int[AnyArray, "E R"]
"""Token copies of each expert served by each rank."""

Load = Int[AnyArray, "R"]
"""Token copies served by each rank."""

Rows = Float[Array, "A H"]
"""Token copies on the rank serving them, sorted by slot."""

ReceivedRows = Float[Array, "A *H"]
"""The same, or `[A, P, H / P]` as an exchange wrote them, which kernels for TPUs read without a change of layout."""

GroupSizes = Int[Array, "S"]
"""Rows per slot. The sum is at most `A`; rows beyond the sum are padding."""

Tokens = Float[Array, "T H"]
"""Tokens of one rank, before dispatch."""

TokenMask = Bool[Array, "T"]
"""Mask of the tokens to route; False for padding tokens."""

DType = Any
"""Any dtype accepted by JAX."""

Ref = Any
"""Reference to memory in a Pallas kernel, for which the oldest supported JAX has no public class."""

State = Any
"""State of a balancer between steps: any pytree, `()` for stateless balancers."""


def wide_dtype(array: Array) -> np.dtype:
    """Return the dtype for sums over `array`: float32, or its own dtype if that is wider."""
    # A long sum in bfloat16 stagnates, because its terms fall below half a unit in the last place.
    return array.dtype if jnp.finfo(array.dtype).bits > 32 else np.dtype(np.float32)


def namespace(array: Any) -> Any:
    """Return `numpy` or `jax.numpy`, matching the type of `array`."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def add_to_first(total: Array, part: Array) -> Array:
    """Return `total` with `part` added to the first rows in the wider dtype, and rounded to the dtype of `total`."""
    # A write to a slice of all rows has empty indices: the compiler of JAX 0.11.2 crashes on such a constant in
    # `shard_map`.
    if total.shape == part.shape:
        return (total + part).astype(total.dtype)
    return total.at[: part.shape[0]].add(part)


def iota(length: int) -> Int[Array, "length"]:
    """Return `0, ..., length - 1` in int32, the integer type of planning, regardless of `jax_enable_x64`."""
    return jnp.arange(length, dtype=jnp.int32)


def host_iota(length: int) -> Int[np.ndarray, "length"]:
    """Return `0, ..., length - 1` in int32 as a NumPy array."""
    return np.arange(length, dtype=np.int32)


PytreeT = TypeVar("PytreeT")
Carry = TypeVar("Carry")
"""Carry of a loop: a pytree."""


@dataclass_transform(frozen_default=True)
def pytree(cls: type[PytreeT]) -> type[PytreeT]:
    """Make `cls` a frozen dataclass and a pytree."""
    # Fields with metadata `static` belong to the tree structure. Unlike `jax.tree_util.register_dataclass`,
    # unflattening does not call `__init__`: JAX transformations put placeholders into array fields, so checks of shapes
    # and types belong to the constructing code.
    made: Any = dataclass(frozen=True)(cls)
    static = [field.name for field in fields(made) if field.metadata.get("static")]
    dynamic = [field.name for field in fields(made) if field.name not in static]

    def flatten_with_keys(value: Any) -> tuple[list, tuple]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in dynamic]
        return children, tuple(getattr(value, name) for name in static)

    def flatten(value: Any) -> tuple[list, tuple]:
        return [getattr(value, name) for name in dynamic], tuple(getattr(value, name) for name in static)

    def unflatten(aux: tuple, children: Iterable) -> Any:
        value: Any = object.__new__(made)
        for name, child in (*zip(dynamic, children, strict=True), *zip(static, aux, strict=True)):
            # A frozen dataclass rejects ordinary assignment.
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def as_int32(array: Any) -> Any:
    """Convert integers of any dtype to int32; those out of range become its nearest number."""
    # Later checks then reject an oversized value. A plain conversion would silently drop the upper bits.
    if not np.can_cast(array.dtype, np.int32):
        given, wanted = jnp.iinfo(array.dtype), jnp.iinfo(np.int32)
        array = array.clip(max(given.min, wanted.min), min(given.max, wanted.max))
    return array.astype(np.int32)

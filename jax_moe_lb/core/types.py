"""Every signature is written in these dimension letters and array types.

==== =================================================================
`R`  ranks in the expert-parallel group
`M`  ranks per domain (where expert weights may move)
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

A *row* is one token copy: a token that goes to `K` experts makes `K` rows.

`pytree` makes frozen dataclasses pytrees.
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
    # The union of two array libraries lacks the methods that both have.
    AnyArray = Any
else:
    AnyArray = Array | np.ndarray
    """Planning arithmetic accepts either, as it runs in a jitted program and on a host alike."""

Axes = tuple[str, ...]
"""Names of mesh axes, outermost first."""

Counts = Int[AnyArray, "R E"]
"""It counts the token copies that each rank routes to each expert in this microbatch."""

Placement = Int[AnyArray, "R S"]
"""It names the expert that each slot holds, -1 for an empty slot."""

Quota = Int[AnyArray, "E R"]
"""It counts the token copies of an expert that a rank serves."""

Load = Int[AnyArray, "R"]
"""It counts the token copies that each rank serves."""

Rows = Float[Array, "A H"]
"""It holds the token copies on the rank that serves them, sorted by slot."""

GroupSizes = Int[Array, "S"]
"""It counts the rows of each slot. Their sum is at most `A`, and rows beyond it hold no token."""

Tokens = Float[Array, "T H"]
"""It holds the tokens of one rank, before they are copied."""

TokenMask = Bool[Array, "T"]
"""It is false for padding tokens, which no expert serves."""

DType = Any
"""It may be whatever JAX takes for a dtype."""

State = Any
"""It is what a balancer remembers between steps: any pytree, `()` for most."""


def wide_dtype(array: Array) -> np.dtype:
    """Tells in which dtype sums over `array` are kept: float32, or its own dtype where that is wider.

    A long sum in bfloat16 stops growing, as its last terms are below half a unit of its last place.
    """
    return array.dtype if jnp.finfo(array.dtype).bits > 32 else np.dtype(np.float32)


def namespace(array: Any) -> Any:
    """Picks `numpy` or `jax.numpy`, for arithmetic that runs on a host and in a jitted program alike."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def iota(length: int) -> Int[Array, "length"]:
    """Counts from 0 to `length - 1` in int32, the one integer type of planning, also where JAX's default is wider."""
    return jnp.arange(length, dtype=jnp.int32)


def host_iota(length: int) -> Int[np.ndarray, "length"]:
    """Does what `iota` does in NumPy, for arithmetic that also runs on a host."""
    return np.arange(length, dtype=np.int32)


PytreeT = TypeVar("PytreeT")
Carry = TypeVar("Carry")
"""The state of a loop: a pytree."""


@dataclass_transform(frozen_default=True)
def pytree(cls: type[PytreeT]) -> type[PytreeT]:
    """Makes `cls` a frozen dataclass and a pytree; a field with metadata `static` is part of the tree's structure.

    Unlike `jax.tree_util.register_dataclass` it does not call `__init__` to rebuild a value: transformations put
    placeholders where arrays stand, and checks of shapes and types belong to the code that builds one.
    """
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
            # A frozen dataclass refuses ordinary assignment.
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def saturated(array: Any) -> Any:
    """Clips integers of more than 32 bits to int32's range, so that a sum is refused instead of wrapping round."""
    # A conversion to int32 alone would drop the high halves of 64-bit numbers without a word.
    return array.clip(-(2**31), 2**31 - 1) if array.dtype.itemsize > 4 else array

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
"""

from typing import TYPE_CHECKING, Any

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

"""Dimension letters and the array types that every signature is written in.

==== =================================================================
`R`  ranks in the expert-parallel group
`M`  ranks per domain (where expert weights may move)
`N`  rails per domain
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
    """What planning arithmetic accepts: it runs in a jitted program and on a host alike."""

Counts = Int[AnyArray, "R E"]
"""Token copies that each rank routes to each expert in this microbatch."""

Placement = Int[AnyArray, "R S"]
"""Expert held by each slot, -1 for an empty one."""

Quota = Int[AnyArray, "E R"]
"""Token copies of an expert that a rank serves."""

Load = Int[AnyArray, "R"]
"""Token copies that each rank serves."""

Rows = Float[Array, "A H"]
"""Token copies on the rank that serves them, sorted by slot."""

GroupSizes = Int[Array, "S"]
"""Rows of each slot; their sum is at most `A`, and rows beyond it hold no token."""

Tokens = Float[Array, "T H"]
TokenMask = Bool[Array, "T"]

DType = Any
"""Whatever JAX takes for a dtype."""

State = Any
"""What a balancer remembers between steps: any pytree, `()` for most."""


def wide_dtype(array: Array) -> np.dtype:
    """What sums over `array` are kept in: float32, or its own dtype where that is wider."""
    return array.dtype if jnp.finfo(array.dtype).bits > 32 else np.dtype(np.float32)


def namespace(array: Any) -> Any:
    """`numpy` or `jax.numpy`, for arithmetic that runs on a host and in a jitted program alike."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def iota(length: int) -> Int[Array, "length"]:
    """`0 ... length - 1` as int32, the one integer type of planning, also where JAX's default is wider."""
    return jnp.arange(length, dtype=jnp.int32)


def host_iota(length: int) -> Int[np.ndarray, "length"]:
    """`iota` in NumPy, for arithmetic that also runs on a host."""
    return np.arange(length, dtype=np.int32)

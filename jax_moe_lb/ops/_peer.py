"""What `copy_expert_weights.py` and `plan_and_copy.py` share: who copies to whom, and what is under way."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb._custom_calls import MODULES
from jax_moe_lb._pytree import pytree
from jax_moe_lb.ops.arrivals import Wanted, Weights
from jax_moe_lb.ops.fetch import Axes, add_at_home, fetch

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Route:
    """Between whom weights are copied, and how.

    Args:
        axis_name: the mesh axes of the ranks, outermost first. Where it is empty, one device holds the arrays of all
            ranks, one rank after the other, `[R L, ...]` and `[R P, ...]`: for tests and measurements on a single
            device.
        site: the name of this copy in messages.
        timeout_s: how long ranks wait for one that does not come, in seconds, before all stop with an error that names
            it. 120, the default, is far more than a copy takes; less finds a rank that hangs sooner.
        chunk_bytes: how many bytes a relay forwards at once. With less than 1 MiB, the default, a chain of relays
            starts sooner and hands over more often.
        domain: how many consecutive ranks copy from each other and nobody else; it divides the ranks. `None`, the
            default: all of them.
        reach: whether ranks of a domain reach each other's memory, as devices of one process do. `None`, the default:
            if there is one process only. Where they do not, XLA's collectives copy.
        processes: the process of each rank of each group, one group after the other, where ranks of a domain reach each
            other's memory although each is a process of its own, on GPUs of one machine; else empty.
    """

    axis_name: Axes
    site: str = "copy_expert_weights"
    timeout_s: float = 120.0
    chunk_bytes: int = 1 << 20
    domain: int | None = None
    reach: bool | None = None
    processes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= 1e6:
            raise ValueError(f"Route.timeout_s is {self.timeout_s}; expected above 0 and at most 1e6")
        if self.chunk_bytes < 1:
            raise ValueError(f"Route.chunk_bytes is {self.chunk_bytes}; expected at least 1")


@pytree
class Pending:
    """Copies under way, from `start` to `join`.

    Keep both calls in one computation: do not carry it through `lax.scan` or out of `jax.jit`. Inside a loop, something
    that `start` takes must change from step to step, or XLA takes it out of the loop: `join` refuses a ticket that
    comes twice, and on a GPU buffers that are not those of `start`.

    Args:
        incoming: the slots `[P, ...]`, a tree like the home weights, which must not be read before `join`.
        ticket: two integers that tie `join` to its `start`.
        kept: the operands of `start`. Copies read the weights until `join`; and as the memory of none of them is free
            before, XLA can give none of it to what runs in between, which would then have to wait.
        route: that of `start`.
    """

    incoming: Any
    ticket: Int[Array, "2"]
    kept: tuple[Array, ...]
    route: Route = field(metadata={"static": True})


def native_platforms(route: Route) -> tuple[str, ...]:
    """Names the platforms on which custom calls copy: all where ranks reach each other's memory, else none.

    Between processes only GPUs reach it.
    """
    if route.processes:
        return ("cuda",)
    reach = jax.process_count() == 1 if route.reach is None else route.reach
    return tuple(MODULES) if reach else ()


def num_ranks(route: Route) -> int:
    """Returns the number of devices that have tables in common."""
    return jax.lax.axis_size(route.axis_name) if route.axis_name else 1


def num_participants(route: Route) -> int:
    """Returns the number of devices that copy from each other."""
    return num_ranks(route) if route.domain is None else route.domain


def rank_in_domain(route: Route) -> Int[Array, ""]:
    """Returns the number of this rank among those that copy from each other."""
    rank = jax.lax.axis_index(route.axis_name) if route.axis_name else jnp.int32(0)
    return rank if route.domain is None else rank % route.domain


def in_domain(table: Wanted, per_rank: int, route: Route) -> Int[Array, "M P"]:
    """Returns the rows of this rank's domain, in which what belongs to its first rank is number 0.

    Args:
        table: `[R, ...]` of experts or of ranks, -1 for none.
        per_rank: how many numbers each rank has.
        route: between whom weights are copied.
    """
    if route.domain in (None, num_ranks(route)):
        return table
    first = jax.lax.axis_index(route.axis_name) // route.domain * route.domain
    mine = jax.lax.dynamic_slice_in_dim(table, first, route.domain)
    return jnp.where(mine < 0, -1, mine - first * per_rank)


def place(route: Route) -> Int[Array, "2"]:
    """Tells which participant of which group this device is, as two integers for the custom calls."""
    # Groups side by side run the same program, and each of them copies among its own ranks.
    others = tuple(name for name in jax.sharding.get_abstract_mesh().manual_axes if name not in route.axis_name)
    group = jax.lax.axis_index(others) if others else jnp.int32(0)
    if route.domain is not None:
        group = group * (num_ranks(route) // route.domain) + jax.lax.axis_index(route.axis_name) // route.domain
    return jnp.stack([rank_in_domain(route), group])


def attributes(num_home: int, route: Route) -> dict[str, Any]:
    """Returns the static arguments that every custom call takes which meets other devices."""
    mesh = jax.sharding.get_abstract_mesh()
    # Over axes that are not manual here every device makes the same call with the same data.
    num_lanes = math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    return {
        "num_participants": num_participants(route),
        "num_lanes": num_lanes if route.axis_name else 1,
        "num_home": num_home,
        "chunk_bytes": route.chunk_bytes,
        "timeout_s": np.float64(route.timeout_s),
        "site": route.site,
        "processes": np.array(route.processes, np.int64),
    }


def ranks_here(wanted: Wanted, route: Route) -> int:
    """Returns how many ranks' arrays this device holds: 1, or all of them where the route has no mesh axes.

    Raises:
        ValueError: `wanted` is not `[R, P]`.
    """
    if wanted.ndim != 2 or wanted.shape[0] < 1:
        raise ValueError(f"wanted has shape {wanted.shape}; expected [R, P] with R at least 1")
    if not route.axis_name:
        return wanted.shape[0]
    if wanted.shape[0] != num_ranks(route):
        raise ValueError(f"wanted has {wanted.shape[0]} ranks; expected the {num_ranks(route)} of the mesh axes")
    return 1


def experts_per_rank(arrays: list[Array] | Arrays, wanted: Wanted, route: Route, name: str) -> int:
    """Returns `L` or `P`, given arrays `[L, ...]` or `[P, ...]` of the ranks whose arrays this device holds.

    Raises:
        ValueError: their leading dimensions differ, or do not divide by the ranks.
    """
    sizes = {array.shape[0] if array.ndim else 0 for array in arrays}
    here = ranks_here(wanted, route)
    if len(sizes) != 1 or next(iter(sizes)) % here:
        raise ValueError(f"{name} has leading dimensions {sorted(sizes)}; expected one multiple of {here}")
    return next(iter(sizes)) // here


def fetch_reference(home: Weights, wanted: Wanted, num_home: int, route: Route) -> Weights:
    """Copies one kind of weights in plain JAX, as the custom calls do it for all kinds at once."""
    if wanted.shape[1] == 0:
        return home[:0]
    if route.axis_name:
        return fetch(home, wanted, num_home, route.axis_name)
    flat = wanted.reshape(-1)
    filled = (flat >= 0).reshape(-1, *[1] * (home.ndim - 1))
    # An empty slot is 0 and not garbage: its weights take part in products whose results are masked, where NaN would
    # spread.
    return jnp.where(filled, home[jnp.maximum(flat, 0)], jnp.zeros((), home.dtype))


def add_reference(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Adds the gradients of replicas at home, of all kinds of weights: the transpose of `fetch_reference`."""
    if route.axis_name:
        return add_at_home(sums, slots, wanted, num_home, num_participants(route), route.axis_name)
    flat = wanted.reshape(-1)
    num_experts = wanted.shape[0] * num_home

    def add(i: Array, sums: Arrays) -> Arrays:
        # One after the other, as the custom call adds, so that equal inputs give equal bits. An empty slot has the
        # index beyond the last expert, and is dropped.
        expert = jnp.where(flat[i] < 0, num_experts, flat[i])
        return tuple(
            kind.at[expert].add(slot[i].astype(kind.dtype), mode="drop") for kind, slot in zip(sums, slots, strict=True)
        )

    return jax.lax.fori_loop(0, flat.shape[0], add, sums)

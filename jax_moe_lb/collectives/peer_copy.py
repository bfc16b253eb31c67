"""Copies of expert weights between ranks that run beside other work of the program.

`start` begins the copies, and `join` returns them. Operations between the two that do not need the copies run
concurrently. `copy_expert_weights` is both calls in one and is differentiable; use it if there is no such work.

On a CPU a thread of each receiving device copies. On a GPU its copy engines do, on a stream of their own. If ranks
cannot access each other's memory, or without the custom calls, `start` is the exchange of `expert_gather.py`, and
nothing overlaps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.collectives.expert_gather import (
    Axes,
    Wanted,
    WeightsOfKind,
    accumulate_sequentially,
    add_at_home,
    fetch,
    max_incoming_replicas,
    owner_of,
    rounded,
    zero_sums,
)
from jax_moe_lb.core.custom_calls import MODULES, by_platform, call, like
from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import iota, pytree

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

    @property
    def in_one_process(self) -> bool:
        """Whether all ranks are devices of one process; false if unknown."""
        return self.domain is None and self.reach is True and not self.processes


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


def fetch_reference(home: WeightsOfKind, wanted: Wanted, num_home: int, route: Route) -> WeightsOfKind:
    """Copies one kind of weights in plain JAX, as the custom calls do it for all kinds at once."""
    if wanted.shape[1] == 0:
        return home[:0]
    if route.axis_name:
        return fetch(home, wanted, num_home, route.axis_name, route.in_one_process)
    flat = wanted.reshape(-1)
    filled = (flat >= 0).reshape(-1, *[1] * (home.ndim - 1))
    # An empty slot is 0 and not garbage: its weights take part in products whose results are masked, where NaN would
    # spread.
    return jnp.where(filled, home[jnp.maximum(flat, 0)], jnp.zeros((), home.dtype))


def add_reference(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Adds the gradients of replicas at home, of all kinds of weights: the transpose of `fetch_reference`."""
    if route.axis_name:
        return add_at_home(
            sums, slots, wanted, num_home, num_participants(route), route.axis_name, route.in_one_process
        )
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


def copy_expert_weights(home: Any, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Any:
    """Fills slots with the experts that they want, out of the home weights of all ranks.

    `PeerCopy` calls it; call it yourself to move weights in another pattern. It is differentiable in `home`: the
    transpose adds the gradients of all replicas at home, see `add_copies_at_home`.

    Args:
        home: a pytree of floating-point arrays `[L, ...]`, the kinds of weights of this rank's home experts; all travel
            together.
        wanted: `[R, P]` int32, the same on all ranks: the expert of each slot of each rank, -1 for an empty one. For
            gradients a rank must want an expert once at most, and none of its own, as in a legal plan; on GPUs those of
            others may be NaN.
        relay: `[R, P]` int32, the rank that each slot copies from, in chunks: a rank forwards a chunk as soon as it has
            it. -1, or the expert's home, means from home, and `None` means so for all. It changes no value, only the
            paths.
        route: between whom weights are copied, and how.

    Returns:
        The same tree of arrays `[P, ...]`; an empty slot is 0.

    Raises:
        ValueError: shapes that do not fit. Where the custom calls run, an entry of `wanted` or `relay` that is out of
            range, a relay that does not hold the expert or goes round in circles stops the program on all ranks, and so
            does a rank that does not come in time.
    """
    leaves, tree = jax.tree.flatten(home)
    if not leaves:
        return home
    operands = _operands(leaves, wanted, relay, route)
    return jax.tree.unflatten(tree, _copy(*operands, experts_per_rank(leaves, wanted, route, "home"), route))


def start(home: Any, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Pending:
    """Begins what `copy_expert_weights` does, and takes the same arguments.

    Use it with `join` where something can be computed meanwhile. Neither is differentiable: write one rule for the pair
    and what is between, with `add_copies_at_home`.
    """
    leaves, tree = jax.tree.flatten(home)
    operands = _operands(leaves, wanted, relay, route)
    ticket, incoming, kept = _start(*operands, experts_per_rank(leaves, wanted, route, "home"), route)
    return Pending(jax.tree.unflatten(tree, incoming), ticket, kept, route)


def join(pending: Pending, after: Any = ()) -> Any:
    """Waits for the copies that `start` began, and returns them.

    Args:
        pending: what `start` returned.
        after: a pytree of arrays that are computed before: on a GPU, what is to run beside the copies.

    Returns:
        The tree of slots, `[P, ...]`, as `copy_expert_weights` returns it.
    """
    incoming, tree = jax.tree.flatten(pending.incoming)
    # As operands: XLA drops what an optimization barrier returns and nobody uses, and then calls this first.
    kept = (*pending.kept, *jax.tree.leaves(after))
    return jax.tree.unflatten(tree, _join(pending.ticket, tuple(incoming), kept, pending.route))


def add_copies_at_home(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Adds what the slots that hold an expert have to what its home has: the transpose of `copy_expert_weights`.

    Use it in a backward pass of your own, for the gradients of replicas. It adds by rank, then by slot, in float32 at
    least, so that equal inputs give equal bits. On a CPU the thread of each home device reads the slots where they lie,
    and rounds their sum once more before it is added; on a GPU see `add_pulled`. Without custom calls the order is that
    of `collectives/expert_gather.py`.

    Args:
        sums: arrays `[G, ...]` of this rank, one per kind of weights, whose first `L` rows are the home experts'. They
            are changed in place where nobody else needs them.
        slots: arrays `[P, ...]` of this rank, likewise.
        wanted: `[R, P]` int32, the expert of each slot of each rank, -1 for an empty one.
        num_home: `L`, the home experts of a rank.
        route: between whom weights were copied.
    """
    if wanted.shape[1] == 0:
        # A call with no slots has nothing to copy from; every rank sees that alike, so none of them waits.
        return sums
    sums = vary_alike(sums, wanted, *slots)
    slots = vary_alike(slots, wanted, *sums)
    experts = num_home * ranks_here(wanted, route)

    def on_cpu(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        out = tuple(like(slot, (experts, *slot.shape[1:])) for slot in slots)
        mine = in_domain(wanted, num_home, route)
        parts = call("copy_sum", out, place(route), mine, *slots, **attributes(num_home, route))
        return tuple(total.at[:experts].add(part.astype(total.dtype)) for total, part in zip(sums, parts, strict=True))

    def on_cuda(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_pulled(sums, slots, wanted, num_home, route)

    def reference(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_reference(sums, slots, wanted, num_home, route)

    platforms = native_platforms(route)
    cpu, cuda = (tuple(name for name in platforms if name == platform) for platform in ("cpu", "cuda"))
    elsewhere = partial(by_platform, native=on_cuda, reference=reference, platforms=cuda)
    return by_platform(wanted, sums, slots, native=on_cpu, reference=elsewhere, platforms=cpu)


def add_pulled(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Computes `add_copies_at_home` out of copies, which every rank makes of the replicas of its home experts.

    It is the form for GPUs, whose copy engines move bytes and do not add. All ranks know from `wanted` who needs what,
    so all make the same copies, usually at once: see `accumulate_sequentially`.
    """
    if wanted.size == 0:
        return sums
    if not route.axis_name:
        return add_reference(sums, slots, wanted, num_home, route)
    num_ranks, num_replicas = wanted.shape
    domain = num_participants(route)
    room = max_incoming_replicas(num_replicas, num_home, domain)
    no_relay = jnp.full((num_ranks, room), -1, jnp.int32)
    # The slots are what is copied now: expert `rank * P + slot`.
    source = iota(wanted.size).reshape(wanted.shape)
    # Slots of other turns, and empty ones, go to a rank beyond the last and are dropped.
    owner = owner_of(wanted, num_home)

    def pull(at: Wanted) -> Callable[[Int[Array, ""]], Arrays]:
        nobody = jnp.full((num_ranks, room), -1, jnp.int32)
        pulled = nobody.at[jnp.where(at >= 0, owner, num_ranks), at].set(source, mode="drop")
        landed = _both(slots, pulled, no_relay, num_replicas, route)
        return lambda i: tuple(kind[i] for kind in landed)

    return accumulate_sequentially(sums, wanted, num_home, domain, jax.lax.axis_index(route.axis_name), pull, slots)


# ---- the pair and its gradient --------------------------------------------------
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _copy(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    return _both(home, wanted, relay, num_home, route)


def _save(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Arrays, Wanted]:
    return _copy(home, wanted, relay, num_home, route), wanted


def _backward(num_home: int, route: Route, wanted: Wanted, upstream: Arrays) -> tuple[Arrays, None, None]:
    zeros = zero_sums(upstream, num_home * ranks_here(wanted, route))
    return rounded(add_copies_at_home(zeros, upstream, wanted, num_home, route), upstream), None, None


_copy.defvjp(_save, _backward)


def _both(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    # One loop around both calls where they are mapped over: `join` wants the buffers of its `start`.
    @jax.custom_batching.sequential_vmap
    def both(home: Arrays, wanted: Wanted, relay: Wanted) -> Arrays:
        return _join(*_start(home, wanted, relay, num_home, route), route)

    return both(home, wanted, relay)


def _operands(home: list[Array], wanted: Wanted, relay: Wanted | None, route: Route) -> tuple[Arrays, Wanted, Wanted]:
    experts_per_rank(home, wanted, route, "home")
    if relay is None:
        # The custom call has one signature, with relays.
        relay = jnp.full(wanted.shape, -1, jnp.int32)
    if relay.shape != wanted.shape:
        raise ValueError(f"relay has shape {relay.shape}; expected that of wanted, {wanted.shape}")
    # A custom call takes no other integers.
    return vary_alike(home, wanted, relay), wanted.astype(jnp.int32), relay.astype(jnp.int32)


def _start(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Array, Arrays, Arrays]:
    """The ticket, the incoming buffers and all operands."""
    num_slots = wanted.shape[1] * ranks_here(wanted, route)

    def native(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        out = like(where), *(like(array, (num_slots, *array.shape[1:])) for array in home)
        tables = in_domain(wanted, num_home, route), in_domain(relay, 1, route)
        return tuple(call("copy_start", out, where, *tables, *home, **attributes(num_home, route)))

    def reference(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        return where, *(fetch_reference(array, wanted, num_home, route) for array in home)

    # They are returned, so that `join` can take them too: as long as a later operation reads them, XLA frees none of
    # the memory that is being copied from.
    operands = (place(route), wanted, relay, *home)
    ticket, *incoming = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    return ticket, tuple(incoming), operands


def _join(ticket: Array, incoming: Arrays, kept: Arrays, route: Route) -> Arrays:
    def native(ticket: Array, *arrays: Array) -> Arrays:
        out = tuple(like(array) for array in arrays[: len(incoming)])
        # The copies are written by others into the buffers of `start`, so `join` must return those very buffers.
        aliases = {1 + i: i for i in range(len(incoming))}
        return tuple(call("copy_join", out, ticket, *arrays, aliases=aliases))

    def reference(ticket: Array, *arrays: Array) -> Arrays:
        return arrays[: len(incoming)]

    operands = (ticket, *incoming, *kept)
    return by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))

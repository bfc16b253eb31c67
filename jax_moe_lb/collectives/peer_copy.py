"""Copies of expert weights between ranks, concurrent with other work of the program.

`start` begins the copies, and `join` returns them. Operations between the two run concurrently if they do not use the
copies; `after_start` orders them after `start`. `copy_expert_weights` combines both and is differentiable; use it if
there is no such work.

On a CPU, a thread per receiving device copies. On a GPU, copy engines do, on a separate stream. If ranks cannot
access each other's memory, or without the custom calls, `start` is the exchange of `expert_gather.py`, without overlap.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jax_moe_lb.collectives.expert_gather import (
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
from jax_moe_lb.collectives.permutes import other_manual_axes
from jax_moe_lb.collectives.ragged_all_to_all import Group
from jax_moe_lb.core.custom_calls import MODULES, by_platform, call, like
from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import Axes, add_to_first, iota, pytree

Arrays = tuple[Array, ...]
Operands = TypeVar("Operands")


@dataclass(frozen=True)
class Route:
    """Ranks that copy weights from each other, and options of the copies."""

    # Mesh axes of the ranks, outermost first. If empty, one device holds the arrays of all ranks, rank after rank, `[R
    # L, ...]` and `[R P, ...]`, for tests and measurements on a single device.
    axis_name: Axes
    site: str = "copy_expert_weights"  # name of the copies in messages; "copy_expert_weights" by default
    # Timeout of waiting ranks in seconds; 120.0 by default, far above the time of a copy. Then all ranks stop with an
    # error naming the missing one.
    timeout_s: float = 120.0
    # Bytes forwarded at once by a relay; 1 MiB by default. Smaller chunks start a chain of relays sooner and cost more
    # launches.
    chunk_bytes: int = 1 << 20
    # Number of consecutive ranks that copy from each other, a divisor of the number of ranks; `None` (default) for all
    # ranks
    domain: int | None = None
    # Whether ranks of a domain can access each other's memory, as devices of one process can. `None` (default): if
    # there is one process. Otherwise XLA's collectives copy.
    reach: bool | None = None
    # Process of each rank of each group, group after group, if ranks with peer access are separate processes, on GPUs
    # of one machine; otherwise empty (default)
    processes: tuple[int, ...] = ()
    limited_routing: bool = False  # whether XLA has no ragged exchange between the ranks; see `Topology`

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= 1e6:
            raise ValueError(f"Route.timeout_s is {self.timeout_s}; expected above 0 and at most 1e6")
        if self.chunk_bytes < 1:
            raise ValueError(f"Route.chunk_bytes is {self.chunk_bytes}; expected at least 1")

    @property
    def group(self) -> Group:
        """Ranks with common tables."""
        in_one_process = self.domain is None and self.reach is True and not self.processes
        return Group(self.axis_name, in_one_process, self.limited_routing)


@pytree
class Pending:
    """Copies in progress, from `start` to `join`."""

    # Keep both calls in one computation: do not carry it through `lax.scan` or out of `jax.jit`. Inside a loop, an
    # operand of `start` must change in each iteration, otherwise XLA hoists the call out of the loop. `join` fails for
    # a ticket that occurs twice, and on a GPU for buffers other than those of `start`.

    incoming: PyTree  # slots `[P, ...]`, a tree like the home weights; do not read them before `join`
    ticket: Int[Array, "2"]  # two integers that pair `join` with its `start`
    # Operands of `start`. Copies read the weights until `join`. Keeping them alive also prevents XLA from reusing their
    # memory for operations in between, which would have to wait.
    kept: tuple[Array, ...]
    route: Route = field(metadata={"static": True})  # route passed to `start`


def native_platforms(route: Route) -> tuple[str, ...]:
    """Return the platforms with custom calls for copies: all if ranks access each other's memory, otherwise none."""
    # Between processes only GPUs can.
    if route.processes:
        return ("cuda",)
    reach = jax.process_count() == 1 if route.reach is None else route.reach
    return tuple(MODULES) if reach else ()


def num_ranks(route: Route) -> int:
    """Return the number of devices with common tables."""
    return jax.lax.axis_size(route.axis_name) if route.axis_name else 1


def num_participants(route: Route) -> int:
    """Return the number of devices copying from each other."""
    return num_ranks(route) if route.domain is None else route.domain


def in_domain(table: Wanted, per_rank: int, route: Route) -> Int[Array, "M P"]:
    """Return the table rows of this rank's domain, renumbered from the first rank of the domain."""
    if route.domain in (None, num_ranks(route)):
        return table
    return rows_of_domain(table, per_rank, jax.lax.axis_index(route.axis_name) // route.domain, route.domain)


def rows_of_domain(table: Wanted, per_rank: int, domain: Array, size: int) -> Int[Array, "M P"]:
    """Return the table rows of a domain of `size` ranks, renumbered from the first rank of the domain."""
    first = domain * size
    mine = jax.lax.dynamic_slice_in_dim(table, first, size)
    return jnp.where(mine < 0, -1, mine - first * per_rank)


def place(route: Route) -> Int[Array, "2"]:
    """Return the participant and the group of this device, as two integers for the custom calls."""
    # Other groups run the same program, and each copies among its own ranks.
    others = other_manual_axes(route.axis_name)
    group = jax.lax.axis_index(others) if others else jnp.int32(0)
    if route.domain is not None:
        group = group * (num_ranks(route) // route.domain) + jax.lax.axis_index(route.axis_name) // route.domain
    rank = jax.lax.axis_index(route.axis_name) if route.axis_name else jnp.int32(0)
    return jnp.stack([rank if route.domain is None else rank % route.domain, group])


def attributes(num_home: int, route: Route) -> dict[str, Any]:
    """Return the static arguments of custom calls synchronizing devices."""
    mesh = jax.sharding.get_abstract_mesh()
    # Along axes that are not manual, all devices make the same call with the same data.
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
    """Return the number of ranks whose arrays are on this device: 1, or `R` if the route has no mesh axes."""
    if wanted.ndim != 2 or wanted.shape[0] < 1:
        raise ValueError(f"wanted has shape {wanted.shape}; expected [R, P] with R at least 1")
    if not route.axis_name:
        return wanted.shape[0]
    if wanted.shape[0] != num_ranks(route):
        raise ValueError(f"wanted has {wanted.shape[0]} ranks; expected the {num_ranks(route)} of the mesh axes")
    return 1


def experts_per_rank(arrays: list[Array] | Arrays, wanted: Wanted, route: Route, name: str) -> int:
    """Return `L` or `P`, from arrays `[L, ...]` or `[P, ...]` of the ranks on this device."""
    sizes = {array.shape[0] if array.ndim else 0 for array in arrays}
    here = ranks_here(wanted, route)
    if len(sizes) != 1 or next(iter(sizes)) % here:
        raise ValueError(f"{name} has leading dimensions {sorted(sizes)}; expected one multiple of {here}")
    return next(iter(sizes)) // here


def fetch_reference(home: WeightsOfKind, wanted: Wanted, num_home: int, route: Route) -> WeightsOfKind:
    """Copy one weight array in plain JAX, as the custom calls do for all at once."""
    if wanted.shape[1] == 0:
        return home[:0]
    if route.axis_name:
        return fetch(home, wanted, num_home, route.group)
    flat = wanted.reshape(-1)
    filled = (flat >= 0).reshape(-1, *[1] * (home.ndim - 1))
    # Empty slots are 0: their products are masked, and NaN would propagate through the mask.
    return jnp.where(filled, home[jnp.maximum(flat, 0)], jnp.zeros((), home.dtype))


def add_reference(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Add the gradients of replicas at home, for all weight arrays; the transpose of `fetch_reference`."""
    if route.axis_name:
        return add_at_home(sums, slots, wanted, num_home, num_participants(route), route.group)
    flat = wanted.reshape(-1)
    num_experts = wanted.shape[0] * num_home

    def add(i: Array, sums: Arrays) -> Arrays:
        # Sequential, as in the custom call, so equal inputs give equal bits. Empty slots get an index after the last
        # expert, which the scatter drops.
        expert = jnp.where(flat[i] < 0, num_experts, flat[i])
        return tuple(
            kind.at[expert].add(slot[i].astype(kind.dtype), mode="drop") for kind, slot in zip(sums, slots, strict=True)
        )

    return jax.lax.fori_loop(0, flat.shape[0], add, sums)


def copy_expert_weights(home: PyTree, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> PyTree:
    """Copy the wanted experts into slots from the home weights of all ranks."""
    # `PeerCopy` calls it; use it for custom patterns of weight transfers. It is differentiable in `home`: the transpose
    # adds the gradients of all replicas at home; see `add_copies_at_home`.
    leaves, tree = jax.tree.flatten(home)
    if not leaves:
        return home
    return jax.tree.unflatten(tree, _copy(*_operands(leaves, wanted, relay, route), route))


def start(home: PyTree, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Pending:
    """Begin the copies of `copy_expert_weights`, with the same arguments."""
    # Use it with `after_start` and `join` to overlap copies with computation. None of them is differentiable: write one
    # rule for the pair and the operations in between, with `add_copies_at_home`.
    leaves, tree = jax.tree.flatten(home)
    ticket, incoming, kept = _start(*_operands(leaves, wanted, relay, route), route)
    return Pending(jax.tree.unflatten(tree, incoming), ticket, kept, route)


def after_start(pending: Pending, operands: Operands) -> tuple[Operands, Pending]:
    """Order the users of `operands` after `start`."""
    # Without it XLA may launch `start` as late as `join`, and the copies then overlap with nothing. On an H100 they
    # followed all products in between.
    operands, ticket = jax.lax.optimization_barrier((operands, pending.ticket))
    return operands, replace(pending, ticket=ticket)


def join(pending: Pending, after: PyTree = ()) -> PyTree:
    """Wait for the copies of `start`, and return them."""
    incoming, tree = jax.tree.flatten(pending.incoming)
    # Pass `after` as operands: XLA drops unused results of an optimization barrier, and then calls this too early.
    kept = (*pending.kept, *jax.tree.leaves(after))
    return jax.tree.unflatten(tree, _join(pending.ticket, tuple(incoming), kept, pending.route))


def add_copies_at_home(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Add the arrays of all replicas to those of the home experts; the transpose of `copy_expert_weights`."""
    # Use it in a handwritten backward pass, for the gradients of replicas. It adds by rank, then by slot, in float32 or
    # wider, so equal inputs give equal bits. On a CPU, the thread of each home device reads the slots in place, and
    # rounds their sum once before adding it. On a GPU, see `add_pulled`. Without custom calls, the order is the one of
    # `expert_gather.py`.
    if wanted.shape[1] == 0:
        # Without slots there are no sources. All ranks take this branch, so none waits.
        return sums
    sums = vary_alike(sums, wanted, *slots)
    slots = vary_alike(slots, wanted, *sums)
    experts = num_home * ranks_here(wanted, route)

    def on_cpu(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        out = tuple(like(slot, (experts, *slot.shape[1:])) for slot in slots)
        mine = in_domain(wanted, num_home, route)
        parts = call("copy_sum", out, place(route), mine, *slots, **attributes(num_home, route))
        return tuple(add_to_first(total, part.astype(total.dtype)) for total, part in zip(sums, parts, strict=True))

    def on_cuda(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_pulled(sums, slots, wanted, num_home, route)

    def reference(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_reference(sums, slots, wanted, num_home, route)

    platforms = native_platforms(route)
    cpu, cuda = (tuple(name for name in platforms if name == platform) for platform in ("cpu", "cuda"))
    elsewhere = partial(by_platform, native=on_cuda, reference=reference, platforms=cuda)
    return by_platform(wanted, sums, slots, native=on_cpu, reference=elsewhere, platforms=cpu)


def add_pulled(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Compute `add_copies_at_home` by copies: every rank fetches the replicas of the home experts and adds them."""
    # It is used on GPUs, whose copy engines cannot add. All ranks derive the same copies from `wanted`, usually in one
    # turn; see `accumulate_sequentially`.
    if wanted.size == 0:
        return sums
    if not route.axis_name:
        return add_reference(sums, slots, wanted, num_home, route)
    num_ranks, num_replicas = wanted.shape
    domain = num_participants(route)
    room = max_incoming_replicas(num_replicas, num_home, domain)
    no_relay = jnp.full((num_ranks, room), -1, jnp.int32)
    # The slots are the source now, with index `rank * P + slot`.
    source = iota(wanted.size).reshape(wanted.shape)
    # Slots of other turns, and empty ones, get a rank after the last, which the scatter drops.
    owner = owner_of(wanted, num_home)

    def pull(at: Wanted) -> Callable[[Int[Array, ""]], Arrays]:
        nobody = jnp.full((num_ranks, room), -1, jnp.int32)
        pulled = nobody.at[jnp.where(at >= 0, owner, num_ranks), at].set(source, mode="drop")
        landed = _both(slots, pulled, no_relay, num_replicas, route)
        return lambda i: tuple(kind[i] for kind in landed)

    return accumulate_sequentially(sums, wanted, num_home, domain, route.group, pull, slots)


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
    # One loop around both calls under `vmap`: `join` requires the buffers of its `start`.
    @jax.custom_batching.sequential_vmap
    def both(home: Arrays, wanted: Wanted, relay: Wanted) -> Arrays:
        return _join(*_start(home, wanted, relay, num_home, route), route)

    return both(home, wanted, relay)


def _operands(
    home: list[Array], wanted: Wanted, relay: Wanted | None, route: Route
) -> tuple[Arrays, Wanted, Wanted, int]:
    num_home = experts_per_rank(home, wanted, route, "home")
    if relay is None:
        # The custom call always takes relays.
        relay = jnp.full(wanted.shape, -1, jnp.int32)
    if relay.shape != wanted.shape:
        raise ValueError(f"relay has shape {relay.shape}; expected {wanted.shape}, as wanted")
    # The custom call supports int32 only.
    return vary_alike(home, wanted, relay), wanted.astype(jnp.int32), relay.astype(jnp.int32), num_home


def _start(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Array, Arrays, Arrays]:
    """Begin the copies; return the ticket, the incoming buffers and all operands."""
    num_slots = wanted.shape[1] * ranks_here(wanted, route)

    def native(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        out = like(where), *(like(array, (num_slots, *array.shape[1:])) for array in home)
        tables = in_domain(wanted, num_home, route), in_domain(relay, 1, route)
        return tuple(call("copy_start", out, where, *tables, *home, **attributes(num_home, route)))

    def reference(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        return where, *(fetch_reference(array, wanted, num_home, route) for array in home)

    # Return the operands for `join`: a later use prevents XLA from freeing the memory of the copies.
    operands = (place(route), wanted, relay, *home)
    ticket, *incoming = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    return ticket, tuple(incoming), operands


def _join(ticket: Array, incoming: Arrays, kept: Arrays, route: Route) -> Arrays:
    def native(ticket: Array, *arrays: Array) -> Arrays:
        out = tuple(like(array) for array in arrays[: len(incoming)])
        # Other devices write into the buffers of `start`, so `join` must return the same buffers.
        aliases = {1 + i: i for i in range(len(incoming))}
        return tuple(call("copy_join", out, ticket, *arrays, aliases=aliases))

    def reference(ticket: Array, *arrays: Array) -> Arrays:
        return arrays[: len(incoming)]

    operands = (ticket, *incoming, *kept)
    return by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))

"""UltraEP's relays (arXiv 2606.04101): replicas forwarding the weights of an expert with many replicas."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.types import Placement, iota, pytree
from jax_moe_lb.planners.base import fits_kernel, run_planner, within_int32


def relay(placement: Placement, num_home: int, min_replicas: int, max_relays: int, min_gain: int) -> Placement:
    """Return the rank from which each slot copies its weights; `ffi/planning/relay.h` specifies the rule."""
    # `transport.relay.Relay` calls it. Call it directly to set `Plan.relay`, which `PeerCopy` reads.
    # Returns `[R, S]` int32, the source rank of each slot: its own rank for a home expert, -1 for an empty slot. A
    # NumPy array for a NumPy input. For an illegal placement, the custom call stops the program on a CPU. On a GPU it
    # returns -1 in all entries, and all replicas are copied from home.
    if not 1 <= num_home <= placement.shape[1]:
        raise ValueError(f"num_home is {num_home}; expected 1 to the {placement.shape[1]} slots of a rank")
    check_relay(min_replicas, max_relays, min_gain)
    options: dict[str, Any] = {
        "num_home": num_home,
        "min_replicas": min_replicas,
        "max_relays": max_relays,
        "min_gain": min_gain,
    }
    num_ranks, shapes = placement.shape[0], (placement.shape,)

    def in_kernel() -> bool:
        return fits_kernel("relay", shapes[0], num_ranks * num_home, num_ranks)

    return run_planner("relay", shapes, placement, reference=relay_reference, in_kernel=in_kernel, **options)[0]


def check_relay(min_replicas: int, max_relays: int, min_gain: int) -> None:
    """Check the options of `relay`."""
    for name, value, least in (
        ("min_replicas", min_replicas, 2),
        ("max_relays", max_relays, 1),
        ("min_gain", min_gain, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")


def relay_reference(
    placement: Placement, num_home: int, min_replicas: int, max_relays: int, min_gain: int
) -> Placement:
    """Compute `relay` in jnp as a loop over experts, with an inner loop over replicas other than relays."""
    (placement,) = alike(placement)
    num_ranks, slots = placement.shape
    # The carry of a loop must vary over the mesh axes of its steps.
    nothing = vary_like(jnp.zeros(num_ranks, jnp.int32), placement)
    replica = iota(slots)[None] >= num_home
    # The step of its expert overwrites the 0 of a replica; the -1 of an empty slot stays.
    start = _Sent(jnp.where(replica & (placement >= 0), jnp.int32(0), -1), nothing, nothing)

    def step(expert: Array, s: _Sent) -> _Sent:
        here = replica & (placement == expert)
        options = within_int32(min_replicas), max_relays, within_int32(min_gain)
        source, s = _tree(s, here.any(1), expert // num_home, options)
        return _Sent(jnp.where(here, source[:, None], s.relay), s.copies, s.relays)

    end = jax.lax.fori_loop(0, num_ranks * num_home, step, start)
    return jnp.where(replica, end.relay, iota(num_ranks)[:, None])


@pytree
class _Sent:
    relay: Int[Array, "R S"]  # source rank of each slot
    copies: Int[Array, "R"]  # copies sent by each rank
    relays: Int[Array, "R"]  # 1 if the rank relays any expert, else 0


def _tree(s: _Sent, hosts: Array, home: Array, options: tuple[int, int, int]) -> tuple[Int[Array, "R"], _Sent]:
    """Return the rank from which each of the ranks `hosts` copies an expert, and the updated carry."""
    rank, num_hosts = iota(hosts.shape[0]), hosts.sum(dtype=jnp.int32)
    num_relays = _num_relays(num_hosts, hosts.shape[0], *options)
    # The first k in `order` are the relays; the others wait for a relay, by rank. lexsort sorts by its last key first:
    # hosts, then fewest copies sent, then ranks without a relay so far, then lower ranks.
    order = jnp.lexsort((rank, s.relays, s.copies, ~hosts)).astype(jnp.int32)
    is_relay = jnp.zeros_like(hosts).at[order].set(rank < num_relays)
    waits = hosts & ~is_relay & (num_relays > 0)
    number = waits.cumsum(dtype=jnp.int32) - 1
    copies = s.copies.at[home].add(jnp.where(num_relays > 0, num_relays, num_hosts))
    copies = copies.at[order].add((rank < num_relays).astype(jnp.int32))

    def assign(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        relays, copies = state
        # Use the order of relays, not of ranks, so that argmin gives a tie to the first relay. The int32 maximum
        # excludes all other ranks.
        sends = jnp.where(rank < num_relays, copies[order], jnp.iinfo(jnp.int32).max)
        idlest = order[jax.lax.argmin(sends, 0, jnp.int32)]
        return relays.at[i].set(idlest), copies.at[idlest].add(1)

    # The first k waiting ranks take one relay each, in the order of relays. These are the entries of `order`, so the
    # loop starts after them and finds their relays in its carry.
    relay_of, copies = jax.lax.fori_loop(num_relays, waits.sum(dtype=jnp.int32), assign, (order, copies))
    source = jnp.where(waits, relay_of[jnp.maximum(number, 0)], home)
    return source, _Sent(s.relay, copies, s.relays.at[order].max((rank < num_relays).astype(jnp.int32)))


def _num_relays(num_hosts: Array, num_ranks: int, min_replicas: int, max_relays: int, min_gain: int) -> Array:
    # Integer square root without floating point: count the squares up to `num_hosts`.
    root = ((iota(min(max_relays, num_ranks)) + 1) ** 2 <= num_hosts).sum(dtype=jnp.int32)
    relays = jnp.maximum(jnp.minimum(root, num_hosts - 1), 1)
    most = jnp.maximum(relays, (num_hosts - 1) // relays)
    return jnp.where((num_hosts >= min_replicas) & (num_hosts - most >= min_gain), relays, 0)

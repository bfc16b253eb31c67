"""`relay` decides which replicas forward the weights of an expert that has many, as UltraEP does (arXiv 2606.04101)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import Placement, iota, pytree
from jax_moe_lb.planners.base import alike, run_planner


def relay(placement: Placement, num_home: int, min_replicas: int, max_relays: int, min_gain: int) -> Placement:
    """Says which rank each slot copies its weights from; the rule to the letter stands in `ffi/planning/relay.h`.

    `transport.relay.Relay` calls it; call it yourself to set `Plan.relay`, which `PeerCopy` reads.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one, none twice on a rank; the first
            `num_home` columns are the home experts.
        num_home: `L`, the home experts of a rank.
        min_replicas: the least replicas of an expert that gets relays, at least 2; all replicas of others are copied
            from home. 4 is usual.
        max_relays: the most relays of one expert, at least 1; 8 is usual.
        min_gain: how many copies fewer than home alone the busiest sender of a tree must send, at least 1; 2 is usual.

    Returns:
        `[R, S]` int32, the rank that each slot copies from: for a home expert its own rank, for an empty slot -1. A
        NumPy array gives a NumPy array. A placement that breaks the rules above stops the program on a CPU with the
        custom call; on a GPU with it all entries are then -1, and all replicas are copied from home.

    Raises:
        ValueError: a shape that does not fit, or an option out of range.
    """
    if not 1 <= num_home <= placement.shape[1]:
        raise ValueError(f"num_home is {num_home}; expected 1 to the {placement.shape[1]} slots of a rank")
    check_relay(min_replicas, max_relays, min_gain)
    options: dict[str, Any] = {
        "num_home": num_home,
        "min_replicas": min_replicas,
        "max_relays": max_relays,
        "min_gain": min_gain,
    }
    return run_planner("relay", (placement.shape,), placement, reference=relay_reference, **options)[0]


def check_relay(min_replicas: int, max_relays: int, min_gain: int) -> None:
    """Refuses options of `relay` that describe trees which cannot exist, or gain nothing.

    Args:
        min_replicas: the least replicas of an expert that gets relays; at least 2.
        max_relays: the most relays of one expert; at least 1.
        min_gain: how many copies fewer the busiest sender must send; at least 1.

    Raises:
        ValueError: names the option, and says what was expected.
    """
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
    """Computes `relay` as a loop over experts, and inside it one over replicas that are no relays."""
    (placement,) = alike(placement)
    num_ranks, slots = placement.shape
    # The carry of a loop must vary over the mesh axes that its steps give it.
    nothing = vary_like(jnp.zeros(num_ranks, jnp.int32), placement)
    replica = iota(slots)[None] >= num_home
    # The 0 of a slot with a replica is overwritten in the turn of its expert; the -1 of an empty one stays.
    start = _Sent(jnp.where(replica & (placement >= 0), jnp.int32(0), -1), nothing, nothing)

    def step(expert: Array, s: _Sent) -> _Sent:
        here = replica & (placement == expert)
        source, s = _tree(s, here.any(1), expert // num_home, (min_replicas, max_relays, min_gain))
        return _Sent(jnp.where(here, source[:, None], s.relay), s.copies, s.relays)

    end = jax.lax.fori_loop(0, num_ranks * num_home, step, start)
    return jnp.where(replica, end.relay, iota(num_ranks)[:, None])


@pytree
class _Sent:
    """Carries what was decided so far.

    Args:
        relay: the rank that each slot copies from.
        copies: how many copies each rank sends.
        relays: whether a rank relays any expert, 0 or 1.
    """

    relay: Int[Array, "R S"]
    copies: Int[Array, "R"]
    relays: Int[Array, "R"]


def _tree(s: _Sent, hosts: Array, home: Array, options: tuple[int, int, int]) -> tuple[Int[Array, "R"], _Sent]:
    """Decides where the ranks `hosts` copy an expert from."""
    rank, num_hosts = iota(hosts.shape[0]), hosts.sum(dtype=jnp.int32)
    num_relays = _num_relays(num_hosts, hosts.shape[0], *options)
    # The k first in order are the relays; the others wait for one, by rank. `lexsort` takes its last key first: hosts
    # stand in front, those that send least first, on a tie those that relay no expert yet, then lower ranks.
    order = jnp.lexsort((rank, s.relays, s.copies, ~hosts)).astype(jnp.int32)
    is_relay = jnp.zeros_like(hosts).at[order].set(rank < num_relays)
    waits = hosts & ~is_relay & (num_relays > 0)
    number = waits.cumsum(dtype=jnp.int32) - 1
    copies = s.copies.at[home].add(jnp.where(num_relays > 0, num_relays, num_hosts))
    copies = copies.at[order].add((rank < num_relays).astype(jnp.int32))

    def assign(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        relays, copies = state
        # In the order of relays, and not of ranks, so that `argmin` gives a tie to the first in that order; the largest
        # integer keeps out those that are no relays.
        sends = jnp.where(rank < num_relays, copies[order], jnp.iinfo(jnp.int32).max)
        idlest = order[jax.lax.argmin(sends, 0, jnp.int32)]
        return relays.at[i].set(idlest), copies.at[idlest].add(1)

    # The first k that wait take one relay each, in the order of relays: that is `order` itself, so the loop starts
    # behind them and finds their relays in its carry.
    relay_of, copies = jax.lax.fori_loop(num_relays, waits.sum(dtype=jnp.int32), assign, (order, copies))
    source = jnp.where(waits, relay_of[jnp.maximum(number, 0)], home)
    return source, _Sent(s.relay, copies, s.relays.at[order].max((rank < num_relays).astype(jnp.int32)))


def _num_relays(num_hosts: Array, num_ranks: int, min_replicas: int, max_relays: int, min_gain: int) -> Array:
    # No floating point: the number of squares that are not above `num_hosts`.
    root = ((iota(min(max_relays, num_ranks)) + 1) ** 2 <= num_hosts).sum(dtype=jnp.int32)
    relays = jnp.maximum(jnp.minimum(root, num_hosts - 1), 1)
    most = jnp.maximum(relays, (num_hosts - 1) // relays)
    return jnp.where((num_hosts >= min_replicas) & (num_hosts - most >= min_gain), relays, 0)

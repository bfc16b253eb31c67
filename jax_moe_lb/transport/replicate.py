"""Replications: weights of other ranks' experts into slots, and sums of gradients at home.

`Gather` copies weights from the homes with XLA collectives. `PeerCopy` copies them without compute on the source
ranks. `Relay` forwards copies through relays, which reduces the fan-out of the home of a hot expert.
"""

import abc
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jax_moe_lb.collectives.expert_gather import (
    Wanted,
    add_at_home,
    fetch_all,
    max_incoming_replicas,
    sends_in_place,
    zero_sums,
)
from jax_moe_lb.collectives.local_processes import can_copy, can_copy_inside, warn_of_shared_processes
from jax_moe_lb.collectives.peer_copy import (
    Pending,
    Route,
    add_copies_at_home,
    join,
    native_platforms,
    rows_of_domain,
    start,
)
from jax_moe_lb.collectives.ragged_all_to_all import Group
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology


class Replicate(abc.ABC):
    """Transport of expert weights into slots, and of the gradients home.

    Write a subclass to transport weights in another way. It is a frozen dataclass, because it is a static argument of
    `jax.jit`, with three methods. `start` begins the copies, `join` waits for them, and `add_at_home` is the transpose
    of both. Home experts never travel. Every dispatch can use these methods: a dispatch that plans and copies first
    (`Direct`), and one that computes between `start` and `join` (`TwoPhase`). See `docs/extending.md` for an example.

    Examples:
        >>> from jax_moe_lb.transport import Gather, PeerCopy, Relay
        >>> [kind().uses_copy_engines for kind in (Gather, PeerCopy, Relay)]
        [False, True, True]
    """

    @abc.abstractmethod
    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Any:
        """Begin to copy the replicas of a plan with replica slots.

        It is not differentiated.

        Args:
            experts: the `L` home experts of this rank.
            plan: plan, equal on all ranks.
            topology: topology of the layer; weights travel between the ranks of the expert axes.

        Returns:
            Input of `join`; copies may still be in progress.

        Raises:
            ValueError: the replication does not support the plan.
        """

    @abc.abstractmethod
    def join(self, pending: Any, after: PyTree) -> Experts:
        """Return the `S - L` replicas of this rank after the copies end.

        Args:
            pending: return value of `start`.
            after: pytree of arrays to compute before the wait, concurrently with the copies; `()` for none.

        Returns:
            `S - L` experts. Empty slots are 0; on GPUs they are uninitialized.
        """

    @abc.abstractmethod
    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Add the gradients of all replicas to those of the home experts; the transpose of `start` and `join`.

        Args:
            sums: gradients of the `L` home experts of this rank, in the dtype of the sums. Further rows may follow and
                pass through. They are not used afterwards and can be updated in place.
            gradients: gradients of the `S - L` replicas of this rank, in the dtype of the transfer. On GPUs, those
                of empty slots are uninitialized.
            plan: plan passed to `start`.
            topology: topology passed to `start`.

        Returns:
            The updated `sums`. Equal inputs must give equal bits: the order of additions may depend on the plan only.
        """

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Return the weights of this rank's `S` slots: its home experts, then the replicas.

        It is differentiable in `experts`, by `add_at_home`.

        Args:
            experts: the `L` home experts of this rank.
            plan: plan, equal on all ranks.
            topology: topology of the layer; weights travel between the ranks of the expert axes.
        """
        # Without replica slots, skip the exchange on all ranks.
        if plan.slots == plan.num_home:
            return experts
        return joined(experts, _replicas(self, topology, experts, plan))

    def plan(self, plan: Plan) -> Plan:
        """Return the plan with the additions of this replication, such as relays; unchanged by default.

        The simulator calls it to find the ranks between which weights travel.

        Args:
            plan: legal plan with replica slots.
        """
        return plan

    def again(self) -> "Replicate":
        """Return the replication for the copies of the same weights in the backward pass; this one by default.

        If `start` is a custom call, return one with another name of the copies. The compiler may merge two equal calls,
        and the second `join` would then find its copies already joined.
        """
        return self

    def route(self, topology: Topology) -> Route | None:
        """Return the route for copies started by a C++ planner; `None` (default) if a planner must not start them.

        `TwoPhase` uses it to plan and copy concurrently with its exchange home.

        Args:
            topology: topology of the layer; weights travel between the ranks of the expert axes.
        """
        del topology
        return None

    def max_incoming_replicas(self, replica_slots: int, num_home: int, domain: int) -> int:
        """Return the maximum number of replica gradients buffered at once on a rank while they return home.

        The simulator calls it. The count excludes the sums.

        Args:
            replica_slots: replica slots per rank.
            num_home: `L`, home experts per rank.
            domain: ranks per domain, the maximum number of replicas of a home expert.
        """
        return max_incoming_replicas(replica_slots, num_home, domain)

    @property
    def relay_options(self) -> tuple[int, int, int] | None:
        """`min_replicas`, `max_relays` and `min_gain` of relays, for the cost of plans; `None` (default) without."""
        return None

    @property
    def uses_copy_engines(self) -> bool:
        """Whether copy engines move the weights, concurrently with products; False by default.

        The simulator reads it.
        """
        return False


def joined(home: Experts, replicas: Experts) -> Experts:
    """Concatenate home experts and replicas into the weights of a rank's slots."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), home, replicas)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicas(replicate: Replicate, topology: Topology, experts: Experts, plan: Plan) -> Experts:
    # One loop around both calls under `vmap`: copies in progress belong to one `start` and one `join`.
    @jax.custom_batching.sequential_vmap
    def both(experts: Experts, plan: Plan) -> Experts:
        return replicate.join(replicate.start(experts, plan, topology), ())

    return both(experts, plan)


def _save(replicate: Replicate, topology: Topology, experts: Experts, plan: Plan) -> tuple[Experts, Plan]:
    return _replicas(replicate, topology, experts, plan), plan


def _backward(replicate: Replicate, topology: Topology, plan: Plan, upstream: Experts) -> tuple[Experts, None]:
    upstream = upstream.trained
    leaves, tree = jax.tree.flatten(upstream)
    zeros = jax.tree.unflatten(tree, zero_sums(tuple(leaves), plan.num_home))
    sums = replicate.add_at_home(zeros, upstream, plan, topology)
    return jax.tree.map(lambda total, kind: total.astype(kind.dtype), sums, upstream), None


_replicas.defvjp(_save, _backward)


@dataclass(frozen=True)
@checked_fields
class Gather(Replicate):
    """Replication by XLA collectives: every slot is copied from the home of the expert.

    It is the default and runs on all platforms, also between processes; see `collectives/expert_gather.py`. Use
    `PeerCopy` to overlap copies with the experts' products, and `Relay` for experts with many replicas.

    Examples:
        >>> from jax_moe_lb import System
        >>> from jax_moe_lb.balancers import Greedy
        >>> System(Greedy(), Gather(), replica_slots=2).replicate
        Gather()
    """

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Fetch the replicas; see `Replicate.start`.

        Raises:
            ValueError: `plan.relay` is set.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Gather copies every slot from home")
        wanted, inside = _of_domain(plan, topology)
        home, tree = jax.tree.flatten(experts)
        return jax.tree.unflatten(tree, fetch_all(tuple(home), wanted, plan.num_home, plan.domain, inside))

    def join(self, pending: Experts, after: PyTree) -> Experts:
        """Return the result of `start`."""
        del after
        return pending

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Add the gradients of all replicas at home; the order of additions depends on the plan only."""
        wanted, inside = _of_domain(plan, topology)
        leaves, tree = jax.tree.flatten(sums)
        kinds, group = tuple(jax.tree.leaves(gradients)), Group.of(inside)
        in_place = sends_in_place(kinds, inside)
        found = add_at_home(tuple(leaves), kinds, wanted, plan.num_home, plan.domain, group, in_place)
        return jax.tree.unflatten(tree, found)


@dataclass(frozen=True)
@checked_fields
class PeerCopy(Replicate):
    """Replication by copy engines: every slot is copied from the expert's home, or from the rank in `plan.relay`.

    Use it inside one NVLink domain, ideally with `TwoPhase`, whose home wave overlaps the copies. All weight arrays
    travel in one call; see `collectives/peer_copy.py`. The replicas equal those of `Gather`. Gradients are added by
    rank, then by slot.

    The ranks of a domain must be devices of one process, with one process for the whole group or one per node. On GPUs
    they can also be processes of one machine with one GPU each and memory shared by CUDA. In other cases, or without
    the custom calls, it falls back to `Gather` and ignores `plan.relay`.

    Args:
        timeout_s: timeout of waiting ranks in seconds; 120 by default. Then all ranks stop with an error naming the
            missing rank. Increase it for longer steps.
        chunk_bytes: bytes forwarded at once by a relay; 1 MiB by default. Smaller chunks reduce the latency of a chain
            of relays, and each costs a launch.
        site: name of these copies in messages, "PeerCopy" by default; use distinct names for several kinds of copies in
            one program.

    Examples:
        >>> from jax_moe_lb import System
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.transport import TwoPhase
        >>> System(FEPLB(), PeerCopy(timeout_s=60.0), TwoPhase(), replica_slots=4).replicate.uses_copy_engines
        True
    """

    timeout_s: float = 120.0
    chunk_bytes: int = 1 << 20
    site: str = "PeerCopy"

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending | Experts:
        """Begin the copies of the replicas; they may still be in progress on return. See `Replicate.start`."""
        route = self.route(topology)
        if not native_platforms(route):
            return Gather().start(experts, replace(plan, relay=None), topology)
        relay = None if plan.relay is None else _of_replicas(plan.relay, plan)
        return start(experts, _of_replicas(plan.placement, plan), relay, route=route)

    def join(self, pending: Pending | Experts, after: PyTree) -> Experts:
        """Wait for the copies, after `after` is computed."""
        return join(pending, after) if isinstance(pending, Pending) else pending

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Add the gradients of all replicas at home, by rank, then by slot, without relays.

        The order depends on the plan only, so equal gradients give equal bits in every run.
        """
        route = self.route(topology)
        if not native_platforms(route):
            return Gather().add_at_home(sums, gradients, plan, topology)
        leaves, tree = jax.tree.flatten(sums)
        wanted, kinds = _of_replicas(plan.placement, plan), tuple(jax.tree.leaves(gradients))
        return jax.tree.unflatten(tree, add_copies_at_home(tuple(leaves), kinds, wanted, plan.num_home, route))

    def route(self, topology: Topology) -> Route:
        """Return the route of the copies: all ranks if one process has them, otherwise the ranks of each domain.

        In the first case a C++ planner may start the copies.
        """
        together, domain = topology.ranks_per_process, topology.ranks_per_domain
        inside = None if together is None or together == topology.num_ranks else domain
        reach = None if together is None else together % domain == 0
        if reach is False and not topology.processes:
            warn_of_shared_processes()
        if reach is not False and not can_copy_inside():
            reach = False
        # The first call exchanges messages with the other processes, which trace the same program.
        apart = reach is False and topology.processes and can_copy(topology.processes, domain)
        processes = topology.processes if apart else ()
        options = self.site, self.timeout_s, self.chunk_bytes
        return Route(topology.expert_axes, *options, inside, reach, processes, topology.limited_routing)

    def again(self) -> "PeerCopy":
        """Return the same replication under another name: messages then name the pass in which ranks wait."""
        return replace(self, site=f"{self.site}, backward")

    @property
    def uses_copy_engines(self) -> bool:
        """True: products overlap with these copies."""
        return True


def _of_replicas(slots: Int[Array, "R S"], plan: Plan) -> Wanted:
    """Return the columns of the replica slots."""
    return slots[:, plan.num_home :]


def _of_domain(plan: Plan, topology: Topology) -> tuple[Wanted, Topology]:
    """Return the replicas of this rank's domain, numbered from its first expert, and the topology of the domain."""
    # Weights of a domain then travel over its links alone, by the exchange of its own ranks: on several nodes the
    # one-shot kernel in place of sends and receives, and on several TPU slices no transfer through hosts.
    wanted, inside = _of_replicas(plan.placement, plan), topology.inside(plan.domain)
    if inside is topology:
        return wanted, topology
    domain = jax.lax.axis_index(topology.expert_axes[: -len(inside.expert_axes)])
    return rows_of_domain(wanted, plan.num_home, domain, plan.domain), inside


@dataclass(frozen=True)
@checked_fields
class Relay(Replicate):
    """Replication by UltraEP's adaptive relays: some replicas of an expert forward its weights to the others.

    Use it inside one NVLink domain if single experts have four or more replicas; otherwise it equals `PeerCopy`.

    An expert with `n` replicas has at most `min(floor(sqrt(n)), max_relays, n - 1)` relays, on the ranks with the
    lowest fan-out so far; see `ffi/planning/relay.h`. All ranks derive the same trees from the placement. Slots have
    the same contents as with `PeerCopy`, and gradients have the same bits: they return home directly and are added by
    rank, then by slot. If `PeerCopy` falls back to `Gather`, there are no relays.

    Args:
        copies: transport of the copies; `PeerCopy()` by default.
        min_replicas: minimum number of replicas for relays, at least 2; 4 by default, as in the authors' code.
        max_relays: maximum number of relays of one expert; 8 by default, as in the authors' code.
        min_gain: minimum reduction of the copies of a tree's busiest sender, relative to home alone; 2 by default, as
            in the authors' code.

    Reference:
        UltraEP, arXiv 2606.04101. Unlike the authors' code, domains of 8 ranks or fewer use relays, too.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Plan
        >>> from jax_moe_lb.core import traffic
        >>> placement = np.full((8, 2), -1, np.int32)
        >>> placement[:, 0], placement[1:, 1] = np.arange(8), 0  # expert 0 has seven replicas
        >>> plan = Plan(placement, np.zeros((8, 8), np.int32), domain=8)
        >>> counts = np.zeros((8, 8), np.int32)
        >>> print(traffic(plan, counts).fan_out, traffic(Relay().plan(plan), counts).fan_out)
        [7 0 0 0 0 0 0 0] [2 3 2 0 0 0 0 0]
    """

    copies: PeerCopy = field(default_factory=PeerCopy)
    min_replicas: int = 4
    max_relays: int = 8
    min_gain: int = 2

    def __post_init__(self) -> None:
        # Imported lazily: UltraEP alone has relays.
        from jax_moe_lb.planners.relay import check_relay

        check_relay(self.min_replicas, self.max_relays, self.min_gain)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending | Experts:
        """Begin the copies, along relays.

        Raises:
            ValueError: `plan.relay` is set.
        """
        return self.copies.start(experts, self.plan(plan), topology)

    def join(self, pending: Pending | Experts, after: PyTree) -> Experts:
        """Wait for the copies, after `after` is computed."""
        return self.copies.join(pending, after)

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Add the gradients of all replicas at home, without relays."""
        return self.copies.add_at_home(sums, gradients, plan, topology)

    def plan(self, plan: Plan) -> Plan:
        """Return the plan with relays, derived from its placement and so equal on all ranks.

        Args:
            plan: plan without relays, equal on all ranks.

        Raises:
            ValueError: `plan.relay` is set.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Relay plans them. Use PeerCopy to keep them.")
        from jax_moe_lb.planners.relay import relay

        return replace(plan, relay=relay(plan.placement, plan.num_home, *self.relay_options))

    @property
    def relay_options(self) -> tuple[int, int, int]:
        """`min_replicas`, `max_relays` and `min_gain`."""
        return self.min_replicas, self.max_relays, self.min_gain

    @property
    def uses_copy_engines(self) -> bool:
        """Whether copy engines move the weights, as for `copies`: True."""
        return self.copies.uses_copy_engines

    def again(self) -> "Relay":
        """Return the same relays with copies of another name."""
        return replace(self, copies=self.copies.again())

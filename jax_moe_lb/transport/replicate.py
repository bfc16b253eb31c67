"""Replications: they fill slots with weights of other ranks' experts and sum gradients at home.

`Gather` copies weights directly from their homes by XLA's collectives. `PeerCopy` copies them without compute of the
source ranks. `Relay` copies along relays, so that the home of a hot expert sends few copies.
"""

import abc
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.expert_gather import Wanted, add_at_home, fetch, max_incoming_replicas, zero_sums
from jax_moe_lb.collectives.local_processes import can_copy
from jax_moe_lb.collectives.peer_copy import Pending, Route, add_copies_at_home, join, start
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.planners.relay import check_relay, relay


class Replicate(abc.ABC):
    """Moves the weights of experts into slots, and their gradients home.

    Write one when weights can travel in a better way than `Gather`'s. It is a frozen dataclass, because it is a static
    argument of `jax.jit`, and consists of three methods. `start` begins to copy, `join` waits for the copies, and
    `add_at_home` is the transpose of the two. Home experts never travel. With these three it serves every dispatch:
    one that plans and copies first (`Direct`), and one that computes between `start` and `join` (`TwoPhase`).
    `docs/extending.md` shows a whole one.

    Examples:
        >>> from jax_moe_lb.transport import Gather, PeerCopy, Relay
        >>> [kind().uses_copy_engines for kind in (Gather, PeerCopy, Relay)]
        [False, True, True]
    """

    @abc.abstractmethod
    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Any:
        """Begins to copy the replicas of a plan that has slots for them.

        It is not differentiated.

        Args:
            experts: the `L` home experts of this rank.
            plan: the plan, equal on all ranks; its placement says which expert every slot holds.
            topology: its expert axes are the ranks that weights travel between.

        Returns:
            What `join` needs; copies may still be under way.

        Raises:
            ValueError: the plan says something that this replication does not do.
        """

    @abc.abstractmethod
    def join(self, pending: Any, after: Any) -> Experts:
        """Returns the `S - L` replicas of this rank, once they are there; an empty slot is 0, or on GPUs anything.

        Args:
            pending: what `start` returned.
            after: a pytree of arrays that is computed before, beside the copies; `()` where there is nothing to wait
                for.
        """

    @abc.abstractmethod
    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas to those of their home experts: the transpose of `start` and `join`.

        Args:
            sums: the gradients of the `L` home experts of this rank, which others may follow that pass through, in the
                dtype in which sums are kept. Nobody needs them afterwards, so they can be changed in place.
            gradients: the gradients of the `S - L` replicas of this rank, in the dtype in which they shall travel.
            plan: the plan that `start` was given.
            topology: the topology that `start` was given.

        Returns:
            `sums` with what was added. Equal inputs must give equal bits: add in an order that depends on the plan
            alone.
        """

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Returns the weights of this rank's `S` slots: its home experts, then the replicas.

        It is differentiable in `experts`, by `add_at_home`.

        Args:
            experts: the `L` home experts of this rank.
            plan: the plan, equal on all ranks.
            topology: its expert axes are the ranks that weights travel between.
        """
        # Without replica slots there is no exchange that all ranks would have to take part in.
        if plan.slots == plan.num_home:
            return experts
        return joined(experts, _replicas(self, topology, experts, plan))

    def plan(self, plan: Plan) -> Plan:
        """Returns the plan with what this replication decides itself, such as relays; as it is, by default.

        The simulator asks for it, to know by which ranks weights travel.

        Args:
            plan: a legal plan with slots for replicas.
        """
        return plan

    def again(self) -> "Replicate":
        """Returns the replication that copies the same weights again in the backward pass; this one, by default.

        Where `start` is a custom call it must differ from this one, in the name of its copies for example: a compiler
        may take two equal calls for one, and then a `join` would find its copies joined already.
        """
        return self

    def route(self, topology: Topology) -> Route | None:
        """Says between whom a planner in C++ may copy as soon as it has a plan; `None`, the default: it may not.

        `TwoPhase` asks for it, to plan and copy beside its static wave.

        Args:
            topology: its expert axes are the ranks that weights travel between.
        """
        del topology
        return None

    def max_incoming_replicas(self, replica_slots: int, num_home: int, domain: int) -> int:
        """Counts the replicas whose gradients a rank has room for at once while they come home, beside the sums.

        The simulator asks for it.

        Args:
            replica_slots: the slots of each rank beyond its home experts.
            num_home: `L`.
            domain: how many ranks have replicas of a home expert at most.
        """
        return max_incoming_replicas(replica_slots, num_home, domain)

    @property
    def uses_copy_engines(self) -> bool:
        """Says whether copy engines move the weights, so that products run beside them; false by default.

        The simulator asks for it.
        """
        return False


def joined(home: Experts, replicas: Experts) -> Experts:
    """Puts the replicas of a rank after its home experts: the weights of its slots."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), home, replicas)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicas(replicate: Replicate, topology: Topology, experts: Experts, plan: Plan) -> Experts:
    # One loop around both calls where they are mapped over: copies under way belong to one `start` and one `join`.
    @jax.custom_batching.sequential_vmap
    def both(experts: Experts, plan: Plan) -> Experts:
        return replicate.join(replicate.start(experts, plan, topology), ())

    return both(experts, plan)


def _save(replicate: Replicate, topology: Topology, experts: Experts, plan: Plan) -> tuple[Experts, Plan]:
    return _replicas(replicate, topology, experts, plan), plan


def _backward(replicate: Replicate, topology: Topology, plan: Plan, upstream: Experts) -> tuple[Experts, None]:
    leaves, tree = jax.tree.flatten(upstream)
    zeros = jax.tree.unflatten(tree, zero_sums(tuple(leaves), plan.num_home))
    sums = replicate.add_at_home(zeros, upstream, plan, topology)
    return jax.tree.map(lambda total, kind: total.astype(kind.dtype), sums, upstream), None


_replicas.defvjp(_save, _backward)


@dataclass(frozen=True)
class Gather(Replicate):
    """Copies the expert of every slot from the expert's home.

    It is the default and runs everywhere, also between processes; `collectives/expert_gather.py` says how. Take
    `PeerCopy` where copies shall run beside the experts' products, and `Relay` where some experts have many replicas.

    Examples:
        >>> from jax_moe_lb import System
        >>> from jax_moe_lb.balancers import Greedy
        >>> System(Greedy(), Gather(), replica_slots=2).replicate
        Gather()
    """

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Fetches the replicas at once; see `Replicate.start`.

        Raises:
            ValueError: the plan asks for relays.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Gather copies every slot from home")
        wanted = plan.placement[:, plan.num_home :]
        axes, in_one_process = topology.expert_axes, topology.in_one_process
        return jax.tree.map(lambda home: fetch(home, wanted, plan.num_home, axes, in_one_process), experts)

    def join(self, pending: Experts, after: Any) -> Experts:
        """Returns what `start` returned."""
        del after
        return pending

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home, in an order that depends on the plan alone."""
        wanted = plan.placement[:, plan.num_home :]
        leaves, tree = jax.tree.flatten(sums)
        kinds, axes = tuple(jax.tree.leaves(gradients)), topology.expert_axes
        return jax.tree.unflatten(
            tree,
            add_at_home(tuple(leaves), kinds, wanted, plan.num_home, plan.domain, axes, topology.in_one_process),
        )


@dataclass(frozen=True)
class PeerCopy(Replicate):
    """Copies the expert of every slot from home, or from the rank that `plan.relay` names, on copy engines.

    Take it inside one NVLink domain, above all with `TwoPhase`, whose static wave hides the copies. All kinds of
    weights travel in one call; `collectives/peer_copy.py` says how. Copies equal those of `Gather`. Gradients are
    added by rank, then by slot.

    It works where the ranks of a domain are devices of one process, of one for the whole group or of one for each node;
    and on GPUs where they are processes of one machine with one GPU each, whose memory CUDA can share. Elsewhere, and
    where the custom calls were not built, it is `Gather`, and `plan.relay` changes nothing.

    Args:
        timeout_s: how long ranks wait for one that does not come, in seconds, before all stop with an error that
            names it. The default is 120; a step that legitimately takes longer needs more.
        chunk_bytes: what a relay forwards at once, in bytes. Small chunks reach the end of a chain of relays sooner,
            and each costs a launch; 1 MiB is the default.
        site: what messages call these copies; give another name where one program has several kinds.

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

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies of the replicas; they may still be under way when it returns. See `Replicate.start`."""
        relay = None if plan.relay is None else _of_replicas(plan.relay, plan)
        return start(experts, _of_replicas(plan.placement, plan), relay, route=self.route(topology))

    def join(self, pending: Pending, after: Any) -> Experts:
        """Waits for the copies, after `after` has been computed."""
        return join(pending, after)

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home, by rank, then by slot, whatever the relays.

        That order depends on the plan alone, so equal gradients give equal bits in every run.
        """
        leaves, tree = jax.tree.flatten(sums)
        wanted, kinds = _of_replicas(plan.placement, plan), tuple(jax.tree.leaves(gradients))
        return jax.tree.unflatten(
            tree, add_copies_at_home(tuple(leaves), kinds, wanted, plan.num_home, self.route(topology))
        )

    def route(self, topology: Topology) -> Route:
        """Says who copies from each other: all ranks where one process has them, else those of each domain.

        In the first case a planner in C++ may start the copies itself.
        """
        together, domain = topology.ranks_per_process, topology.ranks_per_domain
        inside = None if together is None or together == topology.num_ranks else domain
        reach = None if together is None else together % domain == 0
        # Asked of the other processes the first time, which trace the same program.
        apart = reach is False and topology.processes and can_copy(topology.processes, domain)
        processes = topology.processes if apart else ()
        return Route(topology.expert_axes, self.site, self.timeout_s, self.chunk_bytes, inside, reach, processes)

    def again(self) -> "PeerCopy":
        """Returns the same under another name: messages then say in which pass ranks wait."""
        return replace(self, site=f"{self.site}, backward")

    @property
    def uses_copy_engines(self) -> bool:
        """Says yes: products run beside these copies."""
        return True


def _of_replicas(slots: Int[Array, "R S"], plan: Plan) -> Wanted:
    """Cuts out the columns of the slots beyond the home experts."""
    return slots[:, plan.num_home :]


@dataclass(frozen=True)
class Relay(Replicate):
    """Plans UltraEP's adaptive relays (arXiv 2606.04101): of an expert's many replicas, some forward it to the others.

    Take it inside one NVLink domain where single experts have four replicas or more; elsewhere it does what `PeerCopy`
    does.

    With `n` replicas these are `min(floor(sqrt(n)), max_relays, n - 1)`, on the ranks that send least so far; see
    `ffi/planning/relay.h`. All ranks plan the same trees from the placement. Slots hold what `PeerCopy` alone would
    put there, and gradients have the same bits: they return home directly, and are added by rank, then by slot.

    Where `PeerCopy` is `Gather`, there are no relays.

    It deviates from the authors' code in that it does not stop to use relays in domains of 8 ranks or less.

    Args:
        copies: makes the copies, and forwards them.
        min_replicas: an expert with fewer replicas is copied from home; at least 2. The authors' code has 4.
        max_relays: the most relays of one expert; 8 in the authors' code.
        min_gain: how many copies fewer the busiest sender of a tree must send than home alone would; 2 in the
            authors' code.

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
        check_relay(self.min_replicas, self.max_relays, self.min_gain)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies, along relays.

        Raises:
            ValueError: the plan has relays already.
        """
        return self.copies.start(experts, self.plan(plan), topology)

    def join(self, pending: Pending, after: Any) -> Experts:
        """Waits for the copies, after `after` has been computed."""
        return self.copies.join(pending, after)

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home: they return straight there, without relays."""
        return self.copies.add_at_home(sums, gradients, plan, topology)

    def plan(self, plan: Plan) -> Plan:
        """Returns the plan with relays, which follow from its placement alone, so that all ranks plan the same.

        Args:
            plan: a plan without relays, equal on all ranks.

        Raises:
            ValueError: it has relays already.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Relay plans them; PeerCopy takes them as they are")
        options = self.min_replicas, self.max_relays, self.min_gain
        return replace(plan, relay=relay(plan.placement, plan.num_home, *options))

    @property
    def uses_copy_engines(self) -> bool:
        """Says whether copy engines move the weights, which is up to `copies`: yes."""
        return self.copies.uses_copy_engines

    def again(self) -> "Relay":
        """Returns the same relays over copies of another name."""
        return replace(self, copies=self.copies.again())

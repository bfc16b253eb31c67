"""A replication fills slots with the weights of other ranks' experts, and brings their gradients home."""

import abc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops._peer import Route
from jax_moe_lb.ops.arrivals import room_at_home, zero_sums
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology


class Replicate(abc.ABC):
    """Moves the weights of experts into slots, and their gradients home.

    Write one when weights can travel in a better way than `Gather`'s. It is a frozen dataclass, because it is a static
    argument of `jax.jit`, and consists of three methods. `start` begins to copy, `join` waits for the copies, and
    `add_at_home` is the transpose of the two. Home experts never travel. With these three it serves every dispatch:
    one that plans and copies first (`Direct`), and one that computes between `start` and `join` (`TwoPhase`).
    `docs/extending.md` shows a whole one.

    Examples:
        >>> from jax_moe_lb import Gather, PeerCopy, Relay
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

    def room_at_home(self, replica_slots: int, num_home: int, domain: int) -> int:
        """Counts the replicas whose gradients a rank has room for at once while they come home, beside the sums.

        The simulator asks for it.

        Args:
            replica_slots: the slots of each rank beyond its home experts.
            num_home: `L`.
            domain: how many ranks have replicas of a home expert at most.
        """
        return room_at_home(replica_slots, num_home, domain)

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

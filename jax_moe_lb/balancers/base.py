"""Interface and composition of balancers, and plain expert parallelism.

A balancer edits a `Plan`. `LayerCost` has the sizes of the layer, from which balancers derive default costs.
"""

import abc
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jax_moe_lb.core.checks import Count, Natural, NonNegative, checked_fields
from jax_moe_lb.core.native_planner import NativePlanner
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.plan_file import ARRAYS
from jax_moe_lb.core.stats import HostErrors
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, iota, namespace
from jax_moe_lb.core.validation import fallback_to_plain


@dataclass(frozen=True)
@checked_fields
class LayerCost:
    """Sizes of a layer, from which a balancer derives unset options.

    `moe` constructs one from its arguments and passes it to `Balancer.sized`. Construct one to plan for a layer outside
    `moe`. `None` marks an unknown size.

    Args:
        num_copies: `T * K`, token copies per rank.
        expert_bytes: bytes of the transferred weights of one expert.
        gradient_bytes: bytes of the gradients of one expert.
        token_bytes: bytes of one transferred token copy.
        token_flops: forward floating-point operations per token copy in the expert, twice the parameters of the expert.
        between_s: seconds of the forward pass between the experts of two layers, such as attention. Gradients of
            replicas travel beside twice this time.
        slot_copies: time of the products of a slot beyond its tokens, in token copies.
        max_rows: maximum number of token copies that a rank can serve, in all its rounds; `None` for any number.
        round_rows: token copies that a rank serves in one round; `None` for any number.
        round_s: seconds per round after the first beyond its token copies.
        relays: `min_replicas`, `max_relays` and `min_gain` of `transport.Relay`, which forwards weights of replicas;
            `None` if all copies come from home.
        device: kind of the device of the ranks, a file of `core/devices`; `None` if it has no rates.

    Examples:
        >>> from jax_moe_lb.balancers import LayerCost, UltraEP
        >>> UltraEP().sized(LayerCost(num_copies=8192 * 8)).min_tokens
        1024
    """

    num_copies: Natural
    expert_bytes: Natural | None = None
    gradient_bytes: Natural | None = None
    token_bytes: Natural | None = None
    token_flops: Natural | None = None
    between_s: NonNegative | None = None
    slot_copies: Natural | None = None
    max_rows: Natural | None = None
    round_rows: Count | None = None
    round_s: NonNegative | None = None
    relays: tuple[int, int, int] | None = None
    device: str | None = None


class Balancer(abc.ABC):
    """Base class of strategies deciding which rank serves which tokens.

    Subclass it for a new rule; `docs/extending.md` has a complete example. A balancer is a frozen dataclass: its fields
    are its hyper-parameters, and it is a static argument of `jax.jit`. All ranks call it with the same arguments and
    must get the same plan. Planning therefore uses integers, and ties go to the lowest index. Only `rebalance` is
    required.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Greedy
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[8, 0, 1, 1], [8, 0, 1, 1]], np.int32)
        >>> topology, balancer = Topology.flat(2), Greedy()
        >>> start = plain_plan(counts, topology, slots=3)
        >>> plan, state = balancer.rebalance(counts, start, topology, balancer.init(counts.shape))
        >>> print(load(start), load(plan))
        [16  4] [10 10]
    """

    def init(self, counts_shape: tuple[int, int]) -> State:
        """Return the state before the first step; `()` by default, for balancers without history.

        Args:
            counts_shape: `(R, E)`, the shape of the counts passed to `rebalance`.

        Returns:
            Any pytree of arrays.
        """
        del counts_shape
        return ()

    def sized(self, facts: LayerCost) -> "Balancer":
        """Return the balancer with unset options derived from a layer; itself by default.

        `moe` calls it once, at trace time.

        Args:
            facts: sizes of the layer.

        Returns:
            A balancer of the same class.
        """
        del facts
        return self

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Return the reason why the balancer cannot change any plan on these ranks; `None` if it can.

        `nn.MoE` warns with it. By default a balancer needs domains of several ranks and slots for replicas.

        Args:
            topology: topology of the group.
            num_home: `L`, home experts per rank.
            slots: `S`, slots per rank.
        """
        if topology.ranks_per_domain == 1:
            return "domains have one rank each, so no expert can move"
        return "replica_slots is 0" if slots == num_home else None

    def bound(self, topology: Topology, num_home: int, slots: int) -> float:
        """Return an upper bound on the imbalance after this balancer; by default `R`, all tokens on one rank.

        `System.max_rounds_bound` uses it.

        Args:
            topology: topology of the group.
            num_home: `L`, home experts per rank.
            slots: `S`, slots per rank.
        """
        del num_home, slots
        return float(topology.num_ranks)

    @abc.abstractmethod
    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Edit the plan for this microbatch.

        Args:
            counts: `[R, E]` int32, the token copies by source rank and expert; a NumPy array on the host,
                traced in a program.
            plan: plan legal for `counts`; plain expert parallelism unless another balancer came first.
            topology: topology of the group, with the domains and nodes.
            state: result of `init` or of the previous call.

        Returns:
            A plan of the same shapes, legal for `counts` (see `check_plan`), and the new state.
        """

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Return the experts movable by `rebalance`, before it runs; all by default.

        All other experts are static: all their tokens are served at home. A plan that moves one is a fault.

        Args:
            plan: plan passed to `rebalance` later.

        Returns:
            `[E]` bool, True for dynamic experts.
        """
        return jnp.ones(plan.num_experts, bool)

    def busiest_moved(self, num_home: int) -> int | None:
        """Return the number of busiest experts of a rank that may move, if they move busiest first.

        `TwoPhase` then puts the rows of these experts last, and the rows that stay need no copy. It leaves at home the
        rows of plans in another order. `None` (default) if experts move in any order.

        Args:
            num_home: `L`, home experts per rank.
        """
        del num_home
        return None

    def native_planner(self, domain: int) -> NativePlanner | None:
        """Return the C++ planner equivalent to `rebalance`; `None` (default) if there is none.

        With it, the host can plan while a GPU computes; see `collectives/plan_and_copy.py`.

        Args:
            domain: ranks per domain of the plan.
        """
        del domain
        return None

    @property
    def host_errors(self) -> tuple[HostErrors, ...]:
        """Planners called on the host, which have the errors behind illegal plans; none by default."""
        return ()


@dataclass(frozen=True)
@checked_fields
class Chain(Balancer):
    """Sequence of balancers, each editing the plan of the predecessor.

    Use it to combine papers, such as `HybridEP` between datacenters, `UltraEP` inside them and `RailS` for the rails.

    Args:
        balancers: the balancers, in order of application. Balancers planning from the counts alone, such as `Exact`,
            come before those refining a plan; `RailS` comes last.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Greedy, HybridEP
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[9, 1, 1, 1], [9, 1, 1, 1], [9, 1, 1, 1], [9, 1, 1, 1]], np.int32)
        >>> topology = Topology.flat(4)
        >>> chain = Chain((HybridEP(domain_size=2), Greedy()))
        >>> plan, _ = chain.rebalance(counts, plain_plan(counts, topology, 3), topology, chain.init(counts.shape))
        >>> print(load(plan))
        [20 20  4  4]
    """

    balancers: tuple[Balancer, ...]

    def init(self, counts_shape: tuple[int, int]) -> tuple[State, ...]:
        """Return a tuple with the initial state per balancer."""
        return tuple(balancer.init(counts_shape) for balancer in self.balancers)

    def sized(self, facts: LayerCost) -> "Chain":
        """Return the chain of the sized balancers."""
        return Chain(tuple(balancer.sized(facts) for balancer in self.balancers))

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Return the first reason of the balancers; `None` if there is none."""
        reasons = (balancer.no_op_reason(topology, num_home, slots) for balancer in self.balancers)
        return next((reason for reason in reasons if reason), None)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Apply the balancers in order, each to the plan of the predecessor; see `Balancer.rebalance`.

        In a program, an illegal plan of a balancer is the result, and the later ones get the plain plan.
        """
        states, checked = [], []
        if not state and jax.tree.leaves(state := self.init(counts.shape)):
            raise ValueError("state is (); expected the result of init, as a balancer of the chain has a state")
        # Keep one state per balancer: the structure is then equal in all steps, as required by the carry of a scan.
        for balancer, before in zip(self.balancers, state, strict=True):
            plan, after = balancer.rebalance(counts, plan, topology, before)
            states.append(after)
            if len(states) < len(self.balancers) and namespace(counts) is not np:
                # The custom call of a planner would stop the program on an illegal plan.
                safe, is_legal = fallback_to_plain(plan, counts)
                checked.append((plan, is_legal))
                plan = safe
        for made, is_legal in reversed(checked):
            plan = _legal_or(made, is_legal, plan)
        return plan, tuple(states)

    @property
    def host_errors(self) -> tuple[HostErrors, ...]:
        """Errors of all balancers, in order."""
        return tuple(planner for balancer in self.balancers for planner in balancer.host_errors)


def _legal_or(made: Plan, is_legal: Bool[Array, ""], plan: Plan) -> Plan:
    """Return `plan` if `made`, the plan of an earlier balancer, is legal; else `plan` with the arrays of `made`."""
    fields = [name for name in ARRAYS if getattr(plan, name) is not None and getattr(made, name) is not None]
    chosen: dict[str, Any] = {name: jnp.where(is_legal, getattr(plan, name), getattr(made, name)) for name in fields}
    return replace(plan, **chosen)


@dataclass(frozen=True)
@checked_fields
class Plain(Balancer):
    """Plain expert parallelism: every expert is served at home.

    Use it for balanced routing, or as the baseline of a comparison.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Plain
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[4, 0, 0, 0], [3, 1, 0, 0], [2, 1, 1, 0], [1, 0, 3, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = Plain().rebalance(counts, plain_plan(counts, topology), topology, ())
        >>> print(load(plan))
        [10  2  4  0]
    """

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> None:
        """Return `None`: leaving the plan unchanged is intended."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Return the plan unchanged."""
        del counts, topology
        return plan, state

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Return the experts already served by replicas of another balancer (`Chain`)."""
        expert = iota(plan.num_experts)
        return jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > plan.quota[expert, expert // plan.num_home]

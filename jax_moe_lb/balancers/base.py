"""The interface of balancers, their composition, and plain expert parallelism.

A balancer edits a `Plan`. `LayerCost` has the sizes of the layer, from which balancers derive costs.
"""

import abc
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, iota
from jax_moe_lb.planners.base import NativePlanner


@dataclass(frozen=True)
class LayerCost:
    """These are facts of a layer, from which a balancer derives what the user left to it.

    `moe` makes one from its arguments and gives it to `Balancer.sized`; do so yourself where you plan for a layer that
    is not there. `None` stands for what is not known.

    Args:
        num_copies: `T * K`, the token copies of a rank.
        expert_bytes: the weights of one expert as they travel, in bytes.
        gradient_bytes: its gradients, in bytes.
        token_bytes: one token copy as it travels, in bytes.
        token_flops: what one token copy costs in its expert forward, in floating-point operations: twice the expert's
            parameters.

    Examples:
        >>> from jax_moe_lb.balancers import LayerCost, UltraEP
        >>> UltraEP().sized(LayerCost(num_copies=8192 * 8)).min_tokens
        1024
    """

    num_copies: int
    expert_bytes: int | None = None
    gradient_bytes: int | None = None
    token_bytes: int | None = None
    token_flops: int | None = None


class Balancer(abc.ABC):
    """Decides who serves which tokens.

    Write one when you have another rule; `docs/extending.md` shows a whole one. It is a frozen dataclass: its fields
    are its hyper-parameters, and it is a static argument of `jax.jit`. All ranks call it with the same arguments and
    must get the same plan: integers in, integers out, and ties go to the lowest index. `rebalance` is all that it must
    have. The other methods say what it does not need, so that more can happen before there is a plan.

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
        """Returns what it remembers before the first step; `()` unless it keeps history.

        Args:
            counts_shape: `(R, E)`, the shape of the counts that `rebalance` will get.

        Returns:
            Any pytree of arrays.
        """
        del counts_shape
        return ()

    def sized(self, facts: LayerCost) -> "Balancer":
        """Returns the balancer for a layer: what the user left to be derived has a value in it; itself by default.

        `moe` asks for it once, when a program is traced.

        Args:
            facts: those of the layer.
        """
        del facts
        return self

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Says why it cannot change anything on these ranks; `None` if it can. `nn.MoE` warns of it.

        By default a balancer needs slots for replicas.

        Args:
            topology: the ranks and domains.
            num_home: `L`, the home experts of a rank.
            slots: `S`, the slots of a rank.
        """
        if topology.ranks_per_domain == 1:
            return "domains have one rank each, so that no expert may move"
        return "replica_slots is 0" if slots == num_home else None

    def bound(self, topology: Topology, num_home: int, slots: int) -> float:
        """Returns an imbalance that no routing exceeds after it; by default that of all tokens on one rank.

        `System.max_rounds_bound` asks for it.

        Args:
            topology: the ranks and domains.
            num_home: `L`, the home experts of a rank.
            slots: `S`, the slots of a rank.
        """
        del num_home, slots
        return float(topology.num_ranks)

    @abc.abstractmethod
    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Edits the plan for this microbatch.

        Args:
            counts: `[R, E]` int32, the token copies that each rank routes to each expert; NumPy's on a host, traced in
                a program.
            plan: a plan that is legal for `counts`; that of plain expert parallelism unless another balancer came
                first.
            topology: it says which ranks share a domain, and which a node.
            state: what `init` or the last call returned.

        Returns:
            A plan of the same shapes, legal for `counts` (see `check_plan`), and the new state.
        """

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Says which experts `rebalance` may take from home, before it runs; all, unless a balancer says otherwise.

        The others are static: all their tokens are served at home, and `TwoPhase` needs no plan to serve those.

        Args:
            plan: the plan that `rebalance` will be given.
        """
        return jnp.ones(plan.num_experts, bool)

    def native_planner(self, domain: int) -> NativePlanner | None:
        """Returns the planner in C++ that `rebalance` applies to a plan, if it does nothing else; else `None`.

        With it the plan can be made on the host while a GPU computes; see `collectives/plan_and_copy.py`.

        Args:
            domain: how many ranks a domain of the plan has.
        """
        del domain
        return None

    @property
    def needs_counts(self) -> bool:
        """Says whether the placement depends on the load; true, unless a balancer says otherwise.

        Where it does not, no planner has to run between router and dispatch, and weights can travel before tokens are
        known. The simulator asks for it.
        """
        return True


@dataclass(frozen=True)
class Chain(Balancer):
    """Runs balancers one after the other, each on the plan that the last one left.

    Use it to combine papers: experts that travel between datacenters, level loads inside them, tokens on all rails.

    Args:
        balancers: the balancers, in the order in which they edit the plan. One that plans from the counts alone, as
            `Exact` does, belongs before those that refine a plan, and `RailS` belongs last.

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
        """Returns one state per balancer, in their order."""
        return tuple(balancer.init(counts_shape) for balancer in self.balancers)

    def sized(self, facts: LayerCost) -> "Chain":
        """Returns the chain of all of them for this layer."""
        return Chain(tuple(balancer.sized(facts) for balancer in self.balancers))

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Says why the first of them that cannot change anything cannot."""
        reasons = (balancer.no_op_reason(topology, num_home, slots) for balancer in self.balancers)
        return next((reason for reason in reasons if reason), None)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Asks every balancer in turn, each for an edit of the plan that the last one left."""
        states = []
        # Each keeps its own state, so that the chain's has the same structure in every step and fits a scan's carry.
        for balancer, before in zip(self.balancers, state, strict=True):
            plan, after = balancer.rebalance(counts, plan, topology, before)
            states.append(after)
        return plan, tuple(states)

    @property
    def needs_counts(self) -> bool:
        """Says whether the placement of any of them depends on the load."""
        return any(balancer.needs_counts for balancer in self.balancers)


@dataclass(frozen=True)
class Plain(Balancer):
    """Serves every expert at home.

    Use it where routing is balanced, or as the baseline of a comparison.

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
        """Says nothing: nobody expects it to change anything."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Returns the plan as it is."""
        del counts, topology
        return plan, state

    @property
    def needs_counts(self) -> bool:
        """It is false: nothing moves, whatever the load."""
        return False

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Names only the experts that replicas of another balancer (`Chain`) serve already."""
        expert = iota(plan.num_experts)
        return jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > plan.quota[expert, expert // plan.num_home]

"""What a balancer is: it edits the plan, and nothing else."""

import abc
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.native import NativePlanner
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, State


class Balancer(abc.ABC):
    """Decides who serves which tokens.

    A balancer is a frozen dataclass: its fields are its hyper-parameters, and it is a
    static argument of `jax.jit`. All ranks call it with the same arguments and must get
    the same plan: integers in, integers out, ties to the lowest index.
    """

    def init(self, counts_shape: tuple[int, int]) -> State:
        """What it remembers before the first step, for `[R, E]` counts; `()` unless it keeps history."""
        del counts_shape
        return ()

    @abc.abstractmethod
    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Edits the plan for this microbatch.

        Args:
            counts: `[R, E]`, its exact load.
            plan: legal for `counts`; that of plain expert parallelism unless another balancer came first.
            topology: ranks and domains.
            state: of `init`, or what the last call returned.

        Returns:
            A plan of the same shapes, legal for `counts` (see `check_plan`), and the new state.
        """

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Which experts `rebalance` may take from home, known before it runs.

        The others are static: all their tokens are served at home. `Staged` needs no plan to send those. All experts
        are dynamic unless a balancer says otherwise.

        Args:
            plan: what `rebalance` will be given.
        """
        return jnp.ones(plan.num_experts, bool)

    def native_planner(self, domain: int) -> NativePlanner | None:
        """The planner that `rebalance` applies to placement and quota, if it does nothing else.

        With it the plan can be made on the host while a GPU computes; see `ops/plan_and_copy.py`.

        Args:
            domain: of the plan.
        """
        del domain
        return None


@dataclass(frozen=True)
class Chain(Balancer):
    """Balancers one after the other, each on the plan that the last one left."""

    balancers: tuple[Balancer, ...]

    def init(self, counts_shape: tuple[int, int]) -> tuple[State, ...]:
        """One state per balancer."""
        return tuple(balancer.init(counts_shape) for balancer in self.balancers)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Every balancer in turn."""
        states = []
        for balancer, before in zip(self.balancers, state, strict=True):
            plan, after = balancer.rebalance(counts, plan, topology, before)
            states.append(after)
        return plan, tuple(states)

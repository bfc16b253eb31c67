"""What a plan costs beside what it saves, in seconds, at the rates of a topology."""

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.plan import IntScalar, Plan, load
from jax_moe_lb.core.topology import INT32_MAX, Level, Topology
from jax_moe_lb.core.types import AnyArray, host_iota, namespace

if TYPE_CHECKING:
    Answer = Any
else:
    Answer = Bool[AnyArray, ""] | np.bool_
    """An array in a jitted program, a NumPy number on a host."""


@dataclass(frozen=True)
class Cost:
    """Models what a plan costs beside what it saves: the layer waits for its busiest rank, and for replicas, which
    travel.

    Give it to `Exact(cost=...)` where routing is nearly balanced for long, or links are slow, so that plans that do not
    pay are left alone.

    A plan takes `max(load)` token copies of `token_s` each, and as many replicas of `replica_s` each as the busiest
    rank sends or receives, whichever are more; a rank sends and receives at the same time. Whether another plan is
    better is a comparison of integers: token copies saved, with `min_saved` for as many replicas more. So all ranks,
    and NumPy and jitted programs, decide alike.

    Rates come from the topology: `flops_per_s`, and the lowest `bytes_per_s` of the levels that a domain spans.

    Args:
        expert_bytes: what one replica moves, in bytes: the weights of an expert, and in training its gradients, and the
            weights once more if they travel again for the backward pass. `None`, the default, takes these three for the
            experts of the layer.
        token_flops: what one token copy costs the rank that serves it, in floating-point operations: twice the expert's
            parameters forward, and in training, forward and backward, three times that, which `None`, the default, is.
        planner_s: the seconds that the layer waits for the planner; 0, the default, if it plans beside other work.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Cost, Topology
        >>> from jax_moe_lb.balancers import Exact
        >>> from jax_moe_lb.core import Level, load, plain_plan
        >>> topology = Topology((Level("gpu", 4, bytes_per_s=450e9),), ranks_per_domain=4, flops_per_s=500e12)
        >>> numbers = 3.0 * 6144 * 2048  # of one expert
        >>> balancer = Exact(cost=Cost(expert_bytes=2 * numbers, token_flops=2 * numbers))
        >>> counts = np.array([[3, 4, 2, 1], [3, 4, 2, 1], [3, 4, 2, 2], [3, 3, 1, 2]], np.int32)
        >>> for scale in (1, 1000):
        ...     start = plain_plan(counts * scale, topology, slots=2)
        ...     print(load(balancer.rebalance(counts * scale, start, topology, ())[0]))
        [12 15  7  6]
        [10000 10000 10000 10000]
    """

    expert_bytes: float | None = None
    token_flops: float | None = None
    planner_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("expert_bytes", self.expert_bytes), ("token_flops", self.token_flops)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number above 0")
        if not 0 <= self.planner_s < math.inf:
            raise ValueError(f"planner_s is {self.planner_s}; expected a finite number, at least 0")

    def sized(self, facts: LayerCost) -> "Cost":
        """Returns the costs of training a layer, where none were given."""
        expert_bytes, token_flops = self.expert_bytes, self.token_flops
        if expert_bytes is None and facts.expert_bytes is not None:
            expert_bytes = float(2 * facts.expert_bytes + (facts.gradient_bytes or facts.expert_bytes))
        if token_flops is None and facts.token_flops is not None:
            token_flops = float(3 * facts.token_flops)
        return replace(self, expert_bytes=expert_bytes, token_flops=token_flops)

    def may_pay(self, plan: Plan, topology: Topology) -> Answer:
        """Says whether to plan at all: whether a plan at the mean, with one replica, would make up for its planner.

        Args:
            plan: the plan as it is.
            topology: its rates are those of the model.

        Returns:
            A boolean scalar. False means that no plan of these slots saves what the planner alone takes.

        Raises:
            ValueError: the topology lacks a rate.
        """
        # Without replicas nothing is saved, unless those that there are may go.
        there = busiest(plan)
        replicas = namespace(plan.quota).where(there == 0, np.int32(1), -there)
        return load(plan).max() - lowest_max_load(plan) >= self._min_saved(replicas, plan, topology, self.planner_s)

    def pays(self, plan: Plan, other: Plan, topology: Topology) -> Answer:
        """Says whether `other` takes less time than `plan`. Its planner has run, so that it costs nothing any more.

        Args:
            plan: the plan as it is.
            other: the plan that may take its place, for the same counts.
            topology: its rates are those of the model.

        Returns:
            A boolean scalar.

        Raises:
            ValueError: the topology lacks a rate.
        """
        replicas = busiest(other) - busiest(plan)
        return load(plan).max() - load(other).max() >= self._min_saved(replicas, plan, topology)

    def _min_saved(self, replicas: IntScalar, plan: Plan, topology: Topology, once_s: float = 0.0) -> IntScalar:
        """The fewest token copies that are worth more than so many replicas and a time."""
        expert_bytes = _known("expert_bytes", self.expert_bytes)
        token_flops = _known("token_flops", self.token_flops)
        replica_s = expert_bytes / slowest_bytes_per_s(topology, plan.domain)
        token_s = token_flops / _rate("Topology.flops_per_s", topology.flops_per_s)
        most = plan.domain * (plan.slots - plan.num_home)  # all replicas of a domain, sent by one rank
        # Worked out here in Python, once, and looked up in the program: floating point there may round differently on
        # different devices, and ranks that decided differently would wait for each other.
        table = [min_saved(once_s + number * replica_s, token_s) for number in range(-most, most + 2)]
        return namespace(plan.quota).asarray(np.array(table, np.int32))[replicas + most]


def min_saved(cost_s: float, token_s: float) -> int:
    """Returns the fewest token copies of `token_s` seconds each that are worth more than `cost_s` seconds, within
    int32.
    """
    # Rates can be such that a token costs no time at all.
    worth = cost_s / max(token_s, sys.float_info.min)
    return math.floor(min(max(worth, -INT32_MAX), INT32_MAX - 1)) + 1


def slowest_bytes_per_s(topology: Topology, domain: int) -> float:
    """Returns what a rank can send to any other of its domain, in bytes per second.

    Args:
        topology: its levels have the rates.
        domain: how many ranks a domain has.

    Raises:
        ValueError: a level inside the domain has no rate.
    """
    rates, inner = [math.inf], 1
    for level in reversed(topology.levels):
        if inner < domain and level.size > 1:
            rates.append(_rate(_name(level), level.bytes_per_s))
        inner *= level.size
    return min(rates)


def busiest(plan: Plan) -> IntScalar:
    """Returns how many replicas some rank sends or receives at most, as an int32 scalar."""
    replicas = plan.placement[:, plan.num_home :]
    received = (replicas >= 0).sum(1, dtype=np.int32).max()
    homes = namespace(plan.quota).where(replicas >= 0, replicas // np.int32(plan.num_home), np.int32(-1))
    sent = (homes[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32).max()
    return namespace(plan.quota).maximum(received, sent)


def lowest_max_load(plan: Plan) -> IntScalar:
    """Returns what no plan of these domains gets below: the mean of the busiest domain, rounded up."""
    tokens = load(plan).reshape(-1, plan.domain).sum(1, dtype=np.int32).max()
    return (tokens - np.int32(1)) // np.int32(plan.domain) + np.int32(1)


def _known(name: str, value: float | None) -> float:
    if value is None:
        raise ValueError(f"Cost.{name} is None; expected a number off any layer, which would say it")
    return value


def _name(level: Level) -> str:
    return f"Level({level.name!r}).bytes_per_s"


def _rate(name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise ValueError(f"{name} is {value}; expected a finite rate: a cost model compares times")
    return value

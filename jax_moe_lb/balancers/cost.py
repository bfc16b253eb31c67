"""Cost model weighing the replicas of a plan against the tokens saved, in seconds."""

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import IntScalar, Plan, load
from jax_moe_lb.core.topology import INT32_MAX, Level, Topology
from jax_moe_lb.core.types import AnyArray, host_iota, namespace

if TYPE_CHECKING:
    Answer = Any
else:
    Answer = Bool[AnyArray, ""] | np.bool_
    """Boolean array in a jitted program, NumPy boolean on the host."""


@dataclass(frozen=True)
@checked_fields
class Cost:
    """Time model of a plan: the load of the busiest rank and the transfer of replicas.

    Pass it to `Exact(cost=...)` if routing is often nearly balanced or links are slow. `Exact` then keeps the old plan
    if the new one does not save time.

    A plan takes `max(load)` times `token_s` seconds, plus `busiest` times `replica_s` seconds. `busiest` is the maximum
    number of replicas sent or received by one rank, because a rank sends and receives at the same time. The comparison
    of two plans uses integers: the token copies saved against a precomputed minimum per number of further replicas
    (`min_saved`). All ranks, in NumPy and in jitted programs, therefore decide equally.

    The rates come from the topology: `flops_per_s`, and the lowest `bytes_per_s` of the levels spanned by a domain.

    Args:
        expert_bytes: bytes moved per replica: the weights of an expert and, in training, its gradients. If weights are
            transferred again for the backward pass, they count twice. `None` (default) takes these three for the
            experts of the layer.
        token_flops: floating-point operations per token copy: twice the parameters of the expert for the forward pass,
            and three times as many for training. `None` (default) takes the operations of training.
        planner_s: seconds the layer waits for the planner; 0 (default) if planning overlaps with other work.

    Raises:
        ValueError: `expert_bytes` or `token_flops` is not positive and finite, or `planner_s` is negative or infinite.

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
        """Return the cost with unset sizes derived from training the layer.

        Args:
            facts: sizes of the layer.
        """
        expert_bytes, token_flops = self.expert_bytes, self.token_flops
        if expert_bytes is None and facts.expert_bytes is not None:
            expert_bytes = float(2 * facts.expert_bytes + (facts.gradient_bytes or facts.expert_bytes))
        if token_flops is None and facts.token_flops is not None:
            token_flops = float(3 * facts.token_flops)
        return replace(self, expert_bytes=expert_bytes, token_flops=token_flops)

    def may_pay(self, plan: Plan, topology: Topology) -> Answer:
        """Return whether the best possible plan would save more time than its planner and one replica take.

        The best possible plan brings the busiest rank to the mean. If False, no plan in these slots pays for its
        planner.

        Args:
            plan: the current plan.
            topology: topology with the rates.

        Returns:
            Boolean scalar.

        Raises:
            ValueError: the topology lacks a rate, or a size is `None`.
        """
        # Without replicas a plan saves no tokens, unless existing replicas can be removed.
        there = busiest(plan)
        replicas = namespace(plan.quota).where(there == 0, np.int32(1), -there)
        return load(plan).max() - lowest_max_load(plan) >= self._min_saved(replicas, plan, topology, self.planner_s)

    def pays(self, plan: Plan, other: Plan, topology: Topology) -> Answer:
        """Return whether `other` takes less time than `plan`, excluding the planner, which has already run.

        Args:
            plan: the current plan.
            other: the candidate plan, for the same counts.
            topology: topology with the rates.

        Returns:
            Boolean scalar.

        Raises:
            ValueError: the topology lacks a rate, or a size is `None`.
        """
        replicas = busiest(other) - busiest(plan)
        return load(plan).max() - load(other).max() >= self._min_saved(replicas, plan, topology)

    def _min_saved(self, replicas: IntScalar, plan: Plan, topology: Topology, once_s: float = 0.0) -> IntScalar:
        """Return the minimum number of saved token copies worth more than `replicas` replicas and `once_s` seconds."""
        expert_bytes = _known("expert_bytes", self.expert_bytes)
        token_flops = _known("token_flops", self.token_flops)
        replica_s = expert_bytes / slowest_bytes_per_s(topology, plan.domain)
        token_s = token_flops / _rate("Topology.flops_per_s", topology.flops_per_s)
        most = plan.domain * (plan.slots - plan.num_home)  # upper bound: one rank sends all replicas of a domain
        # Compute the table in Python, once, and look it up in the program. Floating point may round differently on
        # different devices, and ranks deciding differently would deadlock.
        table = [min_saved(once_s + number * replica_s, token_s) for number in range(-most, most + 2)]
        return namespace(plan.quota).asarray(np.array(table, np.int32))[replicas + most]


def min_saved(cost_s: float, token_s: float) -> int:
    """Return the minimum number of token copies of `token_s` seconds worth more than `cost_s` seconds, within int32."""
    # A token can take no time at some rates.
    worth = cost_s / max(token_s, sys.float_info.min)
    return math.floor(min(max(worth, -INT32_MAX), INT32_MAX - 1)) + 1


def slowest_bytes_per_s(topology: Topology, domain: int) -> float:
    """Return the lowest rate between two ranks of a domain, in bytes per second.

    Args:
        topology: topology with the rates of its levels.
        domain: ranks per domain.

    Returns:
        Bytes per second; infinity for domains of one rank.

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
    """Return the maximum number of replicas sent or received by one rank, an int32 scalar."""
    replicas = plan.placement[:, plan.num_home :]
    received = (replicas >= 0).sum(1, dtype=np.int32).max()
    homes = namespace(plan.quota).where(replicas >= 0, replicas // np.int32(plan.num_home), np.int32(-1))
    sent = (homes[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32).max()
    return namespace(plan.quota).maximum(received, sent)


def lowest_max_load(plan: Plan) -> IntScalar:
    """Return a lower bound on the maximum load: the mean load of the busiest domain, rounded up."""
    tokens = load(plan).reshape(-1, plan.domain).sum(1, dtype=np.int32).max()
    return (tokens - np.int32(1)) // np.int32(plan.domain) + np.int32(1)


def _known(name: str, value: float | None) -> float:
    if value is None:
        raise ValueError(f"Cost.{name} is None; expected a number outside a layer")
    return value


def _name(level: Level) -> str:
    return f"Level({level.name!r}).bytes_per_s"


def _rate(name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise ValueError(f"{name} is {value}; expected a finite rate for the cost model")
    return value

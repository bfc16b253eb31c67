"""HybridEP as a plan: every rank of an expert domain holds all its experts."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import Count, checked_fields
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State


@dataclass(frozen=True)
@checked_fields
class HybridEP(Balancer):
    """HybridEP: tokens move between ranks of equal offset, experts inside the expert domain.

    Use it on slow links, such as between datacenters, if a rank sends more bytes of tokens than of experts. It saves
    bytes; the load may become more or less balanced. `GatherExpertDomain` does the same with mesh axes and can encode
    the experts. This balancer works on any mesh, in a `Chain` and on the command line.

    A token copy of rank `d M + o` for a home expert of expert domain `d'` is served by rank `d' M + o`. The placement
    is equal for all microbatches, so experts can be transferred before routing is known.

    The plan's domain becomes the expert domain, so a later balancer (`Chain`) plans inside it.

    Args:
        domain_size: `M`, ranks per expert domain: a divisor of the plan's domain, with at least `L * M` slots per rank.
            `None` (default) takes the largest such divisor; `choose_expert_domains` models the fastest.

    Raises:
        ValueError: `domain_size` is below 1.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import HybridEP
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[4, 0, 0, 0], [3, 1, 0, 0], [2, 1, 1, 0], [1, 0, 3, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = HybridEP(domain_size=2).rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(plan.placement.tolist())
        [[0, 1], [1, 0], [2, 3], [3, 2]]
        >>> print(load(plan))
        [7 5 1 3]
    """

    domain_size: Count | None = None

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Return the reason why expert domains have one rank each; `None` if they are larger."""
        if self.domain_size == 1:
            return "domain_size is 1, so no expert can move"
        if self.domain_size is not None or len(_admitted(topology.ranks_per_domain, num_home, slots)) > 1:
            return None
        divisors = [m for m in range(2, topology.ranks_per_domain + 1) if topology.ranks_per_domain % m == 0]
        if not divisors:
            return "domains have one rank each, so no expert can move"
        return f"expert domains have one rank each; expected replica_slots of at least {(divisors[0] - 1) * num_home}"

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Return the fixed placement and its quota for this microbatch; see `Balancer.rebalance`.

        Raises:
            ValueError: `domain_size` does not divide the plan's domain, or a rank has too few slots.
        """
        del topology
        size = self._size(plan)
        placement = _placement(plan, size)
        # The rank of an offset in an expert domain serves the tokens from all ranks of this offset for its experts.
        num_domains = plan.num_ranks // size
        wanted = counts.reshape(num_domains, size, plan.num_experts).sum(0, dtype=np.int32).T
        served = wanted[:, None, :] * _at_home(plan, size)[:, :, None]
        placement = vary_like(placement, plan.placement, counts)
        quota = served.reshape(plan.num_experts, plan.num_ranks)
        return replace(plan, placement=placement, quota=quota, relay=None, rails=None, domain=size), state

    def _size(self, plan: Plan) -> int:
        admitted = _admitted(plan.domain, plan.num_home, plan.slots)
        if self.domain_size is None:
            return admitted[-1]
        if self.domain_size not in admitted:
            raise ValueError(
                f"domain_size is {self.domain_size}; expected a divisor of the plan's domain of {plan.domain} ranks, "
                f"and at least {self.domain_size * plan.num_home} slots per rank, not {plan.slots}"
            )
        return self.domain_size


def _admitted(domain: int, num_home: int, slots: int) -> list[int]:
    """Return the divisors of `domain` whose experts fit into the slots of a rank."""
    return [m for m in range(1, domain + 1) if domain % m == 0 and m * num_home <= slots]


def _placement(plan: Plan, size: int) -> AnyArray:
    """Return home experts first, then the other experts of the expert domain in rank order, then empty slots."""
    home, placement = plan.num_home, np.full(plan.placement.shape, -1, np.int32)
    experts = np.arange(plan.num_experts, dtype=np.int32).reshape(-1, home)
    for rank in range(plan.num_ranks):
        first = rank // size * size
        others = [other for other in range(first, first + size) if other != rank]
        placement[rank, : size * home] = experts[[rank, *others]].reshape(-1)
    return placement


def _at_home(plan: Plan, size: int) -> AnyArray:
    """Return whether each expert is at home in each expert domain, `[E, R / M]`, as 0 and 1."""
    domains = np.arange(plan.num_experts, dtype=np.int32)[:, None] // (plan.num_home * size)
    return (domains == np.arange(plan.num_ranks // size, dtype=np.int32)[None]).astype(np.int32)

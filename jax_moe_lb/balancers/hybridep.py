"""HybridEP as a plan: every rank of an expert domain holds all experts of the expert domain."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State


@dataclass(frozen=True)
class HybridEP(Balancer):
    """Sends tokens only to ranks of equal offset, and experts only to the other ranks of their expert domain.

    Use it where links are slow, as between datacenters, and a rank sends more bytes of tokens than of experts. It saves
    bytes; loads may get worse or better. `GatherExpertDomain` does the same with mesh axes, and can encode the experts;
    this one works on any mesh, in a `Chain` and in the command line.

    A token copy of rank `d M + o` for an expert at home in expert domain `d'` is served by rank `d' M + o`, which holds
    the expert. The placement is the same for every microbatch, so experts can travel before tokens are known.

    The plan's domain becomes the expert domain, so a balancer after it (`Chain`) plans inside it.

    Args:
        domain_size: `M`, the ranks of an expert domain: a divisor of the plan's domain, with at least `L * M` slots on
            each rank. `None`, the default, is the largest such number; `choose_expert_domains` models which is fastest.

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

    domain_size: int | None = None

    def __post_init__(self) -> None:
        if self.domain_size is not None and self.domain_size < 1:
            raise ValueError(f"domain_size is {self.domain_size}; expected at least 1")

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Says why expert domains have one rank each; see `Balancer.no_op_reason`."""
        if self.domain_size not in (None, 1):
            return None
        sizes = _admitted(topology.ranks_per_domain, num_home, slots)
        if self.domain_size is None and len(sizes) > 1:
            return None
        divisors = [m for m in range(2, topology.ranks_per_domain + 1) if topology.ranks_per_domain % m == 0]
        if not divisors:
            return "domains have one rank each, so that no expert may move"
        return f"expert domains have one rank each; expected replica_slots of at least {(divisors[0] - 1) * num_home}"

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes the same placement for all counts, and the quota that follows; see `Balancer.rebalance`.

        Raises:
            ValueError: the domain size does not divide the plan's domain, or a rank has too few slots.
        """
        del topology
        size = self._size(plan)
        placement = _placement(plan, size)
        # What ranks of an offset want of an expert domain's experts, the rank of this offset in that domain serves.
        num_domains = plan.num_ranks // size
        wanted = counts.reshape(num_domains, size, plan.num_experts).sum(0, dtype=np.int32).T
        served = wanted[:, None, :] * _at_home(plan, size)[:, :, None]
        placement = vary_like(placement, plan.placement, counts)
        quota = served.reshape(plan.num_experts, plan.num_ranks)
        return replace(plan, placement=placement, quota=quota, relay=None, rails=None, domain=size), state

    @property
    def needs_counts(self) -> bool:
        """It is false: the placement is the same for every microbatch, and only the quota follows the load."""
        return False

    def _size(self, plan: Plan) -> int:
        admitted = _admitted(plan.domain, plan.num_home, plan.slots)
        if self.domain_size is None:
            return admitted[-1]
        if self.domain_size not in admitted:
            raise ValueError(
                f"domain_size is {self.domain_size}; expected a divisor of the plan's domain of {plan.domain} ranks "
                f"whose {self.domain_size * plan.num_home} experts fit into the {plan.slots} slots of a rank"
            )
        return self.domain_size


def _admitted(domain: int, num_home: int, slots: int) -> list[int]:
    """Sizes of expert domains that divide a domain and whose experts fit into the slots of a rank."""
    return [m for m in range(1, domain + 1) if domain % m == 0 and m * num_home <= slots]


def _placement(plan: Plan, size: int) -> AnyArray:
    """Home experts first, then those of the expert domain's other ranks in their order, then empty slots."""
    home, placement = plan.num_home, np.full(plan.placement.shape, -1, np.int32)
    experts = np.arange(plan.num_experts, dtype=np.int32).reshape(-1, home)
    for rank in range(plan.num_ranks):
        first = rank // size * size
        others = [other for other in range(first, first + size) if other != rank]
        placement[rank, : size * home] = experts[[rank, *others]].reshape(-1)
    return placement


def _at_home(plan: Plan, size: int) -> AnyArray:
    """Whether an expert lives in an expert domain, `[E, R / M]`, as 0 and 1."""
    domains = np.arange(plan.num_experts, dtype=np.int32)[:, None] // (plan.num_home * size)
    return (domains == np.arange(plan.num_ranks // size, dtype=np.int32)[None]).astype(np.int32)

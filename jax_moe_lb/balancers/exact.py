"""The lowest maximum load that the slots allow, as far as a search of fixed length finds it, then few replicas."""

from dataclasses import dataclass

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.ops.exact import check_exact, exact
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class Exact(Balancer):
    """Minimises the maximum load of every domain, then the number of replicas.

    Where slots abound the maximum is the mean, rounded up, which nothing can better. Where they are scarce it is that
    of the best placement that a search of fixed length found; quotas are optimal for it, the placement need not be.
    The same counts always give the same plan.

    It plans from the counts alone. After another balancer (`Chain`) the replicas of that one are dropped, with
    their relays and rails: all slots are planned anew.

    It exists in C++ alone, for CPUs and NVIDIA GPUs: elsewhere `rebalance` raises a RuntimeError, which says how to
    build it.

    Args:
        eps: the maximum load may be higher by this fraction, where that saves replicas. 0 costs about one replica
            per rank; 0.01, the default, a third less.
        max_fan_out: replicas that may be made of the experts of one home rank, which sends their weights; `None`: any
            number.
        localize: whether replicas change places, within the same maximum, so that more tokens stay on their rank.
    """

    eps: float = 0.01
    max_fan_out: int | None = None
    localize: bool = True

    def __post_init__(self) -> None:
        check_exact(self.eps, self.max_fan_out)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """One plan for all domains, each of which is planned for itself."""
        del topology
        placement, quota = exact(counts, plan.slots, plan.domain, self.eps, self.max_fan_out, self.localize)
        return Plan(placement, quota, domain=plan.domain), state

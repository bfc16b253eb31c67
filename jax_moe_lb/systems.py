"""A system is an alias of three choices: who serves, how weights travel, how tokens travel."""

from dataclasses import dataclass, field

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.plain import Plain
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.gather import Gather
from jax_moe_lb.transport.peer_copy import PeerCopy


@dataclass(frozen=True)
class System:
    """What `moe` runs. Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        balancer: edits the plan.
        replicate: fills the slots.
        dispatch: moves tokens; its headroom sets the receive buffer.
        replica_slots: `S - L`, slots per rank beyond those of the home experts.
    """

    balancer: Balancer = field(default_factory=Plain)
    replicate: Gather | PeerCopy = field(default_factory=Gather)
    dispatch: Direct = field(default_factory=Direct)
    replica_slots: int = 0

    def __post_init__(self) -> None:
        if self.replica_slots < 0:
            raise ValueError(f"replica_slots is {self.replica_slots}; expected at least 0")


def plain(headroom: float = 1.05) -> System:
    """Plain expert parallelism: every expert at home, however skewed the load."""
    return System(dispatch=Direct(headroom))


def greedy(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """Quotas on replicas, in one greedy pass inside the jitted program."""
    return System(Greedy(), dispatch=Direct(headroom), replica_slots=replica_slots)


def ultraep(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """UltraEP's planner: every rank of a domain under one limit near the mean, planned for every microbatch."""
    return System(UltraEP(), dispatch=Direct(headroom), replica_slots=replica_slots)


def exact(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """The lowest maximum load that a search finds, then few replicas; needs the custom calls."""
    return System(Exact(), dispatch=Direct(headroom), replica_slots=replica_slots)

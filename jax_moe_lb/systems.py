"""A system is an alias of three choices: who serves, how weights travel, how tokens travel."""

from dataclasses import dataclass, field

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.balancers.eplb import EPLB
from jax_moe_lb.balancers.eplb_plus import EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.lplb import LPLB
from jax_moe_lb.balancers.plain import Plain
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.gather import Gather
from jax_moe_lb.transport.peer_copy import PeerCopy
from jax_moe_lb.transport.relay import Relay
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.spray import Spray
from jax_moe_lb.transport.staged import Staged


@dataclass(frozen=True)
class System:
    """What `moe` runs. Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        balancer: edits the plan.
        replicate: fills the slots.
        dispatch: moves tokens; its headroom sets the receive buffer.
        replica_slots: `S - L`, slots per rank beyond those of the home experts; at most `E - L`; one rank alone
            has none.
    """

    balancer: Balancer = field(default_factory=Plain)
    replicate: Replicate = field(default_factory=Gather)
    dispatch: Dispatch = field(default_factory=Direct)
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
    """UltraEP's planner: every rank of a domain under one limit near the mean, planned for every microbatch; relays."""
    return System(UltraEP(), Relay(), Direct(headroom), replica_slots)


def exact(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """The lowest maximum load that a search finds, then few replicas; needs the custom calls."""
    return System(Exact(), dispatch=Direct(headroom), replica_slots=replica_slots)


def hybridep(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """HybridEP's plan on any mesh: every rank holds the experts of its domain, as large as the slots allow.

    On a mesh of `hybrid_mesh` use `Migrate` instead, which moves experts before tokens are known, with any system.
    """
    return System(HybridEP(), dispatch=Direct(headroom), replica_slots=replica_slots)


def feplb(replica_slots: int = 4, headroom: float = 1.05) -> System:
    """FEPLB: the busiest experts move, whole, to idle ranks of their domain, while the others are served."""
    return System(FEPLB(), PeerCopy(), Staged(headroom), replica_slots)


def fastermoe(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """FasterMoE's shadowing, with the costs of `FasterMoE`'s defaults: hot experts on every rank, if that pays."""
    return System(FasterMoE(), dispatch=Direct(headroom), replica_slots=replica_slots)


def eplb(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """EPLB: replicas by the load of earlier microbatches, anew every few."""
    return System(EPLB(), dispatch=Direct(headroom), replica_slots=replica_slots)


def eplb_plus(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """EPLB+: EPLB's rule on the load of every microbatch."""
    return System(EPLBPlus(), dispatch=Direct(headroom), replica_slots=replica_slots)


def lplb(replica_slots: int = 2, headroom: float = 1.05) -> System:
    """LPLB: a linear program over a fixed graph of replicas, solved on the host."""
    return System(LPLB(), dispatch=Direct(headroom), replica_slots=replica_slots)


def rails(headroom: float = 1.05) -> System:
    """RailS: tokens between domains are sprayed over all rails. Mesh axes must make up the domains."""
    return System(RailS(), dispatch=Spray(headroom))

"""A system joins three choices: who serves, how weights travel, and how tokens travel."""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

from jax_moe_lb.balancers.base import Balancer, Plain
from jax_moe_lb.balancers.eplb import EPLB, EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.lplb import LPLB
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.transport.compression import QuantizedTransfer
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Buffers, Kernels
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.replicate import Gather, PeerCopy, Relay, Replicate
from jax_moe_lb.transport.spray import MultiRailDispatch
from jax_moe_lb.transport.two_phase import TwoPhase

__all__ = [
    "System",
    "eplb",
    "eplb_plus",
    "exact",
    "fastermoe",
    "feplb",
    "greedy",
    "hybridep",
    "lplb",
    "plain",
    "rails",
    "system_named",
    "system_names",
    "two_tier",
    "ultraep",
]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class System:
    """Says what `moe` runs: who serves, how weights travel, and how tokens do.

    Make one out of your own three choices; the functions of this module are those of the papers. It is hashable, and so
    may be a static argument of `jax.jit`.

    Args:
        balancer: it edits the plan.
        replicate: it fills the slots.
        dispatch: it serves the tokens; its `buffers` set the receive buffer.
        replica_slots: `S - L`, the slots of a rank beyond those of its home experts; at most `E - L`. Two are usual;
            every one costs the memory of an expert's weights and gradients, once for all layers. One rank alone has
            none.
        relocates: if True, `nn.MoE` keeps the places and running loads of experts, so that they can move between ranks.
            Call `MoE.update_loads` in each step and `nn.relocate` every so many. False by default.
        migrate: gathers the experts of expert domains before tokens are known, over a mesh of `hybrid_mesh`; `None`
            (default), usual inside one datacenter, keeps experts at home.

    Examples:
        >>> from jax_moe_lb import Chain
        >>> from jax_moe_lb.balancers import Exact, RailS
        >>> from jax_moe_lb.transport import MultiRailDispatch
        >>> System(Chain((Exact(), RailS())), dispatch=MultiRailDispatch(), replica_slots=2).replicate
        Gather()
    """

    balancer: Balancer = field(default_factory=Plain)
    replicate: Replicate = field(default_factory=Gather)
    dispatch: Dispatch = field(default_factory=Direct)
    replica_slots: int = 0
    relocates: bool = False
    migrate: GatherExpertDomain | None = None

    def __post_init__(self) -> None:
        if self.replica_slots < 0:
            raise ValueError(f"replica_slots is {self.replica_slots}; expected at least 0")

    @property
    def needs_contiguous_weights(self) -> bool:
        """Says whether weights of home experts and replicas are copied into one array for the products.

        The simulator asks for it.

        Examples:
            >>> [system.needs_contiguous_weights for system in (exact(), exact().replace(kernels=Kernels.OWN), plain())]
            [True, False, False]
        """
        return self.replica_slots > 0 and self.dispatch.kernels is Kernels.LIBRARY

    def no_op_reason(self, topology: Topology, num_experts: int) -> str | None:
        """Says why its balancer cannot change anything in a layer; `None` if it can. `nn.MoE` warns of it.

        Args:
            topology: the ranks of the layer. On one rank alone there is nothing to balance, and nothing is said.
            num_experts: `E`.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> hybridep(replica_slots=2).no_op_reason(Topology.flat(8), num_experts=64)
            'expert domains have one rank each; expected replica_slots of at least 8'
        """
        if topology.num_ranks == 1:
            return None
        num_home = num_experts // topology.num_ranks
        return self.balancer.no_op_reason(topology, num_home, num_home + self.replica_slots)

    def max_rounds_bound(self, topology: Topology, num_experts: int, num_copies: int) -> int:
        """Returns how many rounds a layer may need, whatever the routing; 1: one round is guaranteed.

        `exact` guarantees one where all ranks are one domain and have as many replica slots as home experts; other
        systems, UltraEP among them, keep loads low but promise nothing, so that the worst is all tokens on one rank.

        Args:
            topology: the ranks and domains.
            num_experts: `E`.
            num_copies: `T * K`, the token copies of a rank.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> ranks = Topology.flat(8)
            >>> [system.max_rounds_bound(ranks, 16, 4096) for system in (exact(2), exact(1), ultraep(2), plain())]
            [1, 8, 8, 8]
        """
        num_home = num_experts // topology.num_ranks
        # Rows that pass home come there before anything is balanced.
        bound = float(topology.num_ranks)
        if not self.dispatch.cost().passes_home:
            bound = min(bound, self.balancer.bound(topology, num_home, num_home + self.replica_slots))
        return max(1, math.ceil(bound * num_copies / self.dispatch.buffers.rows(num_copies)))

    def replace(
        self,
        *,
        buffers: Buffers | None = None,
        transfer: QuantizedTransfer | None = None,
        kernels: Kernels | None = None,
        replica_slots: int | None = None,
        migrate: GatherExpertDomain | None = None,
        relocates: bool | None = None,
    ) -> "System":
        """Return the same system with other options; `None` (default) keeps an option.

        Use `dataclasses.replace` for other strategies, and to remove `transfer` or `migrate`.

        Args:
            buffers: size of the dispatch's receive buffer and number of rounds.
            transfer: quantization of rows while they travel forward.
            kernels: implementation of the experts' products on Hopper.
            replica_slots: slots of a rank beyond its home experts.
            migrate: gathers the experts of expert domains first.
            relocates: whether home experts move between steps.

        Examples:
            >>> from jax_moe_lb import Buffers, exact
            >>> exact(2).replace(buffers=Buffers(max_rounds=1)).dispatch.buffers
            Buffers(headroom=1.05, max_rounds=1)
        """
        of_dispatch = {"buffers": buffers, "transfer": transfer, "kernels": kernels}
        of_system = {"replica_slots": replica_slots, "migrate": migrate, "relocates": relocates}
        dispatch: Any = {name: value for name, value in of_dispatch.items() if value is not None}
        system: Any = {name: value for name, value in of_system.items() if value is not None}
        return replace(self, dispatch=replace(self.dispatch, **dispatch), **system)


def system_names() -> list[str]:
    """List the functions of this module that make a system.

    Examples:
        >>> "exact" in system_names()
        True
    """
    return sorted(
        name
        for name, value in globals().items()
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation is System
        and all(one.default is not one.empty for one in inspect.signature(value).parameters.values())
    )


def system_named(name: str) -> System:
    """Makes a system with its usual options, for names that users type: `nn.MoE(system="exact")` and command lines.

    Args:
        name: one of `system_names()`.

    Raises:
        ValueError: it is none of them.

    Examples:
        >>> system_named("exact") == exact()
        True
    """
    if name not in system_names():
        raise ValueError(f"system is {name!r}; expected one of {', '.join(system_names())}")
    return globals()[name]()


def plain(buffers: Buffers = Buffers()) -> System:
    """Serves every expert at home, however skewed the load: plain expert parallelism.

    Use it where routing is level already, and as the baseline of every comparison.

    Args:
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default), in most systems.

    Examples:
        >>> system = plain()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Plain', 'Direct', 0)
    """
    return System(dispatch=Direct(buffers))


def greedy(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Gives quotas to replicas, planned in one greedy pass inside the jitted program.

    It needs no custom calls, so it is the first to try.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = greedy(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Greedy', 'Direct', 2)
    """
    return System(Greedy(), dispatch=Direct(buffers), replica_slots=replica_slots)


def ultraep(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Brings every rank of a domain under one limit near the mean in every microbatch, by UltraEP's planner.

    Use it on rack-scale domains, where a hot expert has many replicas, which relays feed.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual, as in the paper.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = ultraep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('UltraEP', 'Direct', 2)
    """
    return System(UltraEP(), Relay(), Direct(buffers), replica_slots)


def exact(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Plans the lowest maximum load that a search finds, then few replicas.

    Use it where the receive buffer shall be near the mean: with enough slots the maximum is within its `eps`, 0.01, of
    the lowest one found. Where the custom calls are built it plans in C++, elsewhere, as on TPUs, in jnp.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = exact(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Exact', 'Direct', 2)
    """
    return System(Exact(), dispatch=Direct(buffers), replica_slots=replica_slots)


def two_tier(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Moves home experts between domains every so many steps, and levels each microbatch inside them, along relays.

    Use it where ranks form several domains, such as nodes: replicas stay inside a domain, so that no plan alone brings
    the busiest one below its own mean. Call `MoE.update_loads` in each step, and `nn.relocate` every so many:
    `docs/systems/two_tier.md`.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = two_tier()
        >>> type(system.balancer).__name__, type(system.replicate).__name__, system.relocates
        ('Exact', 'Relay', True)
    """
    return System(Exact(), Relay(), Direct(buffers), replica_slots, relocates=True)


def hybridep(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Makes every rank hold the experts of its expert domain, as large as the slots allow: HybridEP's plan on any mesh.

    On a mesh of `hybrid_mesh` use `GatherExpertDomain` instead, which moves experts before tokens are known, with any
    system.

    Args:
        replica_slots: the slots of a rank beyond its home experts; `(n - 1) L` of them hold an expert domain of `n`.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = hybridep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('HybridEP', 'Direct', 2)
    """
    return System(HybridEP(), dispatch=Direct(buffers), replica_slots=replica_slots)


def feplb(replica_slots: int = 4, buffers: Buffers = Buffers(headroom=1.5)) -> System:
    """Moves the busiest experts, whole, to idle ranks of their domain, while the others are served: FEPLB.

    Use it inside one NVLink domain, where copy engines move weights. Where memory is short, make the system with
    `Direct()` instead: its receive buffer takes the balanced load, and nothing hides its copies.

    Args:
        replica_slots: the slots of a rank beyond its home experts, and so the experts that it can take; 4 are usual.
        buffers: the receive buffer: 1.5 x mean load before balancing and as many rounds as needed (default).

    Examples:
        >>> system = feplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FEPLB', 'TwoPhase', 4)
    """
    return System(FEPLB(), PeerCopy(), TwoPhase(buffers), replica_slots)


def fastermoe(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Copies hot experts to every rank of their domain if that pays: FasterMoE, with the costs of its defaults.

    Use it to reproduce that baseline.

    Args:
        replica_slots: the slots of a rank beyond its home experts; each hot expert takes one on every other rank. 2 are
            usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = fastermoe()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FasterMoE', 'Direct', 2)
    """
    return System(FasterMoE(), dispatch=Direct(buffers), replica_slots=replica_slots)


def eplb(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Makes replicas by the load of earlier microbatches, anew every few: EPLB.

    Use it as a baseline, and where loads change slowly and no time for a planner is left.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = eplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLB', 'Direct', 2)
    """
    return System(EPLB(), dispatch=Direct(buffers), replica_slots=replica_slots)


def eplb_plus(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Applies EPLB's rule to the load of every microbatch: EPLB+.

    Use it to reproduce that baseline of UltraEP's paper.

    Args:
        replica_slots: the slots of a rank beyond its home experts; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = eplb_plus()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLBPlus', 'Direct', 2)
    """
    return System(EPLBPlus(), dispatch=Direct(buffers), replica_slots=replica_slots)


def lplb(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Solves a linear program over a fixed graph of replicas, on the host: LPLB.

    Use it to study that baseline: it calls the host in every layer.

    Args:
        replica_slots: the slots of a rank beyond its home experts, each an edge of the graph; 2 are usual.
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = lplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('LPLB', 'Direct', 2)
    """
    return System(LPLB(), dispatch=Direct(buffers), replica_slots=replica_slots)


def rails(buffers: Buffers = Buffers()) -> System:
    """Sprays tokens between nodes over all rails: RailS. Mesh axes must make up the nodes.

    Use it where nodes have several network interfaces and their ranks do not all send the same.

    Args:
        buffers: the receive buffer: 1.05 x mean load and as many rounds as needed (default).

    Examples:
        >>> system = rails()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('RailS', 'MultiRailDispatch', 0)
    """
    return System(RailS(), dispatch=MultiRailDispatch(buffers))

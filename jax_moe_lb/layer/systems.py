"""Systems: combinations of a balancer, a weight transport and a token dispatch for `moe`."""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

from jax_moe_lb.balancers.base import Balancer, Plain
from jax_moe_lb.balancers.cost import Cost
from jax_moe_lb.balancers.eplb import EPLB, EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.lplb import LPLB
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.transport.compression import QuantizedTransfer
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Buffers, Saved
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.replicate import Gather, PeerCopy, Relay, Replicate
from jax_moe_lb.transport.rule import dispatch_by_rule
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
@checked_fields
class System:
    """Configuration of `moe`: balancer, weight transport and token dispatch.

    The functions of this module return ready-made systems; create a `System` for other combinations. It is hashable,
    so it can be a static argument of `jax.jit`.

    Args:
        balancer: strategy that edits the plan; `Plain()` by default.
        replicate: transport of expert weights into the slots; `Gather()` by default.
        dispatch: transport of tokens to the experts and back; `Direct()` by default. Its `buffers` set the receive
            buffer.
        replica_slots: `S - L`, slots of a rank beyond its home experts, at most `E - L`; 0 by default, usually 2. Each
            slot takes the memory of one expert's weights and gradients, shared by all layers. A single rank has none.
        relocates: if True, `nn.MoE` stores the places and running loads of experts, for relocation between ranks. Call
            `MoE.update_loads` in each step and `nn.relocate` at regular intervals. False by default.
        migrate: gather of the experts of each expert domain before routing, over a mesh of `hybrid_mesh`. `None`
            (default), usual inside one datacenter, keeps experts at home.

    Raises:
        ValueError: `replica_slots` is negative.

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

    def no_op_reason(self, topology: Topology, num_experts: int) -> str | None:
        """Return the reason why the balancer cannot change the plan of a layer; `None` if it can.

        `nn.MoE` emits it as a warning.

        Args:
            topology: topology of the layer; for a single rank the result is `None`.
            num_experts: `E`.

        Returns:
            The reason as text, or `None`.

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
        """Return an upper bound on the rounds of a layer, for any routing.

        `exact` guarantees 1 round if all ranks form one domain with as many replica slots as home experts. Other
        systems, including UltraEP, have no bound on the load: in the worst case one rank serves all tokens.

        Args:
            topology: ranks and domains of the layer.
            num_experts: `E`.
            num_copies: `T * K`, token copies of a rank.

        Returns:
            Number of rounds, at least 1.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> ranks = Topology.flat(8)
            >>> [system.max_rounds_bound(ranks, 16, 4096) for system in (exact(2), exact(1), ultraep(2), plain())]
            [1, 8, 8, 8]
        """
        num_home = num_experts // topology.num_ranks
        # Rows routed through home ranks arrive there before balancing.
        bound = float(topology.num_ranks)
        if not self.dispatch.cost().passes_home:
            bound = min(bound, self.balancer.bound(topology, num_home, num_home + self.replica_slots))
        return max(1, math.ceil(bound * num_copies / self.dispatch.buffers.rows(num_copies)))

    def replace(
        self,
        *,
        buffers: Buffers | None = None,
        transfer: QuantizedTransfer | None = None,
        saved: Saved | None = None,
        replica_slots: int | None = None,
        migrate: GatherExpertDomain | None = None,
        relocates: bool | None = None,
    ) -> "System":
        """Return a copy of the system with other options; `None` (default) keeps an option.

        Use `dataclasses.replace` for other strategies, and to remove `transfer` or `migrate`.

        Args:
            buffers: size of the receive buffer and maximum number of rounds.
            transfer: quantization of forward rows during transfers.
            saved: received arrays saved for the backward pass.
            replica_slots: replica slots per rank.
            migrate: gather of the experts of each expert domain.
            relocates: whether home experts move between steps.

        Returns:
            The new system.

        Examples:
            >>> from jax_moe_lb import Buffers, exact
            >>> exact(2).replace(buffers=Buffers(max_rounds=1)).dispatch.buffers
            Buffers(headroom=1.05, max_rounds=1, chunks=1)
        """
        of_dispatch = {"buffers": buffers, "transfer": transfer, "saved": saved}
        of_system = {"replica_slots": replica_slots, "migrate": migrate, "relocates": relocates}
        dispatch: Any = {name: value for name, value in of_dispatch.items() if value is not None}
        system: Any = {name: value for name, value in of_system.items() if value is not None}
        return replace(self, dispatch=replace(self.dispatch, **dispatch), **system)

    def by_rule(self, topology: Topology, num_experts: int, per_token: int | None) -> "System":
        """Return a copy of the system with the dispatch of `dispatch_by_rule`.

        Args:
            topology: topology of the layer.
            num_experts: `E`.
            per_token: `K`; `None` if unknown.

        Returns:
            The system, with `Once` or `Forward` in place of `Direct` if the rule chooses it.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> [type(exact().by_rule(Topology.flat(8), 64, k).dispatch).__name__ for k in (2, 8)]
            ['Direct', 'Once']
        """
        return replace(self, dispatch=dispatch_by_rule(topology, num_experts, per_token, self.dispatch).dispatch)


def system_names() -> list[str]:
    """Return the names of the functions in this module that create a system, sorted.

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
    """Return the system of a name, with default options.

    It parses names typed by users, such as `nn.MoE(system="exact")` and command-line options.

    Args:
        name: one of `system_names()`.

    Raises:
        ValueError: `name` is not one of these.

    Examples:
        >>> system_named("exact") == exact()
        True
    """
    if name not in system_names():
        raise ValueError(f"system is {name!r}; expected one of {', '.join(system_names())}")
    return globals()[name]()


def plain(buffers: Buffers = Buffers()) -> System:
    """Return plain expert parallelism: every rank serves its home experts, at any load.

    Use it for balanced routing, and as the baseline of comparisons.

    Args:
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = plain()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Plain', 'Direct', 0)
    """
    return System(dispatch=Direct(buffers))


def greedy(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return a system with one greedy planning pass inside the jitted program.

    It requires no custom calls. Try it first.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = greedy(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Greedy', 'Direct', 2)
    """
    return System(Greedy(), dispatch=Direct(buffers), replica_slots=replica_slots)


def ultraep(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return UltraEP: limit the load of every rank of a domain near the mean, in every microbatch.

    Use it on rack-scale domains: there a hot expert has many replicas, and relays forward its weights.

    Args:
        replica_slots: replica slots per rank; 2 by default, as in the paper.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = ultraep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('UltraEP', 'Direct', 2)
    """
    return System(UltraEP(), Relay(), Direct(buffers), replica_slots)


def exact(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return a system with a search for the lowest maximum load, and then for few replicas.

    Use it for a receive buffer near the mean load. With enough slots, the maximum is within `eps` (0.01) of the lowest
    one found. It plans in C++ if the custom calls are built, otherwise, as on TPUs, in jnp.

    If the topology has rates (`flops_per_s` and `bytes_per_s`), plans are weighed in seconds (`Cost`): replicas are
    limited if they take longer than the tokens they save, and no plan is made if none saves time. Without rates, as on
    CPUs, every plan is used. `System(Exact(eps=0.0), replica_slots=2)` minimizes tokens alone.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = exact(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Exact', 'Direct', 2)
    """
    return System(Exact(cost=Cost(required=False)), dispatch=Direct(buffers), replica_slots=replica_slots)


def two_tier(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return a two-tier system: relocation of home experts between domains, and balancing inside each domain.

    Replicas stay inside a domain, so no plan alone brings the busiest domain below its own mean. Use it for ranks in
    several domains, such as nodes. Call `MoE.update_loads` in each step and `nn.relocate` at regular intervals; see
    `docs/systems/two_tier.md`. Weights travel through relays.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = two_tier()
        >>> type(system.balancer).__name__, type(system.replicate).__name__, system.relocates
        ('Exact', 'Relay', True)
    """
    return System(Exact(cost=Cost(required=False)), Relay(), Direct(buffers), replica_slots, relocates=True)


def hybridep(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return HybridEP's plan on any mesh: each rank holds the experts of an expert domain as large as the slots allow.

    On a mesh of `hybrid_mesh`, use `GatherExpertDomain` with any system instead: it moves experts before routing.

    Args:
        replica_slots: replica slots per rank; 2 by default. An expert domain of `n` ranks requires `(n - 1) L`.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = hybridep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('HybridEP', 'Direct', 2)
    """
    return System(HybridEP(), dispatch=Direct(buffers), replica_slots=replica_slots)


def feplb(replica_slots: int = 4, buffers: Buffers = Buffers(headroom=1.5)) -> System:
    """Return FEPLB: move the busiest experts, whole, to idle ranks of their domain during the static phase.

    Use it inside one NVLink domain, with copy engines for the weights. To save memory, create the system with
    `Direct()` instead: its receive buffer is sized for the balanced load, but its copies are not overlapped.

    Args:
        replica_slots: replica slots per rank, the maximum number of experts a rank can take; 4 by default.
        buffers: receive buffer; by default 1.5 x mean load before balancing and as many rounds as needed.

    Examples:
        >>> system = feplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FEPLB', 'TwoPhase', 4)
    """
    return System(FEPLB(), PeerCopy(), TwoPhase(buffers), replica_slots)


def fastermoe(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return FasterMoE: copy hot experts to every rank of their domain if its cost model predicts a gain.

    Use it to reproduce the baseline.

    Args:
        replica_slots: replica slots per rank; 2 by default. Each hot expert takes one on every other rank.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = fastermoe()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FasterMoE', 'Direct', 2)
    """
    return System(FasterMoE(), dispatch=Direct(buffers), replica_slots=replica_slots)


def eplb(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return EPLB: replicate experts by the load of earlier microbatches, with a new placement at fixed intervals.

    Use it as a baseline, and for slowly changing loads if no time is left for a planner.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = eplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLB', 'Direct', 2)
    """
    return System(EPLB(), dispatch=Direct(buffers), replica_slots=replica_slots)


def eplb_plus(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return EPLB+: apply EPLB's rule to the load of every microbatch.

    Use it to reproduce this baseline of UltraEP's paper.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = eplb_plus()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLBPlus', 'Direct', 2)
    """
    return System(EPLBPlus(), dispatch=Direct(buffers), replica_slots=replica_slots)


def lplb(replica_slots: int = 2, buffers: Buffers = Buffers()) -> System:
    """Return LPLB: solve a linear program over a fixed graph of replicas, on the host.

    Use it to study the baseline. It calls the host in every layer.

    Args:
        replica_slots: replica slots per rank, each an edge of the graph; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = lplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('LPLB', 'Direct', 2)
    """
    return System(LPLB(), dispatch=Direct(buffers), replica_slots=replica_slots)


def rails(buffers: Buffers = Buffers()) -> System:
    """Return RailS: spread the tokens between nodes over all rails. The mesh axes must form the nodes.

    Use it on nodes with several network interfaces and unequal traffic per rank.

    Args:
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.

    Examples:
        >>> system = rails()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('RailS', 'MultiRailDispatch', 0)
    """
    return System(RailS(), dispatch=MultiRailDispatch(buffers))

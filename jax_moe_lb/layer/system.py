"""`System`, the configuration of `moe`, and its options by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jax_moe_lb import balancers, transport
from jax_moe_lb.balancers.base import Balancer, Chain, Plain
from jax_moe_lb.core.checks import Natural, check_value, checked_fields, shown
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.transport.compression import QuantizedTransfer
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Buffers, Saved
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.replicate import Gather, Replicate
from jax_moe_lb.transport.rule import AutoDispatch, dispatch_by_rule

DISPATCHES = {"direct": "Direct", "once": "Once", "forward": "Forward", "rails": "MultiRailDispatch"}
"""Classes of `transport` by the name of the option `dispatch`."""

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "replica_slots": (int, "an integer"),
    "headroom": (float, "a number"),
    "max_rounds": (int, "an integer"),
    "dispatch": (str, f"one of {', '.join(DISPATCHES)}"),
}
"""Options of a system as text: converter, and condition in messages."""


@dataclass(frozen=True)
@checked_fields
class System:
    """Configuration of `moe`: balancer, weight transport and token dispatch.

    The functions of this module return ready-made systems; create a `System` for other combinations. It is hashable,
    so it can be a static argument of `jax.jit`.

    Args:
        balancer: strategy that edits the plan; `Plain()` by default.
        replicate: transport of expert weights into the slots; `Gather()` by default.
        dispatch: transport of tokens to the experts and back; `AutoDispatch()` by default, which chooses it by rule.
            Its `buffers` set the receive buffer.
        replica_slots: `S - L`, slots of a rank beyond its home experts, at most `E - L`; 0 by default, usually 2. Each
            slot takes the memory of one expert's weights and gradients, shared by all layers. A single rank has none.
        relocates: if True, `nn.MoE` stores the places and running loads of experts, for relocation between ranks. Call
            `MoE.update_loads` in each step and `nn.relocate` at regular intervals. False by default.
        migrate: gather of the experts per expert domain before routing, over a mesh of `hybrid_mesh`. `None`
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
    dispatch: Dispatch = field(default_factory=AutoDispatch)
    replica_slots: Natural = 0
    relocates: bool = False
    migrate: GatherExpertDomain | None = None

    def no_op_reason(self, topology: Topology, num_experts: int) -> str | None:
        """Return the reason why the balancer cannot change the plan of a layer; `None` if it can.

        `nn.MoE` emits it as a warning.

        Args:
            topology: topology of the layer; for a single rank the result is `None`.
            num_experts: `E`.

        Returns:
            The reason as text, or `None`.

        Examples:
            >>> from jax_moe_lb import Topology, hybridep
            >>> hybridep(replica_slots=2).no_op_reason(Topology.flat(8), num_experts=64)
            'expert domains have one rank each; expected replica_slots of at least 8'
        """
        if topology.num_ranks == 1:
            return None
        num_home = num_experts // topology.num_ranks
        return self.balancer.no_op_reason(topology, num_home, num_home + self.replica_slots)

    def max_rounds_bound(self, topology: Topology, num_experts: int, num_copies: int) -> int:
        """Return an upper bound on the rounds of a layer, for any routing.

        `exact` guarantees 1 round if all ranks form one domain with as many replica slots as home experts. If rates are
        known, set `max_rounds` to 1, too: otherwise it may keep a plan of several rounds that takes less time. Other
        systems, including UltraEP, have no bound on the load: in the worst case one rank serves all tokens.

        Args:
            topology: ranks and domains of the layer.
            num_experts: `E`.
            num_copies: `T * K`, token copies of a rank.

        Returns:
            Number of rounds, at least 1.

        Examples:
            >>> from jax_moe_lb import Topology, exact, plain, ultraep
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
            saved: arrays saved for the backward pass.
            replica_slots: replica slots per rank.
            migrate: gather of the experts per expert domain.
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

    def limit_slots(self, num_experts: int, num_home: int) -> "System":
        """Return a copy of the system with at most one replica slot per expert that is not at home.

        `nn.MoE`, `aot.compile_layer` and the simulator apply it to their systems; a single rank then has no slots.

        Args:
            num_experts: `E`.
            num_home: `L`, home experts of a rank.

        Returns:
            The system with `min(replica_slots, E - L)` slots.

        Examples:
            >>> from jax_moe_lb import exact
            >>> [exact(4).limit_slots(8, home).replica_slots for home in (2, 6, 8)]
            [4, 2, 0]
        """
        return replace(self, replica_slots=min(self.replica_slots, num_experts - num_home))

    def by_rule(
        self,
        topology: Topology,
        num_experts: int,
        per_token: int | None,
        tokens: jax.ShapeDtypeStruct | None = None,
    ) -> "System":
        """Return a copy of the system with the dispatch of `dispatch_by_rule`.

        Args:
            topology: topology of the layer.
            num_experts: `E`.
            per_token: `K`; `None` if unknown.
            tokens: `[T, H]`, shape and dtype of the tokens of a rank; `None` (default) if unknown.

        Returns:
            The system, with `Direct`, `Once` or `Forward` in place of `AutoDispatch`. It stays on TPUs if the tokens
            are unknown; `moe` then decides.

        Examples:
            >>> from jax_moe_lb import Topology, exact
            >>> [type(exact().by_rule(Topology.flat(4), 64, k).dispatch).__name__ for k in (2, 8)]
            ['Direct', 'Once']
        """
        found = dispatch_by_rule(topology, num_experts, per_token, self.dispatch, tokens)
        return replace(self, dispatch=found.dispatch)


def with_dispatch(system: System, name: str) -> System:
    """Return the system with a dispatch by name."""
    if name not in DISPATCHES:
        raise ValueError(f"dispatch is {shown(name)}; expected a Dispatch or one of {', '.join(DISPATCHES)}")
    buffers, own = system.dispatch.buffers, type(system.dispatch).__name__
    if system.dispatch not in (AutoDispatch(buffers), Direct(buffers)):
        raise ValueError(f"dispatch is {name!r}; expected none for a system with {own}, its own dispatch")
    balancer = system.balancer
    if name == "rails":
        rails = balancers.RailS()
        balancer = rails if balancer == Plain() else Chain((balancer, rails))
    return replace(system, balancer=balancer, dispatch=getattr(transport, DISPATCHES[name])(buffers))


def with_options(
    system: System,
    buffers: Buffers | None,
    headroom: float | None,
    max_rounds: int | None,
    dispatch: Dispatch | str | None,
) -> System:
    """Return a named system with its options; see `jax_moe_lb.layer.systems`."""
    # `None` keeps an option.
    check_value("buffers", buffers, Buffers | None)
    check_value("dispatch", dispatch, Dispatch | str | None)
    if isinstance(dispatch, Dispatch):
        system = replace(system, dispatch=dispatch)
    elif dispatch is not None:
        system = with_dispatch(system, dispatch)
    sizes: Any = {"headroom": headroom, "max_rounds": max_rounds}
    given = {name: value for name, value in sizes.items() if value is not None}
    return system.replace(buffers=replace(buffers or system.dispatch.buffers, **given))


def parse_system(text: str) -> tuple[str, dict[str, Any]]:
    """Split the text of a system into its name and options; see `system_named`."""
    first, plus, dispatch = text.partition("+")
    name, colon, pairs = first.partition(":")
    texts = [pair.partition("=") for pair in pairs.split(",")] if colon else []
    if plus and dispatch not in DISPATCHES:
        raise ValueError(f"system is {shown(text)}; expected one of {', '.join(DISPATCHES)} after +")
    texts += [("dispatch", "=", dispatch)] if plus else []
    options: dict[str, Any] = {}
    for option, equals, value in texts:
        if not equals or option not in OPTIONS:
            raise ValueError(
                f"system is {shown(text)} with option {shown(option)}; expected OPTION=VALUE of {', '.join(OPTIONS)}"
            )
        if option in options:
            raise ValueError(f"system is {shown(text)} with {option} given twice; expected it once")
        options[option] = _converted(option, value)
    return name, options


def _converted(option: str, value: str) -> Any:
    convert, condition = OPTIONS[option]
    if value == "none":
        return None
    if option == "dispatch" and value not in DISPATCHES:
        raise ValueError(f"dispatch is {shown(value)}; expected {condition} or none")
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{option} is {shown(value)}; expected {condition} or none") from error

"""Systems: combinations of a balancer, a weight transport and a token dispatch for `moe`, by function or by name.

All functions take the same options, and `system_named` the same ones as text: `exact(4, headroom=1.25)` equals
`system_named("exact:replica_slots=4,headroom=1.25")`.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

# Balancers and transports are attributes of their rooms, so that a system imports its own.
from jax_moe_lb import balancers, transport
from jax_moe_lb.core.checks import check_value, shown
from jax_moe_lb.layer.system import OPTIONS, System, parse_system, with_options
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Buffers

__all__ = [
    "System",
    "eplb",
    "eplb_plus",
    "exact",
    "fastermoe",
    "feplb",
    "greedy",
    "hybridep",
    "plain",
    "rails",
    "system_named",
    "system_names",
    "two_tier",
    "ultraep",
]


def __dir__() -> list[str]:
    return __all__


def plain(
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return plain expert parallelism: every rank serves its home experts, at any load.

    Use it for balanced routing, and as the baseline of comparisons.

    Args:
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = plain()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Plain', 'AutoDispatch', 0)
    """
    system = System()
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def greedy(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return a system with one greedy planning pass.

    It requires no custom calls. With custom calls, CPUs and NVIDIA GPUs plan in C++ on the host.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = greedy(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Greedy', 'AutoDispatch', 2)
    """
    system = System(balancers.Greedy(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def ultraep(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return UltraEP: limit the load of every rank of a domain near the mean, in every microbatch.

    Use it on rack-scale domains: there a hot expert has many replicas, and relays forward its weights.

    Args:
        replica_slots: replica slots per rank; 2 by default, as in the paper.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = ultraep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('UltraEP', 'AutoDispatch', 2)
    """
    system = System(balancers.UltraEP(), transport.Relay(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def exact(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return a system with a search for the lowest maximum load, and then for few replicas.

    Use it for a receive buffer near the mean load. With enough slots, the maximum is within `eps` (0.01) of the lowest
    one found. It plans in C++ if the custom calls are built, otherwise, as on TPUs, in jnp.

    If the topology has rates (`flops_per_s` and `bytes_per_s`), plans are weighed in seconds (`Cost`): replicas are
    limited if they take longer than the tokens they save, and no plan is made if none saves time. On GPUs of
    `core/devices` without such rates, a plan is used if it saves time by the rates of the device. On other
    devices, such as CPUs, every plan is used. `System(Exact(eps=0.0), replica_slots=2)` minimizes tokens alone.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = exact(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('Exact', 'AutoDispatch', 2)
    """
    system = System(balancers.Exact(cost=balancers.Cost(required=False)), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def two_tier(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return a two-tier system: relocation of home experts between domains, and balancing inside each domain.

    Replicas stay inside a domain, so no plan alone brings the busiest domain below its own mean. Use it for ranks in
    several domains, such as nodes. Call `MoE.update_loads` in each step and `nn.relocate` at regular intervals; see
    `docs/systems/two_tier.md`. Weights travel through relays.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = two_tier()
        >>> type(system.balancer).__name__, type(system.replicate).__name__, system.relocates
        ('Exact', 'Relay', True)
    """
    system = System(
        balancers.Exact(cost=balancers.Cost(required=False)),
        transport.Relay(),
        replica_slots=replica_slots,
        relocates=True,
    )
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def hybridep(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return HybridEP's plan on any mesh: each rank holds the experts of an expert domain as large as the slots allow.

    On a mesh of `hybrid_mesh`, use `GatherExpertDomain` with any system instead: it moves experts before routing.

    Args:
        replica_slots: replica slots per rank; 2 by default. An expert domain of `n` ranks requires `(n - 1) L`.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = hybridep(replica_slots=2)
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('HybridEP', 'AutoDispatch', 2)
    """
    system = System(balancers.HybridEP(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def feplb(
    replica_slots: int = 4,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return FEPLB: move the busiest experts, whole, to idle ranks of the domain during the static phase.

    Use it inside one NVLink domain, with copy engines for the weights. To save memory, create the system with
    `Direct()` instead: its receive buffer is sized for the balanced load, but the copies are not overlapped.

    Args:
        replica_slots: replica slots per rank, the maximum number of experts a rank can take; 4 by default.
        buffers: receive buffer; by default 2 x mean load before balancing and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch` in place of `TwoPhase`, the default.

    Examples:
        >>> system = feplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FEPLB', 'TwoPhase', 4)
    """
    system = System(balancers.FEPLB(), transport.PeerCopy(), transport.TwoPhase(), replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def fastermoe(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return FasterMoE: copy hot experts to every rank of the domain if its cost model predicts a gain.

    Use it to reproduce the baseline.

    Args:
        replica_slots: replica slots per rank; 2 by default. Each hot expert takes one on every other rank.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = fastermoe()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('FasterMoE', 'AutoDispatch', 2)
    """
    system = System(balancers.FasterMoE(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def eplb(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return EPLB: replicate experts by the load of earlier microbatches, with a new placement at fixed intervals.

    Use it as a baseline, and for slowly changing loads if no time is left for a planner.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = eplb()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLB', 'AutoDispatch', 2)
    """
    system = System(balancers.EPLB(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def eplb_plus(
    replica_slots: int = 2,
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return EPLB+: apply EPLB's rule to the load of every microbatch.

    Use it to reproduce this baseline of UltraEP's paper.

    Args:
        replica_slots: replica slots per rank; 2 by default.
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch`, or "direct", "once", "forward" or "rails"; by default chosen by rule per layer.

    Examples:
        >>> system = eplb_plus()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('EPLBPlus', 'AutoDispatch', 2)
    """
    system = System(balancers.EPLBPlus(), replica_slots=replica_slots)
    return with_options(system, buffers, headroom, max_rounds, dispatch)


def rails(
    buffers: Buffers | None = None,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return RailS: spread the tokens between nodes over all rails. The mesh axes must form the nodes.

    Use it on nodes with several network interfaces and unequal traffic per rank.

    Args:
        buffers: receive buffer; by default 1.05 x mean load and as many rounds as needed.
        headroom: rows of the receive buffer x mean load; `None` (default) takes that of `buffers`.
        max_rounds: maximum number of rounds; `None` (default) takes that of `buffers`.
        dispatch: a `Dispatch` in place of `MultiRailDispatch`, the default.

    Examples:
        >>> system = rails()
        >>> type(system.balancer).__name__, type(system.dispatch).__name__, system.replica_slots
        ('RailS', 'MultiRailDispatch', 0)
    """
    system = System(balancers.RailS(), dispatch=transport.MultiRailDispatch())
    return with_options(system, buffers, headroom, max_rounds, dispatch)


_SYSTEMS: dict[str, Callable[..., System]] = {
    "eplb": eplb,
    "eplb_plus": eplb_plus,
    "exact": exact,
    "fastermoe": fastermoe,
    "feplb": feplb,
    "greedy": greedy,
    "hybridep": hybridep,
    "plain": plain,
    "rails": rails,
    "two_tier": two_tier,
    "ultraep": ultraep,
}


COMPARED = {"echo": "ECHO", "epic": "EPIC", "llep": "LLEP", "lplb": "LPLB", "moonep": "MoonEP"}
"""Balancers of `jax_moe_lb.contrib` that `system_named` takes, too."""


def _compared(
    name: str,
    replica_slots: int = 2,
    *,
    headroom: float | None = None,
    max_rounds: int | None = None,
    dispatch: Dispatch | str | None = None,
) -> System:
    """Return the system of a balancer of `contrib`, with the options of the other systems."""
    # Imported where it is used, since layers need none of it.
    contrib = importlib.import_module("jax_moe_lb.contrib")
    system = System(getattr(contrib, COMPARED[name])(), replica_slots=replica_slots)
    return with_options(system, None, headroom, max_rounds, dispatch)


_NAMED = _SYSTEMS | {name: partial(_compared, name) for name in COMPARED}

NAMES = ", ".join(_NAMED)
"""All names that `system_named` takes, for messages and helps."""


def system_names() -> list[str]:
    """Return the names of the systems, sorted; `system_named` also takes balancers for comparisons, such as "moonep".

    Examples:
        >>> "exact" in system_names()
        True
    """
    return list(_SYSTEMS)


def system_named(text: str) -> System:
    """Return the system of a text, such as "exact" or "exact:replica_slots=4,headroom=1.25+once".

    All places that take a system as text parse it so: `nn.MoE`, `balance`, commands and configuration files.

    Args:
        text: `NAME[:OPTION=VALUE,...][+DISPATCH]`: one of `system_names()` or a balancer for comparisons, keyword
            arguments of its function, and a dispatch by name. The value "none" is the default.

    Raises:
        ValueError: `text` has another form or name, an option is not one of the function, or a value is out of range.

    Examples:
        >>> system_named("exact:replica_slots=4,headroom=1.25+once") == exact(4, headroom=1.25, dispatch="once")
        True
    """
    check_value("system", text, str)
    name, options = parse_system(text)
    return make_system(name, options)


def make_system(name: str, options: dict[str, Any]) -> System:
    """Return the system of a name with options of its function; the value `None` is the default."""
    if name not in _NAMED:
        raise ValueError(f"system is {shown(name)}; expected one of {NAMES}")
    made = _NAMED[name]
    given = {option: value for option, value in options.items() if value is not None}
    taken = [option for option in OPTIONS if option in inspect.signature(made).parameters]
    for option, value in given.items():
        if option not in taken:
            raise ValueError(f"{option} is {shown(value)}; expected none, as {name} takes {', '.join(taken)} only")
    return made(**given)

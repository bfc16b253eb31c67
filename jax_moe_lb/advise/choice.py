"""`Choice`, a system as a few values that a search changes one at a time.

`build` makes the system, `system_code` formats it as Python, and `train_flags` and `simulate_flags` as options.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.layer.system import with_dispatch
from jax_moe_lb.layer.systems import System, system_named
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.memory import memory_of
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.transport.compression import Codec
from jax_moe_lb.transport.forward import Forward
from jax_moe_lb.transport.once import Once
from jax_moe_lb.transport.replicate import Relay


@dataclass(frozen=True)
class Candidate:
    """System to compare with others."""

    name: str  # name in the table
    system: System  # the system. If it relocates, homes are planned from the steps before a workload.
    migration: Migration = field(default_factory=Migration)  # gathers of expert domains; none by default


HEADROOMS = (None, 1.25, 2.0)
"""Receive buffers relative to the mean load: a system's default 1.05, and larger ones that save rounds of uneven loads.
"""


@dataclass(frozen=True)
class Choice:
    """Point of the search space of `search`."""

    system: str = "plain"  # name of a function of `jax_moe_lb.layer.systems`; `"plain"` by default
    replica_slots: int = 0  # slots of a rank beyond its home experts; 0 (default) for systems without replicas
    eps: float | None = None  # `eps` of `Exact`; None (default) is the system's own
    relayed: bool = False  # if True, replicas of a system without relays travel along `Relay`
    sprayed: bool = False  # if True, tokens use all rails, planned after the balancer
    relocated: bool = False  # if True, experts move to new homes at intervals of training steps
    domain_sizes: tuple[int, ...] = ()  # expert-domain size of every level, outermost first; `()` (default) for none
    # Compression ratio of gathered experts; 1 (default) for none. Larger ratios change the computed values.
    ratio: float = 1.0
    # Receive buffer relative to the mean load; a larger buffer saves rounds. None (default) is the system's own.
    headroom: float | None = None

    @property
    def name(self) -> str:
        """Short name for tables."""
        parts = []
        if self.domain_sizes:
            sizes = ",".join(map(str, self.domain_sizes))
            parts.append(f"hybridep({sizes})" if self.ratio == 1 else f"hybridep({sizes}, ratio {self.ratio:g})")
        # Plain is listed only if there is no other part.
        alone = not (parts or self.sprayed or self.relocated)
        if self.system != "plain" or alone:
            options = [f"slots {self.replica_slots}"] if self.replica_slots else []
            options += [f"eps {self.eps}"] if self.eps is not None else []
            parts.append(self.system + (f"({', '.join(options)})" if options else ""))
        parts += ["relays"] * self.relayed + ["rails"] * self.sprayed + ["relocation"] * self.relocated
        parts += [f"headroom {self.headroom:g}"] if self.headroom is not None else []
        return " + ".join(parts)

    @property
    def family(self) -> "Choice":
        """Values shared by choices with other slots, `eps`, relays and headroom."""
        return replace(self, replica_slots=0, eps=None, relayed=False, headroom=None)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Complexity beyond plain expert parallelism: number of parts, slots, and sum of expert-domain sizes."""
        number = (self.system != "plain") + self.relayed + self.sprayed + self.relocated + bool(self.domain_sizes)
        return number + (self.eps is not None) + (self.headroom is not None), self.replica_slots, sum(self.domain_sizes)

    @property
    def with_less_room(self) -> list["Choice"]:
        """Choices with a smaller receive buffer, ascending."""
        return [replace(self, headroom=other) for other in HEADROOMS[: HEADROOMS.index(self.headroom)]]

    @property
    def with_more_room(self) -> list["Choice"]:
        """Choices with a larger receive buffer, ascending."""
        return [replace(self, headroom=other) for other in HEADROOMS[HEADROOMS.index(self.headroom) + 1 :]]

    def build_system(self) -> System:
        """Build the system, without the rule for its dispatch."""
        return _system_of(replace(self, domain_sizes=(), ratio=1.0))

    def build(self, model: ModelShape, cluster: Cluster, step: Step) -> Candidate:
        """Build the candidate, with the dispatch of `dispatch_by_rule`."""
        # Its expert domains gather again in the backward pass if memory is short.
        migration = Migration(self.domain_sizes, Codec(self.ratio))
        topology = cluster.topology(migration.group_sizes(cluster))
        system = self.build_system().by_rule(topology, model.experts, model.per_token)
        if self.domain_sizes:
            migration = with_memory(migration, model, cluster, step)
            there = math.inf if cluster.memory_bytes is None else cluster.memory_bytes
            bare, whole = (memory_of(system, model, cluster, one, step).total for one in (Migration(), migration))
            # If the home experts alone exceed the memory, gathering again does not help.
            if step.backward and bare <= there < whole:
                migration = replace(migration, gather_again=True)
        return Candidate(self.name, system, migration)


@lru_cache(maxsize=1024)
def _system_of(choice: Choice) -> System:
    """Build a system once for all expert domains."""
    system = system_named(choice.system)
    system = replace(system, replica_slots=choice.replica_slots, relocates=choice.relocated)
    if choice.eps is not None:
        system = replace(system, balancer=Exact(eps=choice.eps))
    if choice.relayed:
        system = replace(system, replicate=Relay())
    if choice.headroom is not None:
        system = system.replace(buffers=replace(system.dispatch.buffers, headroom=choice.headroom))
    return with_dispatch(system, "rails") if choice.sprayed else system


def with_memory(migration: Migration, model: ModelShape, cluster: Cluster, step: Step) -> Migration:
    """Gather again in the backward pass if the gathered experts of all layers exceed half of a rank's memory."""
    kept_bytes = model.layers * migration.gathered_bytes(model, cluster)
    # The other half is for parameters, optimizer and activations.
    short = cluster.memory_bytes is not None and kept_bytes > cluster.memory_bytes / 2
    return replace(migration, gather_again=migration.gather_again or (short and step.backward))


ONCE = {"once": Once, "forward": Forward}
"""Dispatches that send a token once, by their names on the command line."""


RELOCATE_INTERVAL = 50
"""Steps between relocations in the flags, the training program's default for systems that relocate."""


def system_code(choice: Choice, dispatch: str = "Direct") -> str:
    """Format the system as Python."""
    base, changes = system_parts(choice, dispatch)
    return f"replace({base}, {', '.join(changes)})" if changes else base


def system_parts(choice: Choice, dispatch: str = "Direct") -> tuple[str, list[str]]:
    """Format a named system as Python, and the arguments of `dataclasses.replace` that make the system of a choice."""
    buffers = f"Buffers(headroom={choice.headroom})" if choice.headroom is not None else ""
    if replace(choice, headroom=None, domain_sizes=(), ratio=1.0) == Choice(sprayed=True):
        return f"systems.rails({buffers})", []
    if _is_two_tier(choice) and dispatch.lower() not in ONCE:
        return f"systems.two_tier(replica_slots={choice.replica_slots})", []
    slots = [f"replica_slots={choice.replica_slots}"] if choice.replica_slots else []
    own_buffers = choice.sprayed or dispatch.lower() in ONCE
    options = slots + [f"buffers={buffers}"] * bool(buffers and not own_buffers)
    base = f"systems.{choice.system}({', '.join(options)})"
    balancer = f"{base}.balancer" if choice.eps is None else f"balancers.Exact(eps={choice.eps})"
    changes = [f"balancer={balancer}"] if choice.eps is not None else []
    if choice.sprayed:
        after = "balancers.RailS()" if choice.system == "plain" else f"Chain(({balancer}, balancers.RailS()))"
        changes = [f"balancer={after}", f"dispatch=transport.MultiRailDispatch({buffers})"]
    if dispatch.lower() in ONCE:
        changes.append(f"dispatch=transport.{dispatch}({buffers})")
    changes += ["replicate=transport.Relay()"] * choice.relayed + ["relocates=True"] * choice.relocated
    return base, changes


def _is_two_tier(choice: Choice) -> bool:
    return replace(choice, domain_sizes=(), ratio=1.0) == Choice(
        "exact", choice.replica_slots, relayed=True, relocated=True
    )


def _is_named(choice: Choice) -> bool:
    """Return whether a named system expresses the choice, apart from slots and headroom."""
    return choice.eps is None and not choice.relayed and not (choice.sprayed and choice.system != "plain")


def system_text(choice: Choice) -> str | None:
    """Format the system as text for `system_named`; `None` if no text expresses it."""
    two_tier = _is_two_tier(choice)
    if choice.domain_sizes or not (two_tier or _is_named(choice)):
        return None
    name = "two_tier" if two_tier else "rails" if choice.sprayed else choice.system
    slots = [f"replica_slots={choice.replica_slots}"] if choice.replica_slots else []
    room = [f"headroom={choice.headroom:g}"] if choice.headroom is not None else []
    return f"{name}:{','.join(slots + room)}" if slots or room else name


def train_flags(choice: Choice, cluster: Cluster, dispatch: str = "Direct") -> str | None:
    """Format the flags of `python -m models.train`; None if it has no flags for a choice."""
    two_tier, system = _is_two_tier(choice), system_text(choice)
    # Meshes of the training program have one node, in which no row uses a rail.
    if system is None or choice.sprayed or dispatch.lower() in ONCE:
        return None
    domain = [f"--mesh domain={cluster.ranks_per_domain}"] if choice.replica_slots or choice.relocated else []
    moves = [f"--set relocation.interval={RELOCATE_INTERVAL}"] if choice.relocated and not two_tier else []
    return " ".join([f"--system {system}", *domain, *moves])


def simulate_flags(choice: Choice, gather_again: bool = False, dispatch: str = "Direct") -> str | None:
    """Format the flags of `jax-moe-lb simulate`; None if it has no flags for a choice."""
    changed = choice.eps is not None or choice.ratio != 1 or choice.headroom is not None
    if gather_again or choice.relocated or choice.relayed or changed:
        return None
    last = ["rails"] * choice.sprayed + [name for name in ONCE if name == dispatch.lower()]
    # `rails` alone is the system of this name.
    alone = choice.domain_sizes and not last
    inner = [] if choice.system == "plain" and (choice.sprayed or alone) else [choice.system]
    parts = ["hybridep"] * bool(choice.domain_sizes) + inner + last
    sizes = [f"--domain-sizes {','.join(map(str, choice.domain_sizes))}"] if choice.domain_sizes else []
    slots = [f"--replica-slots {choice.replica_slots}"] if choice.replica_slots else []
    return " ".join([f"--system {'+'.join(parts)}", *slots, *sizes])

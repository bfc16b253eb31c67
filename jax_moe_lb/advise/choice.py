"""A `Choice`: a few values that define a system, for a search that changes one at a time.

`build` makes the system, and `usage` prints it as Python and as command-line flags.
"""

import math
from dataclasses import dataclass, field, replace

from jax_moe_lb.balancers.base import Chain
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.layer.systems import System, plain, system_named
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.memory import memory_of
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.transport.compression import Codec
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.replicate import Relay
from jax_moe_lb.transport.spray import MultiRailDispatch


@dataclass(frozen=True)
class Candidate:
    """A candidate is a system to compare with others.

    Args:
        name: its name in the table.
        system: its strategies. Where it relocates, homes are planned from what was before a workload.
        migration: the expert domains in which it gathers experts; none by default.
    """

    name: str
    system: System
    migration: Migration = field(default_factory=Migration)


@dataclass(frozen=True)
class Choice:
    """A choice is a point of the space that `search` looks through.

    Args:
        system: the name of a function of `jax_moe_lb.layer.systems`.
        replica_slots: the slots of a rank beyond its home experts; 0 for systems without replicas.
        eps: that of `Exact`; `None` for what the system has.
        relayed: whether replicas of a system without relays travel along `Relay`.
        sprayed: whether tokens take all rails, after the balancer.
        relocated: whether experts get new homes every so many steps.
        domain_sizes: the expert domains of every level, outermost first; `()` for none.
        ratio: the compression of experts that are gathered; 1 for none. More changes what is computed.
        headroom: the receive buffer over the mean load, which saves rounds; `None` for what the system has.

    Examples:
        >>> Choice("exact", 2, relayed=True, relocated=True).name
        'exact(slots 2) + relays + relocation'
        >>> Choice("plain", domain_sizes=(2, 1)).name
        'hybridep(2,1)'
    """

    system: str = "plain"
    replica_slots: int = 0
    eps: float | None = None
    relayed: bool = False
    sprayed: bool = False
    relocated: bool = False
    domain_sizes: tuple[int, ...] = ()
    ratio: float = 1.0
    headroom: float | None = None

    @property
    def name(self) -> str:
        """Says it in a few words."""
        parts = []
        if self.domain_sizes:
            sizes = ",".join(map(str, self.domain_sizes))
            parts.append(f"hybridep({sizes})" if self.ratio == 1 else f"hybridep({sizes}, ratio {self.ratio:g})")
        # Plain beside something else is nothing.
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
        """Returns what it has in common with those that differ in slots, eps, relays and headroom alone."""
        return replace(self, replica_slots=0, eps=None, relayed=False, headroom=None)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Counts what it takes beyond plain expert parallelism: parts, then slots, then members of expert domains."""
        number = (self.system != "plain") + self.relayed + self.sprayed + self.relocated + bool(self.domain_sizes)
        return number + (self.eps is not None) + (self.headroom is not None), self.replica_slots, sum(self.domain_sizes)

    def build_system(self) -> System:
        """Makes the system."""
        system = system_named(self.system)
        system = replace(system, replica_slots=self.replica_slots, relocates=self.relocated)
        if self.eps is not None:
            system = replace(system, balancer=Exact(eps=self.eps))
        if self.relayed:
            system = replace(system, replicate=Relay())
        if self.headroom is not None:
            system = replace(system, dispatch=replace(system.dispatch, headroom=self.headroom))
        return with_rails(system) if self.sprayed else system

    def build(self, model: ModelShape, cluster: Cluster, step: Step) -> Candidate:
        """Makes the candidate; its expert domains gather again in the backward pass where memory is short.

        Args:
            model: the sizes of the layers.
            cluster: the machine.
            step: the passes of a step.
        """
        system, migration = self.build_system(), Migration()
        if self.domain_sizes:
            migration = with_memory(Migration(self.domain_sizes, Codec(self.ratio)), model, cluster, step)
            there = math.inf if cluster.memory_bytes is None else cluster.memory_bytes
            bare, whole = (memory_of(system, model, cluster, one, step).total for one in (Migration(), migration))
            # Where a rank lacks room for what it has at home, what it gathers decides nothing.
            if step.backward and bare <= there < whole:
                migration = replace(migration, gather_again=True)
        return Candidate(self.name, system, migration)


def with_memory(migration: Migration, model: ModelShape, cluster: Cluster, step: Step) -> Migration:
    """Gathers again in the backward pass if all layers' gathered experts take more than half of a rank's memory.

    Args:
        migration: the expert domains.
        model: the sizes of the layers.
        cluster: the machine.
        step: without a backward pass nothing is kept.
    """
    kept_bytes = model.layers * migration.gathered_bytes(model, cluster)
    # The other half is for parameters, optimizer and activations.
    short = cluster.memory_bytes is not None and kept_bytes > cluster.memory_bytes / 2
    return replace(migration, gather_again=migration.gather_again or (short and step.backward))


def with_rails(system: System) -> System:
    """Returns the system with its tokens sprayed over rails.

    Args:
        system: one whose tokens travel directly.

    Raises:
        ValueError: they do not.
    """
    dispatch = system.dispatch
    if dispatch != Direct(dispatch.headroom, dispatch.max_rounds):
        raise ValueError(f"dispatch is {dispatch}; expected Direct() before rails")
    balancer = RailS() if system.balancer == plain().balancer else Chain((system.balancer, RailS()))
    return replace(system, balancer=balancer, dispatch=MultiRailDispatch(dispatch.headroom, dispatch.max_rounds))


RELOCATE_INTERVAL = 50
"""The steps between relocations in the flags, the training program's own default for systems that relocate."""


@dataclass(frozen=True)
class Usage:
    """A usage says how to use a choice.

    Args:
        code: lines of Python, which name only exports of `jax_moe_lb` and `replace` of `dataclasses`; `mesh` and
            `topology` are yours.
        train: flags of `python -m models.train`; `None` where it has none for this.
        simulate: flags of `jax-moe-lb simulate`; `None` where it has none for this.
    """

    code: tuple[str, ...]
    train: str | None
    simulate: str | None


def usage(choice: Choice, cluster: Cluster, gather_again: bool = False) -> Usage:
    """Says how to use a choice.

    Args:
        choice: what to use.
        cluster: its levels name the axes of the mesh, and its domains bound where weights may move.
        gather_again: whether the backward pass gathers again.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> machine = Cluster((Links("node", 16, 50e9, links=8), Links("gpu", 8, 360e9)))
        >>> usage(Choice("exact", 2), machine).train
        '--system exact --replica-slots 2 --ranks-per-domain 8'
        >>> for line in usage(Choice("exact", 2, domain_sizes=(2, 1)), machine).code:
        ...     print(line)
        mesh = transport.hybrid_mesh(mesh, {"node": 2, "gpu": 1})
        domains = transport.ExpertDomains.from_mesh(mesh, topology)
        migrate = transport.GatherExpertDomain(domains)
        MoE(..., mesh=mesh, topology=domains.between, migrate=migrate, system=systems.exact(replica_slots=2))
    """
    return Usage(
        _code(choice, cluster, gather_again), _train(choice, cluster), None if gather_again else _simulate(choice)
    )


def _code(choice: Choice, cluster: Cluster, gather_again: bool) -> tuple[str, ...]:
    system = f"system={system_code(choice)}"
    if not choice.domain_sizes:
        return (f"MoE(..., {system})",)
    levels = zip(cluster.levels, choice.domain_sizes, strict=True)
    sizes = ", ".join(f'"{level.name}": {size}' for level, size in levels)
    codec = f", transport.Codec(ratio={choice.ratio})" if choice.ratio != 1 else ""
    lines = (
        f"mesh = transport.hybrid_mesh(mesh, {{{sizes}}})",
        "domains = transport.ExpertDomains.from_mesh(mesh, topology)",
        f"migrate = transport.GatherExpertDomain(domains{codec})",
        f"MoE(..., mesh=mesh, topology=domains.between, migrate=migrate, {system})",
    )
    return (*lines, "transport.scan_prefetched(..., gather_again=True)") if gather_again else lines


def system_code(choice: Choice) -> str:
    """Writes the system as Python.

    Args:
        choice: whose system to write.

    Examples:
        >>> system_code(Choice(sprayed=True, headroom=1.2))
        'replace(systems.plain(), balancer=balancers.RailS(), dispatch=transport.MultiRailDispatch(headroom=1.2))'
    """
    if choice == replace(Choice(sprayed=True), domain_sizes=choice.domain_sizes, ratio=choice.ratio):
        return "systems.rails()"
    if _is_two_tier(choice):
        return f"systems.two_tier(replica_slots={choice.replica_slots})"
    slots = f"replica_slots={choice.replica_slots}" if choice.replica_slots else ""
    base = f"systems.{choice.system}({slots})"
    balancer = f"{base}.balancer" if choice.eps is None else f"balancers.Exact(eps={choice.eps})"
    changes = [f"balancer={balancer}"] if choice.eps is not None else []
    if choice.sprayed:
        after = "balancers.RailS()" if choice.system == "plain" else f"Chain(({balancer}, balancers.RailS()))"
        changes = [f"balancer={after}", "dispatch=transport.MultiRailDispatch()"]
    if choice.headroom is not None:
        dispatch = "MultiRailDispatch" if choice.sprayed else "Direct"
        changes = [one for one in changes if not one.startswith("dispatch=")]
        changes.append(f"dispatch=transport.{dispatch}(headroom={choice.headroom})")
    changes += ["replicate=transport.Relay()"] * choice.relayed + ["relocates=True"] * choice.relocated
    return f"replace({base}, {', '.join(changes)})" if changes else base


def _is_two_tier(choice: Choice) -> bool:
    return replace(choice, domain_sizes=(), ratio=1.0) == Choice(
        "exact", choice.replica_slots, relayed=True, relocated=True
    )


def _is_named(choice: Choice) -> bool:
    """Tells whether nothing is changed in the system but its slots."""
    return choice.eps is None and not choice.relayed and not (choice.sprayed and choice.system != "plain")


def _train(choice: Choice, cluster: Cluster) -> str | None:
    two_tier = _is_two_tier(choice)
    if choice.domain_sizes or not (two_tier or _is_named(choice)):
        return None
    name = "two_tier" if two_tier else "rails" if choice.sprayed else choice.system
    domain = [f"--ranks-per-domain {cluster.ranks_per_domain}"] if choice.replica_slots or choice.relocated else []
    room = [f"--headroom {choice.headroom:g}"] if choice.headroom is not None else []
    moves = [f"--relocate-interval {RELOCATE_INTERVAL}"] if choice.relocated and not two_tier else []
    return " ".join([f"--system {name}", *_slots(choice), *domain, *room, *moves])


def _simulate(choice: Choice) -> str | None:
    if choice.relocated or choice.relayed or choice.eps is not None or choice.ratio != 1 or choice.headroom is not None:
        return None
    inner = [choice.system] if choice.system != "plain" or not (choice.sprayed or choice.domain_sizes) else []
    parts = ["hybridep"] * bool(choice.domain_sizes) + inner + ["rails"] * choice.sprayed
    sizes = [f"--domain-sizes {','.join(map(str, choice.domain_sizes))}"] if choice.domain_sizes else []
    return " ".join([f"--system {'+'.join(parts)}", *_slots(choice), *sizes])


def _slots(choice: Choice) -> list[str]:
    return [f"--replica-slots {choice.replica_slots}"] if choice.replica_slots else []

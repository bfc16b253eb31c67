"""A `Choice` says in a few values what to run, so that a search can change one of them; `build` makes a candidate."""

import math
from dataclasses import dataclass, field, replace

from jax_moe_lb.balancers.base import Chain
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.memory import memory_of
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.systems import System, plain, system_named
from jax_moe_lb.transport.codec import Codec
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.relay import Relay
from jax_moe_lb.transport.spray import Spray


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
        system: the name of a function of `jax_moe_lb.systems`.
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
    return replace(system, balancer=balancer, dispatch=Spray(dispatch.headroom, dispatch.max_rounds))

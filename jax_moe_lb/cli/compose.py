"""Systems by name, and what `+` makes of them: `ultraep`, `hybridep+exact`, `ultraep+rails`."""

import inspect
from dataclasses import replace

from jax_moe_lb import systems
from jax_moe_lb._custom_calls import has_planning_module
from jax_moe_lb.balancers.base import Chain
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.sim import Cluster, Migration, ModelShape, Step
from jax_moe_lb.sim.advise import Candidate, chosen_migration
from jax_moe_lb.systems import System
from jax_moe_lb.transport.codec import Codec
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.spray import Spray

GATHERED, SPRAYED = "hybridep", "rails"
"""What may stand before a system, and what may stand behind it."""

ADVISED = ("plain", "greedy", "ultraep", "exact", "eplb_plus", "fastermoe", "feplb")
"""Systems that need no history."""


def system_names() -> list[str]:
    """The functions of `systems.py`."""
    return sorted(
        name
        for name, value in vars(systems).items()
        if inspect.isfunction(value) and inspect.signature(value).return_annotation is System
    )


def compose(
    name: str,
    model: ModelShape,
    cluster: Cluster,
    step: Step,
    replica_slots: int | None = None,
    migration: Migration = Migration(),
) -> Candidate:
    """What a name stands for on a cluster.

    Args:
        name: one of `system_names()`, `hybridep+` before it, `+rails` behind it. `hybridep` gathers experts in domains,
            as `Migrate` does.
        model: for the domains that `hybridep` chooses.
        cluster: likewise.
        step: likewise.
        replica_slots: of systems that have some; theirs by default.
        migration: its domains, if it has some, instead of the chosen ones; its codec in any case.

    Raises:
        ValueError: no such system, or parts that do not fit together; the message says what there is.
    """
    parts = name.split("+")
    middle = parts[parts[0] == GATHERED :]
    sprayed = middle[-1:] == [SPRAYED]
    middle = middle[: len(middle) - sprayed]
    known = [other for other in system_names() if other not in (GATHERED, SPRAYED)]
    if len(middle) > 1 or (middle and middle[0] not in known):
        raise ValueError(
            f"--system is {name!r}; expected one of {', '.join(known)}, with {GATHERED}+ before it, +{SPRAYED} behind "
            f"it, or {GATHERED} or {SPRAYED} alone"
        )
    system = _with_slots(getattr(systems, middle[0])() if middle else systems.plain(), replica_slots)
    if sprayed:
        system = _sprayed(name, system)
    if parts[0] == GATHERED and not migration.domain_sizes:
        chosen = chosen_migration(model, cluster, migration.codec, step)
        again = migration.gather_again or chosen.gather_again
        migration = replace(migration, domain_sizes=chosen.domain_sizes, gather_again=again)
    migration.sizes(cluster)
    return Candidate(name, system, migration)


def candidates(model: ModelShape, cluster: Cluster, step: Step, codec: Codec) -> list[Candidate]:
    """All that may help here: systems, and their compositions with domains and rails where there are some."""
    names = [name for name in ADVISED if name != "exact" or has_planning_module()]
    best = "exact" if has_planning_module() else "greedy"
    topology = cluster.topology()
    if topology.num_ranks > topology.ranks_per_node and topology.rails_per_node > 1:
        names += [SPRAYED, f"ultraep+{SPRAYED}", f"{best}+{SPRAYED}"]
    migration = Migration(codec=codec)
    gathered = compose(GATHERED, model, cluster, step, None, migration)
    if max(gathered.migration.domain_sizes) > 1:
        names += [GATHERED, f"{GATHERED}+ultraep", f"{GATHERED}+{best}"]
    return [
        compose(name, model, cluster, step, None, migration if name.startswith(GATHERED) else Migration())
        for name in names
    ]


def _with_slots(system: System, replica_slots: int | None) -> System:
    if replica_slots is None or (system == systems.plain() and not replica_slots):
        return system
    if not system.replica_slots:
        raise ValueError(f"--replica-slots is {replica_slots}; expected none, as this system has no replicas")
    return replace(system, replica_slots=replica_slots)


def _sprayed(name: str, system: System) -> System:
    if system.dispatch != Direct(system.dispatch.headroom):
        raise ValueError(f"--system is {name!r}; expected a system whose tokens travel directly before +{SPRAYED}")
    balancer = RailS() if system == systems.plain() else Chain((system.balancer, RailS()))
    return replace(system, balancer=balancer, dispatch=Spray(system.dispatch.headroom))

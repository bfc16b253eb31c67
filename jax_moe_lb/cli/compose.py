"""`compose` makes systems by name, and of what `+` joins: `ultraep`, `hybridep+exact`, `ultraep+rails`."""

from dataclasses import replace

from jax_moe_lb import systems
from jax_moe_lb.sim import Cluster, Migration, ModelShape, Step
from jax_moe_lb.sim.advise import chosen_migration
from jax_moe_lb.sim.choice import Candidate, with_rails
from jax_moe_lb.systems import System, system_names

GATHERED, SPRAYED = "hybridep", "rails"
"""The first may stand before a system, the second behind it."""


def compose(
    name: str,
    model: ModelShape,
    cluster: Cluster,
    step: Step,
    replica_slots: int | None = None,
    migration: Migration = Migration(),
) -> Candidate:
    """Makes what a name stands for on a cluster.

    Args:
        name: one of `system_names()`, with `hybridep+` before it and `+rails` behind it if wanted. `hybridep` gathers
            experts in expert domains, as `Migrate` does.
        model: the model for which `hybridep` chooses expert domains.
        cluster: the machine for which it does.
        step: the passes for which it does.
        replica_slots: slots of a rank beyond its home experts, for systems that have replicas; `None` takes theirs.
        migration: its expert domains, if it has some, replace the chosen ones; its codec is used in any case.

    Raises:
        ValueError: there is no such system, or its parts do not fit together; the message says what there is.
    """
    parts = name.split("+")
    # `True` counts as 1: this is the name without its first part, if that is hybridep.
    middle = parts[parts[0] == GATHERED :]
    sprayed = middle[-1:] == [SPRAYED]
    middle = middle[: len(middle) - sprayed]
    known = [other for other in system_names() if other not in (GATHERED, SPRAYED)]
    if len(middle) > 1 or (middle and middle[0] not in known):
        raise ValueError(
            f"--system is {name!r}; expected one of {', '.join(known)}, with {GATHERED}+ before it, +{SPRAYED} behind "
            f"it, or {GATHERED} or {SPRAYED} alone"
        )
    system = with_slots(systems.system_named(middle[0]) if middle else systems.plain(), replica_slots)
    if sprayed:
        system = with_spray(name, system)
    if parts[0] == GATHERED and not migration.domain_sizes:
        chosen = chosen_migration(model, cluster, migration.codec, step)
        # A user may ask to gather again where memory would allow to keep, not the reverse.
        again = migration.gather_again or chosen.gather_again
        migration = replace(migration, domain_sizes=chosen.domain_sizes, gather_again=again)
    # It raises for sizes that do not fit the cluster, before anything is simulated.
    migration.sizes(cluster)
    return Candidate(name, system, migration)


def with_slots(system: System, replica_slots: int | None) -> System:
    """Returns the system with another number of replica slots, `None` for its own.

    Raises:
        ValueError: it has no replicas.
    """
    if replica_slots is None or (system == systems.plain() and not replica_slots):
        return system
    if not system.replica_slots:
        raise ValueError(f"--replica-slots is {replica_slots}; expected none, as this system has no replicas")
    return replace(system, replica_slots=replica_slots)


def with_spray(name: str, system: System) -> System:
    """Returns the system with its tokens sprayed over rails.

    Args:
        name: what the user called it, for the message.
        system: one whose tokens travel directly.

    Raises:
        ValueError: they do not.
    """
    try:
        return with_rails(system)
    except ValueError as error:
        wanted = f"expected a system whose tokens travel directly before +{SPRAYED}"
        raise ValueError(f"--system is {name!r}; {wanted}") from error

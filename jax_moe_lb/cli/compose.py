"""`compose` makes systems by name, and of what `+` joins: `ultraep`, `hybridep+exact`, `ultraep+rails`."""

from dataclasses import replace

from jax_moe_lb import systems
from jax_moe_lb._custom_calls import has_planning_module
from jax_moe_lb.balancers.base import Chain
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.sim import Cluster, Migration, ModelShape, Step
from jax_moe_lb.sim.advise import Candidate, chosen_migration
from jax_moe_lb.systems import System, system_names
from jax_moe_lb.transport.codec import Codec
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.spray import Spray

GATHERED, SPRAYED = "hybridep", "rails"
"""The first may stand before a system, the second behind it."""

ADVISED = ("plain", "greedy", "ultraep", "exact", "eplb_plus", "fastermoe", "feplb")
"""These systems need no history, so one step shows what they do."""


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


def candidates(model: ModelShape, cluster: Cluster, step: Step, codec: Codec) -> list[Candidate]:
    """Lists all that may help here: systems, and compositions with expert domains and rails where there are some.

    Args:
        model: the model to train.
        cluster: the machine.
        step: the passes of a step.
        codec: what experts are encoded with where they are gathered.
    """
    names = [name for name in ADVISED if name != "exact" or has_planning_module()]
    # Without the planning module a trial of `exact` is a program to compile for every size of cluster: too slow.
    best = "exact" if has_planning_module() else "greedy"
    topology = cluster.topology()
    # Rows take rails only between nodes, and one rail leaves no choice.
    if topology.num_ranks > topology.ranks_per_node and topology.rails_per_node > 1:
        names += [SPRAYED, f"ultraep+{SPRAYED}", f"{best}+{SPRAYED}"]
    migration = Migration(codec=codec)
    gathered = compose(GATHERED, model, cluster, step, None, migration)
    # Where no level gathers hybridep is plain, and would stand in the table twice.
    if max(gathered.migration.domain_sizes) > 1:
        names += [GATHERED, f"{GATHERED}+ultraep", f"{GATHERED}+{best}"]
    return [
        compose(name, model, cluster, step, None, migration if name.startswith(GATHERED) else Migration())
        for name in names
    ]


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
    dispatch = system.dispatch
    if dispatch != Direct(dispatch.headroom, dispatch.max_rounds):
        raise ValueError(f"--system is {name!r}; expected a system whose tokens travel directly before +{SPRAYED}")
    balancer = RailS() if system == systems.plain() else Chain((system.balancer, RailS()))
    return replace(system, balancer=balancer, dispatch=Spray(dispatch.headroom, dispatch.max_rounds))

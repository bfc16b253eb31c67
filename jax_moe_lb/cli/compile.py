"""The command `compile`, and systems composed by `+`: `ultraep`, `hybridep+exact`, `ultraep+rails`."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

import typer

from jax_moe_lb.advise.advise import chosen_migration
from jax_moe_lb.advise.choice import Candidate, with_rails
from jax_moe_lb.aot.compile import quiet_stderr
from jax_moe_lb.aot.layer import LayerSizes, compile_layer
from jax_moe_lb.aot.report import print_report
from jax_moe_lb.aot.targets import Target, use_no_accelerators
from jax_moe_lb.cli.output import Json, one_line_errors, positive, print_json
from jax_moe_lb.layer import systems
from jax_moe_lb.layer.systems import System, system_named, system_names
from jax_moe_lb.recordings.yaml_file import shown
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.work import Migration

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
            experts in expert domains, as `GatherExpertDomain` does.
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


def compile_command(
    target: Annotated[
        str, typer.Option("--target", metavar="TARGET", help="h100:1x8, gb200:1x18x4, v5e:2x4 or the like.")
    ],
    system: Annotated[
        str, typer.Option("--system", metavar="NAME", help="exact, ultraep, exact+rails or the like.")
    ] = "exact",
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", metavar="H=N,...", help="H=2048,F=768,E=128,T=4096,K=8 by default."),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="The gradients too.")] = False,
    fused: Annotated[bool, typer.Option("--fused", help="Gate and up projection in one weight.")] = False,
    replica_slots: Annotated[str | None, typer.Option("--replica-slots", metavar="N", help="Of each rank.")] = None,
    headroom: Annotated[
        str | None, typer.Option("--headroom", metavar="X", help="Receive buffer over the mean load.")
    ] = None,
    max_rounds: Annotated[
        str | None, typer.Option("--max-rounds", metavar="N", help="As many as a plan needs by default.")
    ] = None,
    own_kernels: Annotated[
        bool, typer.Option("--own-kernels", help="Products on Hopper by kernels of this library, not tokamax's.")
    ] = False,
    options: Annotated[
        list[str] | None, typer.Option("--xla", metavar="NAME=VALUE", help="An option of XLA; may be repeated.")
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Let the compiler write on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Compile a layer for a machine that need not be there: what each device holds, computes, sends and waits for.

    It needs the compiler of the machine: jax_moe_lb[cuda] or jax_moe_lb[tpu].
    """
    with one_line_errors():
        machine, layer = Target.parse(target), LayerSizes.parse(",".join(sizes)) if sizes else LayerSizes()
        chosen = _system(system, replica_slots, headroom, max_rounds)
        chosen = chosen.with_own_kernels() if own_kernels else chosen
        for_xla = _options(options)
        machine.require_compiler()
        with nullcontext() if logs else quiet_stderr():
            use_no_accelerators()
            report = compile_layer(chosen, machine, layer, gradients=train, fused=fused, options=for_xla)
        passes = "forward and gradients" if train else "forward"
        shape = ", ".join(f"{letter} {value}" for letter, value in layer.by_letter.items())
        title = f"{system} on {target}, {passes}, {shape}"
        if as_json:
            print_json({"title": title, **report.to_json()})
        else:
            print_report(report, title)


def _system(name: str, replica_slots: str | None, headroom: str | None, max_rounds: str | None) -> System:
    first, _, behind = name.partition("+")
    if first not in system_names() or behind not in ("", SPRAYED):
        raise ValueError(
            f"--system is {shown(name)}; expected one of {', '.join(system_names())}, with +{SPRAYED} behind it or not"
        )
    system = with_slots(system_named(first), positive("--replica-slots", replica_slots))
    if headroom is not None:
        system = replace(system, dispatch=replace(system.dispatch, headroom=_number("--headroom", headroom)))
    if max_rounds is not None:
        rounds = positive("--max-rounds", max_rounds)
        system = system.with_rounds(rounds)
    return with_spray(name, system) if behind else system


def _number(argument: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{argument} is {shown(text)}; expected a number above 0")
    return value


def _options(given: list[str] | None) -> dict[str, str | bool]:
    pairs = [text.partition("=") for text in given or []]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ValueError(f"--xla is {shown(name)}; expected NAME=VALUE, such as xla_gpu_autotune_level=0")
    words: dict[str, str | bool] = {"true": True, "false": False}
    return {name.removeprefix("--"): words.get(value.lower(), value) for name, _, value in pairs}

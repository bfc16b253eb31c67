"""Commands `compile` and `tune`, and systems of `--system`, such as `hybridep+exact` and `ultraep+rails`."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx

from jax_moe_lb.advise.advise import chosen_migration
from jax_moe_lb.advise.choice import Candidate
from jax_moe_lb.aot.compile import quiet_stderr
from jax_moe_lb.aot.layer import compile_layer
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, LayerSizes, check_sizes, counts_of
from jax_moe_lb.aot.operation_time import rates_of
from jax_moe_lb.aot.report import ProgramReport, print_report
from jax_moe_lb.aot.targets import Target, use_no_accelerators
from jax_moe_lb.aot.timeline import Timeline
from jax_moe_lb.aot.timeline_report import print_difference, print_timeline, read_timeline, summary, write_timeline
from jax_moe_lb.aot.tune import Tuned, print_tuned, tune, usage_lines
from jax_moe_lb.cli.output import (
    Json,
    OutputPath,
    SystemReplicaSlots,
    one_line_errors,
    option,
    parse_integer,
    parse_number,
    print_json,
    printing,
    working,
)
from jax_moe_lb.core.checks import Least, shown
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.core.quantities import size
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.system import System, parse_system
from jax_moe_lb.layer.systems import make_system
from jax_moe_lb.nn.config import ExpertConfig, Precision
from jax_moe_lb.nn.moe import MoE
from jax_moe_lb.recordings.counts_files import naming
from jax_moe_lb.routing.routers import TopK
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.transport import Saved

GATHERED = "hybridep"
"""First part of a composed name, before another system."""


def compose(
    name: str,
    model: ModelShape,
    cluster: Cluster,
    step: Step,
    replica_slots: int | None = None,
    migration: Migration = Migration(),
) -> Candidate:
    """Construct the candidate of a composed system name, with the dispatch of `dispatch_by_rule`."""
    first, _, rest = name.partition("+")
    gathers = first == GATHERED
    if gathers and rest.startswith(GATHERED):
        raise ValueError(f"system is {shown(name)}; expected another system than {GATHERED} after {GATHERED}+")
    system = system_of((rest or "plain") if gathers else name, replica_slots=replica_slots)
    if gathers and not migration.domain_sizes:
        chosen = chosen_migration(model, cluster, migration.codec, step)
        # A configuration may request a second gather although memory suffices, but not the reverse.
        again = migration.gather_again or chosen.gather_again
        migration = replace(migration, domain_sizes=chosen.domain_sizes, gather_again=again)
    # Raise for invalid sizes before the simulation starts.
    topology = cluster.topology(migration.group_sizes(cluster))
    return Candidate(name, system.by_rule(topology, model.experts, model.per_token), migration)


def takes_slots(name: str) -> bool:
    """Return whether a composed system name leaves the number of replica slots open."""
    first, _, rest = name.partition("+")
    system, options = parse_system((rest or "plain") if first == GATHERED else name)
    return "replica_slots" not in options and make_system(system, {}).replica_slots > 0


def system_of(
    text: str, replica_slots: int | None = None, headroom: float | None = None, max_rounds: int | None = None
) -> System:
    """Return the system of the option `--system` with those of further options."""
    name, options = parse_system(text)
    if not replica_slots and not make_system(name, {}).replica_slots:
        replica_slots = None
    given = {"replica_slots": replica_slots, "headroom": headroom, "max_rounds": max_rounds}
    for key, value in given.items():
        if value is not None and options.setdefault(key, value) != value:
            raise ValueError(f"{key} is {value}; expected none, as --system {text} gives it")
    return make_system(name, options)


TargetName = Annotated[
    str, option("--target", "TARGET", "Machine: GPU:NODESxGPUS such as h100:1x8, or a slice, v5e:2x4.")
]

Sizes = Annotated[
    list[str] | None,
    option(
        "--sizes",
        "H=N,F=N",
        "Hidden and inner width, experts, tokens per rank, experts per token.",
        "H=2048,F=768,E=128,T=4096,K=8",
    ),
]

SystemName = Annotated[str, option("--system", "NAME[:KEY=VALUE]", "System, such as exact:headroom=1.25+rails.")]

LoadName = Annotated[str, option("--load", "LOAD", "Load of the timeline: uniform, zipf:S or a counts file.")]


def compile_command(
    target: TargetName,
    system: SystemName = "exact",
    sizes: Sizes = None,
    train: Annotated[bool, typer.Option("--train", help="Compile the gradients too.")] = False,
    fused: Annotated[bool, typer.Option("--fused", help="Store gate and up projection in one weight.")] = False,
    replica_slots: SystemReplicaSlots = None,
    headroom: Annotated[
        str | None, option("--headroom", "X", "Receive buffer over the mean load.", "from the system")
    ] = None,
    max_rounds: Annotated[
        str | None, option("--max-rounds", "N", "Most dispatch rounds.", "as many as a plan needs")
    ] = None,
    saved: Annotated[
        list[str] | None, option("--saved", "NAME", "Saved arrays: replicas, rows or hidden; may be repeated.")
    ] = None,
    options: Annotated[list[str] | None, option("--xla", "NAME=VALUE", "Option of XLA; may be repeated.")] = None,
    timeline: Annotated[
        Path | None,
        option("--timeline", "OUT.json", "Output trace of the estimated step, for Perfetto."),
        OutputPath(".json"),
    ] = None,
    load: LoadName = DEFAULT_LOAD,
    against: Annotated[Path | None, option("--against", "FILE", "Other timeline to compare with.")] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the compiler's log on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Compile a layer for an absent machine and report its cost.

    The report has the memory, FLOPs, traffic and waits per device. The compiler of the machine is required: run
    pip install '.[cuda]' or pip install '.[tpu]' in a checkout.
    """
    given = {"system": system, "replica_slots": replica_slots, "headroom": headroom, "max_rounds": max_rounds}
    with one_line_errors(target=target, sizes=_joined(sizes), load=load, **given):
        machine, layer = Target.parse(target), LayerSizes.parse(_joined(sizes)) if sizes else LayerSizes()
        chosen = system_of(
            system,
            parse_integer("--replica-slots", replica_slots, least=0),
            None if headroom is None else parse_number("--headroom", headroom, Least(0.0, excluded=True)),
            parse_integer("--max-rounds", max_rounds),
        )
        chosen = chosen.replace(saved=_saved(saved)) if saved else chosen
        for_xla = _options(options)
        other = None if against is None else read_timeline(against)
        if load != DEFAULT_LOAD and timeline is None and other is None:
            raise ValueError(f"load is {shown(load)}; expected {DEFAULT_LOAD} without --timeline and --against")
        planned = planned_load(machine, layer, chosen, load) if timeline or other else None
        machine.require_compiler()
        with nullcontext() if logs else quiet_stderr():
            use_no_accelerators()
            report = compile_layer(chosen, machine, layer, gradients=train, fused=fused, options=for_xla)
        passes = "forward and gradients" if train else "forward"
        shape = ", ".join(f"{letter} {value}" for letter, value in layer.by_letter.items())
        title = f"{system} on {target}, {passes}, {shape}"
        found = report.timeline(planned) if planned is not None else None
        if found is not None and timeline is not None:
            with naming("--timeline", timeline), whole_file(timeline) as part:
                write_timeline(part, found, title)
        with printing():
            _show(report, title, found, other, as_json)


def _show(
    report: ProgramReport, title: str, found: Timeline | None, other: Mapping[str, Any] | None, as_json: bool
) -> None:
    """Print the report, or the timeline and its difference to another one."""
    if as_json:
        sums = {} if found is None else {"timeline": summary(found, title)}
        others = {} if other is None else {"against": other}
        print_json({"title": title, **report.to_json(), **sums, **others})
    elif found is None:
        print_report(report, title)
    else:
        print_timeline(found, title)
        if other is not None:
            print_difference(found, other)


def planned_load(machine: Target, layer: LayerSizes, system: System, load: str) -> LayerLoad:
    """Return the load of a timeline, after all checks that need no compiler."""
    rates_of(machine)
    topology = machine.topology()
    check_sizes(layer, topology.num_ranks)
    return LayerLoad.of(system, layer, topology, counts_of(load, layer, topology.num_ranks), load)


def _joined(sizes: list[str] | None) -> str:
    return ",".join(sizes or ())


def _saved(names: list[str]) -> Saved:
    known = [field.name for field in fields(Saved)]
    for name in names:
        if name not in known:
            raise ValueError(f"--saved is {shown(name)}; expected one of {', '.join(known)}")
    return Saved(*(name in names for name in known))


def _options(given: list[str] | None) -> dict[str, str | bool]:
    pairs = [text.partition("=") for text in given or []]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ValueError(f"--xla is {shown(name)}; expected NAME=VALUE, such as xla_gpu_autotune_level=0")
    booleans: dict[str, str | bool] = {"true": True, "false": False}
    options = {name.removeprefix("--"): booleans.get(value.lower(), value) for name, _, value in pairs}
    if len(options) < len(pairs):
        raise ValueError(f"--xla is {shown(', '.join(given or []))}; expected every option once")
    return options


def tune_command(
    target: TargetName,
    system: SystemName = "exact",
    sizes: Sizes = None,
    memory: Annotated[str | None, option("--memory", "SIZE", "Memory of a device, as 2GB.", "5 % more")] = None,
    layers: Annotated[str, option("--layers", "N", "Layers whose residuals exist together.")] = "1",
    load: LoadName = DEFAULT_LOAD,
    as_json: Json = False,
) -> None:
    """Find the fastest form of a layer for an absent machine.

    It compiles about ten forms of the layer with gradients, each in 10 to 30 seconds, and estimates their times. The
    forms differ in dispatch, chunks, saved arrays and the scheduler of the compiler.
    """
    with one_line_errors(target=target, sizes=_joined(sizes), layers=layers, memory=memory, load=load):
        machine, shape = Target.parse(target), LayerSizes.parse(_joined(sizes)) if sizes else LayerSizes()
        chosen, number = system_of(system), parse_integer("--layers", layers)
        limit = None if memory is None else _bytes(memory)
        planned_load(machine, shape, chosen, load)
        machine.require_compiler()
        use_no_accelerators()
        with quiet_stderr():
            layer, x = _layer(machine, shape, chosen)
        with working("compiling") as tell:
            tuned = tune(layer, x, memory_bytes=limit, layers=number or 1, load=load, progress=tell)
        if as_json:
            print_json(_tuned_json(tuned))
        else:
            with printing():
                print_tuned(tuned)


def _layer(machine: Target, sizes: LayerSizes, system: System) -> tuple[MoE, jax.ShapeDtypeStruct]:
    """Return an abstract layer and the tokens of all ranks, in bfloat16."""
    mesh = machine.mesh()
    topology = Topology.from_mesh(mesh, mesh.axis_names, rails_per_node=mesh.shape["expert"])

    def make() -> MoE:
        return MoE(
            sizes.hidden,
            sizes.experts,
            TopK(sizes.per_token),
            mesh=mesh,
            topology=topology,
            system=system,
            experts=ExpertConfig(sizes.inner),
            precision=Precision(jnp.bfloat16, jnp.bfloat16),
            rngs=nnx.Rngs(0),
        )

    return nnx.eval_shape(make), jax.ShapeDtypeStruct((mesh.size * sizes.tokens, sizes.hidden), jnp.bfloat16)


def _bytes(text: str) -> int:
    try:
        return int(size(text))
    except ValueError as error:
        raise ValueError(f"--memory {error}") from error


def _tuned_json(tuned: Tuned) -> dict[str, Any]:
    named = {"system": repr(tuned.system), "best": tuned.best.name, "usage": usage_lines(tuned)}
    forms = [vars(form) | {"system": repr(form.system)} for form in tuned.tried]
    return vars(tuned) | named | {"tried": forms}

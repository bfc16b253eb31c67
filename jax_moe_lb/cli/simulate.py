"""The commands of the simulator, their arguments and their tables."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Int
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.cli.compile import compose
from jax_moe_lb.cli.output import (
    Json,
    note,
    one_line_errors,
    positive,
    print_json,
    print_table,
    print_text,
    with_progress,
)
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.core.topology import INT32_MAX, home_experts_per_rank
from jax_moe_lb.recordings.counts_files import naming, read_routing
from jax_moe_lb.recordings.yaml_file import check_timeline, forecast, shown
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.config import SimulationConfig, load_config, preset_names
from jax_moe_lb.sim.loads import drifting_counts, skewed_counts
from jax_moe_lb.sim.memory import HbmTraffic, traffic_of
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.run import Report, keeps_history, mean_report, remembered, replay
from jax_moe_lb.sim.trace import write_png, write_trace
from jax_moe_lb.sim.work import Migration

PRESETS = ", ".join(preset_names())

CYCLE = 3
"""Systems that keep history plan every so many steps."""

CountsOption = Int[np.ndarray, "steps layers R E"]

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="COUNTS", help="Recorded counts, an npy or npz; drawn ones by default."),
]
TokensOption = Annotated[
    str | None, typer.Option("--tokens", metavar="T", help="Tokens per rank, instead of the model's.")
]
Imbalance = Annotated[
    str | None, typer.Option("--imbalance", metavar="X", help="Of drawn counts: max / mean of the ranks' load.")
]


def model_of(argument: str, source: str, config: SimulationConfig, tokens: str | None) -> ModelShape:
    """Makes the model of a file, with other tokens per rank if some were given."""
    if config.model is None:
        raise ValueError(f"{argument} {source} has no model; expected one, or the name of a preset")
    model = config.model.build()
    wanted = positive("--tokens", tokens, INT32_MAX)
    return model if wanted is None else replace(model, tokens=wanted)


def cluster_of(argument: str, source: str, config: SimulationConfig) -> Cluster:
    """Makes the machine of a file."""
    if config.cluster is None:
        raise ValueError(f"{argument} {source} has no cluster; expected one, or the name of a preset")
    return config.cluster.build()


def counts_of(
    config: SimulationConfig, model: ModelShape, cluster: Cluster, trace: Path | None, imbalance: str | None
) -> CountsOption:
    """Reads recorded counts, or draws those that a file describes."""
    if trace is not None:
        return recorded_counts(model, cluster, trace)
    layers = min(config.routing.layers, model.layers)
    wanted = imbalance_of(config, imbalance)
    return skewed_counts(model, cluster.num_ranks, wanted, layers, config.routing.seed, config.routing.shape)[None]


def drifted_counts_of(
    config: SimulationConfig, model: ModelShape, cluster: Cluster, imbalance: str | None
) -> CountsOption:
    """Draws steps for systems that plan from earlier ones: a cycle of theirs that is only remembered, and one more."""
    layers, routing = min(config.routing.layers, model.layers), config.routing
    wanted, times = imbalance_of(config, imbalance), range(2 * CYCLE)
    return drifting_counts(model, cluster.num_ranks, times, layers, routing.drift, wanted, routing.seed, routing.shape)


def recorded_counts(model: ModelShape, cluster: Cluster, trace: Path) -> CountsOption:
    """Reads the counts of a trace, which must have the machine's ranks and the model's experts."""
    counts = read_routing(trace)
    if counts.shape[2:] != (cluster.num_ranks, model.experts):
        raise ValueError(
            f"--trace {trace} has {counts.shape[2]} ranks and {counts.shape[3]} experts; expected the cluster's "
            f"{cluster.num_ranks} ranks and the model's {model.experts} experts"
        )
    return counts


def as_recorded(model: ModelShape, counts: CountsOption, trace: Path | None) -> ModelShape:
    """Gives the model as many tokens as the rank of a trace that has most."""
    if trace is None:
        return model
    tokens = -(-int(counts.sum(3).max()) // model.per_token)
    # A trace may hold no tokens at all, a model has at least one.
    return replace(model, tokens=max(tokens, 1))


def imbalance_of(config: SimulationConfig, text: str | None) -> float:
    """Reads the number of `--imbalance`; without one, the file's."""
    if text is None:
        return config.routing.imbalance
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise ValueError(f"--imbalance is {shown(text)}; expected a number, at least 1")
    return value


def slots_of(text: str | None, given: int | None, model: ModelShape, cluster: Cluster) -> int | None:
    """Reads the number of `--replica-slots`, or takes the file's; no rank has a slot for an expert that it has at home.

    Args:
        text: what the user wrote, `None` for nothing.
        given: `replica_slots` of the file.
        model: `E` is its experts.
        cluster: `L` is how many of them each of its ranks has at home.

    Raises:
        ValueError: it is more than `E - L`, or no number.
    """
    name, wanted = "replica_slots", given
    if text is not None:
        # No slots may be asked for, where a system has replicas by default.
        name, wanted = "--replica-slots", 0 if text == "0" else positive("--replica-slots", text, INT32_MAX)
    most = model.experts - home_experts_per_rank(model.experts, cluster.num_ranks, "model")
    if wanted is not None and wanted > most:
        raise ValueError(f"{name} is {wanted}; expected at most {most}, the experts that a rank does not have at home")
    return wanted


UNITS = (("ms", 1e3, 10.0), ("s", 1.0, 600.0), ("min", 1 / 60, 7200.0), ("h", 1 / 3600, float("inf")))
"""Each with how many there are in a second, and up to how many seconds it is used."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Chooses the unit in which a step of so many seconds reads well, for all times of a table."""
    return next((name, per_s) for name, per_s, most_s in UNITS if seconds < most_s)


def report_json(report: Report) -> dict[str, Any]:
    """Collects all numbers of a report, without its timeline."""
    stages = {name: asdict(stage) | {"hidden_s": stage.hidden_s} for name, stage in report.stages.items()}
    return {
        "step_s": report.step_s,
        "imbalance_before": report.imbalance_before,
        "imbalance_after": report.imbalance_after,
        "rounds": report.rounds,
        "stages": stages,
        "level_bytes": report.level_bytes,
        "memory_bytes": asdict(report.memory) | {"total": report.memory.total},
    }


def layer_table(head: dict[str, Any], report: Report, hbm: HbmTraffic) -> Table:
    """Makes a table with a line for every stage, and one for the step."""
    title = ", ".join(f"{name} {value}" for name, value in head.items())
    moved = ", ".join(f"{name} {decimal(round(total))}" for name, total in report.level_bytes.items())
    parts = ", ".join(f"{name} {decimal(round(value))}" for name, value in report.memory.by_name.items())
    in_memory = ", ".join(f"{name} {decimal(round(value))}" for name, value in asdict(hbm).items() if value)
    caption = (
        f"imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}, rounds {report.rounds}\n"
        f"sent over all links: {moved}\nmemory of a rank: {decimal(round(report.memory.total))} ({parts})\n"
        f"read and written in its memory in a layer: {decimal(round(hbm.total))} ({in_memory})"
    )
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    unit, per_s = time_unit(report.step_s)
    for header in (f"busy {unit}", f"exposed {unit}", f"hidden {unit}", "of the step", "sent"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, stage in report.stages.items():
        times = (f"{value * per_s:.3f}" for value in (stage.busy_s, stage.exposed_s, stage.hidden_s))
        # Of a step that takes no time there are no shares.
        share = f"{stage.exposed_s / report.step_s:.1%}" if report.step_s else "-"
        table.add_row(name, *times, share, decimal(round(stage.bytes)) if stage.bytes else "-")
    table.add_section()
    table.add_row("step", "", f"{report.step_s * per_s:.3f}", "", "", decimal(round(sum(report.level_bytes.values()))))
    return table


def simulate(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG.yaml|PRESET", help=f"A machine, a model and a system; presets are {PRESETS}."),
    ],
    system: Annotated[
        str | None, typer.Option("--system", metavar="NAME", help="plain, ultraep, hybridep+exact, ultraep+rails ...")
    ] = None,
    trace: TraceFile = None,
    imbalance: Imbalance = None,
    tokens: TokensOption = None,
    replica_slots: Annotated[str | None, typer.Option("--replica-slots", metavar="N", help="Of each rank.")] = None,
    domain_sizes: Annotated[
        str | None,
        typer.Option("--domain-sizes", metavar="S,S", help="Expert domains of hybridep, a number per level."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="OUT.json", help="Write a trace for Perfetto or Chrome.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw the first layers.")] = None,
    as_json: Json = False,
) -> None:
    """Predict a training step: its time, what of every stage is exposed, what travels, what memory it takes."""
    with one_line_errors():
        read = load_config("CONFIG", config)
        cluster, model = cluster_of("CONFIG", config, read), model_of("CONFIG", config, read, tokens)
        counts = counts_of(read, model, cluster, trace, imbalance)
        step, name = read.step.build(), system or read.system
        model = step.parallel.share(as_recorded(model, counts, trace), cluster)
        slots = slots_of(replica_slots, read.replica_slots, model, cluster)
        migration = _migration(read, name, domain_sizes)
        candidate = compose(name, model, cluster, step, slots, migration)
        states = None
        if trace is None and keeps_history(candidate.system, model, cluster):
            counts = drifted_counts_of(read, model, cluster, imbalance)
            states = remembered(candidate.system, model, cluster, counts[:CYCLE], candidate.migration)
            counts = counts[CYCLE:]
        planned = len(counts) * counts.shape[1]
        check_timeline(model.layers, cluster.num_ranks)
        note(forecast(planned * candidate.system.balancer.needs_counts, planned, *counts.shape[2:]))
        steps = replay(
            candidate.system, model, cluster, counts, migration=candidate.migration, step=step, states=states
        )
        report = mean_report(list(with_progress(steps, len(counts), "simulating")))
        _write(report, timeline, png, f"{config}, {name}")
        hbm = traffic_of(candidate.system, model, cluster, backward=step.backward)
        head = {"config": config, "system": name, "num_ranks": cluster.num_ranks, "layers": model.layers}
        if as_json:
            domains = list(candidate.migration.sizes(cluster))
            print_json({**head, "domain_sizes": domains, **report_json(report), "hbm_bytes": asdict(hbm)})
        else:
            print_table(layer_table(head, report, hbm))


def calibrate(
    out: Annotated[Path, typer.Argument(metavar="OUT.yaml", help="Written; `simulate` and `advise` read it.")],
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="R", help="Virtual devices if there is only a CPU; 2, at most 256.")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", metavar="HOST:PORT", help="Of several processes, which measure nodes, too."),
    ] = None,
    processes: Annotated[str | None, typer.Option("--processes", metavar="N", help="With a coordinator.")] = None,
    process: Annotated[
        str | None, typer.Option("--process", metavar="I", help="This one, from 1 on; the first writes OUT.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: grouped FFNs, exchanges, copies of weights and a planner, through the library's calls."""
    with one_line_errors():
        # It sets up devices, and what it imports is only for them.
        from jax_moe_lb.calibrate.machine_profile import to_yaml, warnings
        from jax_moe_lb.calibrate.measure import HIDDEN, INNER, MOST_RANKS, measure

        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"OUT is {out}; expected a file in a folder that exists")
        most_ranks = positive("--ranks", ranks, MOST_RANKS) or 2
        number = _join(coordinator, processes, process)
        found = measure(most_ranks)
        if number > 1:
            return
        text = to_yaml(found, HIDDEN, INNER)
        for line in warnings(found):
            note(line)
        with naming("OUT", out), whole_file(out) as part:
            part.write_text(text)
        # It is read again at once: what `simulate` would refuse is found here.
        load_config("OUT", str(out) if out.suffix in (".yaml", ".yml") else f"./{out}")
        if as_json:
            print_json({"out": str(out), **asdict(found)})
        else:
            print_text(text.removesuffix("\n"))


def _join(coordinator: str | None, processes: str | None, process: str | None) -> int:
    """Joins the other processes if there are some, and returns the number of this one."""
    given = positive("--processes", processes, INT32_MAX), positive("--process", process, INT32_MAX)
    if coordinator is None and given == (None, None):
        return 1
    number, this = given
    if coordinator is None or number is None or this is None or this > number:
        raise ValueError("--coordinator, --processes and --process go together; expected all three, I at most N")
    import jax

    try:
        jax.distributed.initialize(coordinator, number, this - 1)
    except RuntimeError as error:
        raise ValueError(f"--coordinator is {coordinator}: {error}; expected the address of the first") from error
    return this


def _migration(config: SimulationConfig, name: str, domain_sizes: str | None) -> Migration:
    found = config.migration.build()
    if domain_sizes is not None:
        sizes = tuple(positive("--domain-sizes", size, INT32_MAX) or 1 for size in domain_sizes.split(","))
        found = replace(found, domain_sizes=sizes)
    if found.domain_sizes and not name.startswith("hybridep"):
        raise ValueError(
            f"domain_sizes is {found.domain_sizes} for {name!r}; expected a system that starts with hybridep"
        )
    return found


def _write(report: Report, timeline: Path | None, png: Path | None, title: str) -> None:
    try:
        if timeline is not None:
            with naming("--timeline", timeline), whole_file(timeline) as part:
                write_trace(part, report.timeline)
        if png is not None:
            with naming("--png", png), whole_file(png) as part:
                write_png(part, report.timeline, title)
    except ImportError as error:
        raise ValueError("--png needs matplotlib; install jax_moe_lb[train]") from error

"""Commands `simulate` and `calibrate`, with arguments and tables."""

from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Int
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.cli.compile import GATHERED, compose, takes_slots
from jax_moe_lb.cli.output import (
    FileLimitsOption,
    Json,
    OutputPath,
    SystemReplicaSlots,
    note,
    one_line_errors,
    option,
    parse_integer,
    parse_limits,
    parse_number,
    parse_replica_slots,
    print_json,
    print_table,
    print_text,
    with_progress,
)
from jax_moe_lb.core.checks import Least, shown
from jax_moe_lb.core.file_limits import FileLimits
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.core.topology import INT32_MAX, home_experts_per_rank
from jax_moe_lb.recordings.counts_files import Trace, naming, read_routing
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.config import SimulationConfig, load_config, preset_names
from jax_moe_lb.sim.hbm import HbmTraffic, traffic_of
from jax_moe_lb.sim.limits import check_timeline, forecast
from jax_moe_lb.sim.loads import drifting_counts, skewed_counts
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.planner_times import needs_counts
from jax_moe_lb.sim.run import Report, keeps_history, mean_report, remembered, replay
from jax_moe_lb.sim.trace import write_png, write_trace

CYCLE = 3
"""Steps between two plans of a system with history."""

CountsOption = Int[np.ndarray, "steps layers R E"]

TraceFile = Annotated[Path | None, option("--trace", "COUNTS", "Recorded counts, npy or npz.", "synthetic counts")]
TokensOption = Annotated[str | None, option("--tokens", "T", "Tokens per rank.", "from the model")]
Imbalance = Annotated[
    str | None,
    option("--imbalance", "X", "Imbalance (max/mean rank load) of the synthetic counts.", "from the configuration"),
]


def model_of(config: SimulationConfig, tokens: str | None) -> ModelShape:
    """Return the model of a configuration that has one, with the tokens per rank of `--tokens` if given."""
    assert config.model is not None
    model = config.model.build()
    wanted = parse_integer("--tokens", tokens, INT32_MAX)
    return model if wanted is None else model.with_tokens(wanted)


def cluster_of(config: SimulationConfig) -> Cluster:
    """Return the cluster of a configuration that has one."""
    assert config.cluster is not None
    return config.cluster.build()


def synthetic_counts(
    config: SimulationConfig, model: ModelShape, cluster: Cluster, imbalance: str | None, *, drift: bool = False
) -> CountsOption:
    """Return counts of one step; with drift, of two cycles: one for the history of the system, and one to simulate."""
    routing, ranks = config.routing, cluster.num_ranks
    layers, wanted = min(routing.layers, model.layers), imbalance_of(config, imbalance)
    if not drift:
        return skewed_counts(model, ranks, wanted, layers, routing.seed, routing.shape)[None]
    return drifting_counts(model, ranks, range(2 * CYCLE), layers, routing.drift, wanted, routing.seed, routing.shape)


def recorded(model: ModelShape, cluster: Cluster, file: Path, limits: FileLimits) -> Trace:
    """Return a trace with the ranks of the cluster and the experts of the model."""
    trace = read_routing(file, limits)
    num_ranks, num_experts = trace.counts.shape[2:]
    if (num_ranks, num_experts) != (cluster.num_ranks, model.experts):
        raise ValueError(
            f"--trace {file} has {num_ranks} ranks and {num_experts} experts; expected the cluster's "
            f"{cluster.num_ranks} ranks and the model's {model.experts} experts"
        )
    return trace


def as_recorded(model: ModelShape, counts: CountsOption) -> ModelShape:
    """Return the model with the maximum tokens of a rank in a trace."""
    tokens = -(-int(counts.sum(3).max()) // model.per_token)
    # A trace may have no tokens, but a model has at least one.
    return model.with_tokens(max(tokens, 1))


def check_recorded(trace: Path | None, **options: str | None) -> None:
    """Check that no option of synthetic counts is given beside recorded ones."""
    for name, text in options.items():
        if trace is not None and text is not None:
            raise ValueError(f"{name} is {shown(text)}; expected none beside --trace, whose counts decide it")


def imbalance_of(config: SimulationConfig, text: str | None) -> float:
    """Return the imbalance of `--imbalance`, or of the configuration."""
    return config.routing.imbalance if text is None else parse_number("--imbalance", text, Least(1.0))


def slots_of(text: str | None, given: int | None, model: ModelShape, cluster: Cluster) -> int | None:
    """Return the replica slots per rank of `--replica-slots`, or those of the configuration."""
    num_home = home_experts_per_rank(model.experts, cluster.num_ranks, "model")
    return parse_replica_slots(text, given, model.experts, num_home)


UNITS = (("ms", 1e3, 10.0), ("s", 1.0, 600.0), ("min", 1 / 60, 7200.0), ("h", 1 / 3600, float("inf")))
"""Time units: name, units per second, and exclusive upper bound in seconds."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the name and units per second of the time unit for a table whose step takes `seconds`."""
    return next((name, per_s) for name, per_s, bound_s in UNITS if seconds < bound_s)


def report_json(report: Report) -> dict[str, Any]:
    """Return the numbers of a report, without the timeline, as JSON."""
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


def layer_table(head: dict[str, Any], report: Report, hbm: HbmTraffic, no_op_reason: str | None) -> Table:
    """Return a table with one row per stage and one for the step."""
    title = ", ".join(f"{name} {value}" for name, value in head.items())
    moved = ", ".join(f"{name} {decimal(round(total))}" for name, total in report.level_bytes.items())
    parts = ", ".join(f"{name} {decimal(round(value))}" for name, value in report.memory.by_name.items())
    in_memory = ", ".join(f"{name} {decimal(round(value))}" for name, value in asdict(hbm).items() if value)
    caption = (
        f"imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}, rounds {report.rounds}\n"
        f"sent over all links: {moved}\nmemory of a rank: {decimal(round(report.memory.total))} ({parts})\n"
        f"memory traffic of a rank and layer: {decimal(round(hbm.total))} ({in_memory})"
    )
    caption += f"\nno plan changes the load: {no_op_reason}" if no_op_reason else ""
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    unit, per_s = time_unit(report.step_s)
    for header in (f"busy {unit}", f"exposed {unit}", f"hidden {unit}", "of the step", "sent"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, stage in report.stages.items():
        times = (f"{value * per_s:.3f}" for value in (stage.busy_s, stage.exposed_s, stage.hidden_s))
        # A step of duration 0 has no shares.
        share = f"{stage.exposed_s / report.step_s:.1%}" if report.step_s else "-"
        table.add_row(name, *times, share, decimal(round(stage.bytes)) if stage.bytes else "-")
    table.add_section()
    table.add_row("step", "", f"{report.step_s * per_s:.3f}", "", "", decimal(round(sum(report.level_bytes.values()))))
    return table


CONFIG_PRESETS = ", ".join(preset_names("cluster", "model"))


def simulate(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help=f"Configuration .yaml, or a preset: {CONFIG_PRESETS}."),
    ],
    system: Annotated[
        str | None,
        option(
            "--system",
            "NAME[:KEY=VALUE]",
            "System, such as exact:replica_slots=4, hybridep+exact or ultraep+rails.",
            "from the configuration",
        ),
    ] = None,
    trace: TraceFile = None,
    imbalance: Imbalance = None,
    tokens: TokensOption = None,
    replica_slots: SystemReplicaSlots = None,
    domain_sizes: Annotated[
        str | None,
        option("--domain-sizes", "S,S", "Ranks per expert domain of hybridep, one number per cluster level."),
    ] = None,
    timeline: Annotated[
        Path | None, option("--timeline", "OUT.json", "Output trace for Perfetto or Chrome."), OutputPath(".json")
    ] = None,
    png: Annotated[
        Path | None, option("--png", "OUT.png", "Output picture of the first layers."), OutputPath(".png")
    ] = None,
    file_limits: FileLimitsOption = None,
    as_json: Json = False,
) -> None:
    """Predict the time, traffic and memory of a training step.

    The table has the busy and exposed time per stage, the bytes sent and the memory of a rank.
    """
    given = {"system": system, "replica_slots": replica_slots, "domain_sizes": domain_sizes}
    with one_line_errors(imbalance=imbalance, tokens=tokens, **given):
        _require_matplotlib(png)
        limits = parse_limits(file_limits)
        read = load_config("CONFIG", config, "cluster", "model", limits=limits)
        check_recorded(trace, imbalance=imbalance, tokens=tokens)
        cluster, model = cluster_of(read), model_of(read, tokens)
        if trace is None:
            counts = synthetic_counts(read, model, cluster, imbalance)
        else:
            counts = recorded(model, cluster, trace, limits).counts
            model = as_recorded(model, counts)
        step, name = read.step.build(), read.system if system is None else system
        model = step.parallel.share(model, cluster)
        # Slots of a file are those of its system, and of others that take as many.
        in_file = read.replica_slots if system is None or takes_slots(system) else None
        slots = slots_of(replica_slots, in_file, model, cluster)
        candidate = compose(name, model, cluster, step, slots, _migration(read, name, domain_sizes))
        states = None
        if trace is None and keeps_history(candidate.system, model, cluster):
            counts = synthetic_counts(read, model, cluster, imbalance, drift=True)
            states = remembered(candidate.system, model, cluster, counts[:CYCLE], candidate.migration)
            counts = counts[CYCLE:]
        planned = len(counts) * counts.shape[1]
        check_timeline(model.layers, cluster.num_ranks)
        note(forecast(planned * needs_counts(candidate.system.balancer), planned, *counts.shape[2:]))
        steps = replay(
            candidate.system, model, cluster, counts, migration=candidate.migration, step=step, states=states
        )
        report = mean_report(list(with_progress(steps, len(counts), "simulating")))
        _write(report, timeline, png, f"{config}, {name}")
        reason = candidate.system.no_op_reason(cluster.topology(), model.experts)
        hbm = traffic_of(candidate.system, model, cluster, backward=step.backward)
        sizes = {"num_ranks": cluster.num_ranks, "layers": model.layers}
        head = {"config": config, "system": name, **sizes, "dispatch": type(candidate.system.dispatch).__name__}
        if as_json:
            plans = {"no_op_reason": reason, "domain_sizes": list(candidate.migration.sizes(cluster))}
            print_json({**head, **plans, **report_json(report), "hbm_bytes": asdict(hbm)})
        else:
            print_table(layer_table(head, report, hbm, reason))


def calibrate(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT.yaml", help="Output configuration for simulate and advise."),
        OutputPath(".yaml"),
    ],
    ranks: Annotated[str | None, option("--ranks", "R", "Virtual devices of a CPU, 2 to 256.", "2")] = None,
    coordinator: Annotated[
        str | None, option("--coordinator", "HOST:PORT", "Address of process 1, to measure several nodes.")
    ] = None,
    processes: Annotated[str | None, option("--processes", "N", "Number of processes; requires --coordinator.")] = None,
    process: Annotated[
        str | None, option("--process", "I", "Number of this process, from 1; process 1 writes OUT.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine for the simulator.

    The measurements are grouped FFNs, exchanges, weight copies and a planner, through the calls of the library.
    """
    with one_line_errors():
        # Import here, because the measurement configures JAX's devices.
        from jax_moe_lb.sim.machine_profile import to_yaml, warnings
        from jax_moe_lb.sim.measure import HIDDEN, INNER, MOST_RANKS, measure

        most_ranks = parse_integer("--ranks", ranks, MOST_RANKS, least=2) or 2
        number = _join(coordinator, processes, process)
        found = measure(most_ranks)
        if number > 1:
            return
        text = to_yaml(found, HIDDEN, INNER)
        for line in warnings(found):
            note(line)
        with naming("OUT", out), whole_file(out) as part:
            part.write_text(text)
        # Validate the file as `simulate` will.
        load_config("OUT", out.absolute().as_posix())
        if as_json:
            print_json({"out": str(out), **asdict(found)})
        else:
            print_text(text.removesuffix("\n"))


def _join(coordinator: str | None, processes: str | None, process: str | None) -> int:
    """Join the other processes, if any, and return the number of this one."""
    given = parse_integer("--processes", processes, INT32_MAX), parse_integer("--process", process, INT32_MAX)
    if coordinator is None and given == (None, None):
        return 1
    number, this = given
    if coordinator is None or number is None or this is None or this > number:
        raise ValueError("--coordinator, --processes and --process must be given together, with I at most N")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise ValueError(f"--coordinator is {shown(coordinator)}; expected HOST:PORT, the address of process 1")
    import jax

    try:
        jax.distributed.initialize(coordinator, number, this - 1)
    except RuntimeError as error:
        raise ValueError(f"--coordinator is {coordinator}: {error}; expected the address of process 1") from error
    return this


def _migration(config: SimulationConfig, name: str, domain_sizes: str | None) -> Migration:
    found, named = config.migration.build(), "migration.domain_sizes"
    if domain_sizes is None and name != config.system and not name.startswith(GATHERED):
        # Expert domains of a file belong to its system, too.
        return replace(found, domain_sizes=())
    if domain_sizes is not None:
        named = "--domain-sizes"
        sizes = tuple(parse_integer(named, size, INT32_MAX) or 1 for size in domain_sizes.split(","))
        found = replace(found, domain_sizes=sizes)
    if found.domain_sizes and not name.startswith(GATHERED):
        raise ValueError(
            f"{named} is {found.domain_sizes} for system {name!r}; expected a system whose name starts with hybridep"
        )
    return found


def _require_matplotlib(png: Path | None) -> None:
    if png is not None and find_spec("matplotlib") is None:
        raise ValueError("--png requires matplotlib; run pip install matplotlib")


def _write(report: Report, timeline: Path | None, png: Path | None, title: str) -> None:
    if timeline is not None:
        with naming("--timeline", timeline), whole_file(timeline) as part:
            write_trace(part, report.timeline)
    if png is not None:
        with naming("--png", png), whole_file(png) as part:
            try:
                write_png(part, report.timeline, title)
            except ValueError as error:
                raise ValueError(f"--png is {png}: {error}; expected a .png file") from error

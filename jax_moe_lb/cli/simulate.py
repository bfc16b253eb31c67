"""These are the commands of the simulator."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from jax_moe_lb._plan_file import whole_file
from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.cli.compose import compose
from jax_moe_lb.cli.errors import one_line_errors
from jax_moe_lb.cli.files import naming
from jax_moe_lb.cli.inputs import (
    CYCLE,
    PRESETS,
    Imbalance,
    Tokens,
    TraceFile,
    as_recorded,
    cluster_of,
    counts_of,
    drifted_counts_of,
    model_of,
    slots_of,
)
from jax_moe_lb.cli.options import Json, positive
from jax_moe_lb.cli.report import note, print_json, print_table, print_text, with_progress
from jax_moe_lb.cli.tables import layer_table, report_json
from jax_moe_lb.sim import Migration, Report, mean_report, replay
from jax_moe_lb.sim.config import Config, load_config
from jax_moe_lb.sim.hbm import traffic_of
from jax_moe_lb.sim.limits import check_timeline, forecast
from jax_moe_lb.sim.run import keeps_history, remembered
from jax_moe_lb.sim.trace import write_png, write_trace


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
    tokens: Tokens = None,
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
        from jax_moe_lb.cli.calibrate import HIDDEN, INNER, MOST_RANKS, measure
        from jax_moe_lb.cli.measured import to_yaml, warnings

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


def _migration(config: Config, name: str, domain_sizes: str | None) -> Migration:
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

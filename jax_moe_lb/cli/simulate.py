"""These are the commands of the simulator."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from jaxtyping import Int

from jax_moe_lb._plan_file import whole_file
from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.cli.compose import candidates, compose
from jax_moe_lb.cli.errors import one_line_errors
from jax_moe_lb.cli.files import naming, read_routing
from jax_moe_lb.cli.options import Json, positive
from jax_moe_lb.cli.report import print_json, print_table, print_text, with_progress
from jax_moe_lb.cli.tables import advice_table, layer_table, report_json, verdict_lines
from jax_moe_lb.sim import Cluster, Migration, ModelShape, Report, mean_report, replay, skewed_counts
from jax_moe_lb.sim.advise import Outcome, outcomes, verdict
from jax_moe_lb.sim.config import Config, load_config, preset_names
from jax_moe_lb.sim.limits import shown
from jax_moe_lb.sim.trace import write_png, write_trace
from jax_moe_lb.transport.codec import Codec

PRESETS = ", ".join(preset_names())

Counts = Int[np.ndarray, "steps layers R E"]

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="COUNTS", help="Recorded counts, an npy or npz; drawn ones by default."),
]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="T", help="Tokens per rank, instead of the model's.")]
Imbalance = Annotated[
    str | None, typer.Option("--imbalance", metavar="X", help="Of drawn counts: max / mean of the ranks' load.")
]


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
        cluster, model = _cluster("CONFIG", config, read), _model("CONFIG", config, read, tokens)
        counts = _counts(read, model, cluster, trace, imbalance)
        model = _as_recorded(model, counts, trace)
        step, name = read.step.build(), system or read.system
        slots = positive("--replica-slots", replica_slots, INT32_MAX) if replica_slots else read.replica_slots
        migration = _migration(read, name, domain_sizes)
        candidate = compose(name, model, cluster, step, slots, migration)
        steps = replay(candidate.system, model, cluster, counts, migration=candidate.migration, step=step)
        report = mean_report(list(with_progress(steps, len(counts), "simulating")))
        _write(report, timeline, png, f"{config}, {name}")
        head = {"config": config, "system": name, "num_ranks": cluster.num_ranks, "layers": model.layers}
        if as_json:
            domains = list(candidate.migration.sizes(cluster))
            print_json({**head, "domain_sizes": domains, **report_json(report)})
        else:
            print_table(layer_table(head, report), least_width=90)


def advise(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"A preset or a file with a model; presets are {PRESETS}.")
    ],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A preset or a file with a cluster.")],
    trace: TraceFile = None,
    imbalance: Imbalance = None,
    tokens: Tokens = None,
    ratio: Annotated[
        float, typer.Option("--ratio", metavar="X", help="Compression of experts that hybridep gathers; 1 for none.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Rank systems and their compositions by the step that they are predicted to take; plain is the baseline."""
    with one_line_errors():
        of_model, of_cluster = load_config("MODEL", model), load_config("CLUSTER", cluster)
        shape, machine = _model("MODEL", model, of_model, tokens), _cluster("CLUSTER", cluster, of_cluster)
        counts = _counts(of_cluster, shape, machine, trace, imbalance)
        shape = _as_recorded(shape, counts, trace)
        step = of_cluster.step.build()
        tried = candidates(shape, machine, step, Codec(ratio))
        found: list[Outcome] = list(
            with_progress(outcomes(tried, shape, machine, counts, step), len(tried), "simulating")
        )
        answer = verdict(found, tried[0], shape, machine, counts, step)
        found.sort(key=lambda one: one.report.step_s if one.report else float("inf"))
        if as_json:
            rows = [
                {"system": one.candidate.name, "domain_sizes": list(one.candidate.migration.sizes(machine))}
                | (report_json(one.report) if one.report else {"refused": one.refused})
                for one in found
            ]
            advice = {"best": answer.best.name, "leave_off": answer.leave_off, "gain": answer.gain}
            print_json({**advice, "pays_from_tokens": answer.pays_from, "systems": rows})
        else:
            print_table(advice_table(f"{model} on {cluster}", found), least_width=100)
            for line in verdict_lines(answer, shape.tokens):
                print_text(line)


def calibrate(
    out: Annotated[Path, typer.Argument(metavar="OUT.yaml", help="Written; `simulate` and `advise` read it.")],
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="R", help="Virtual devices if there is only a CPU; 2, at most 256.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: grouped FFNs, exchanges, copies of weights and a planner, through the library's calls."""
    with one_line_errors():
        # It sets up devices, and what it imports is only for them.
        from jax_moe_lb.cli.calibrate import MOST_RANKS, measure, to_yaml

        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"OUT is {out}; expected a file in a folder that exists")
        found = measure(positive("--ranks", ranks, MOST_RANKS) or 2)
        text = to_yaml(found)
        with naming("OUT", out), whole_file(out) as part:
            part.write_text(text)
        # It is read again at once: what `simulate` would refuse is found here.
        load_config("OUT", str(out) if out.suffix in (".yaml", ".yml") else f"./{out}")
        if as_json:
            print_json({"out": str(out), **asdict(found)})
        else:
            print_text(text.removesuffix("\n"))


def _model(argument: str, source: str, config: Config, tokens: str | None) -> ModelShape:
    if config.model is None:
        raise ValueError(f"{argument} {source} has no model; expected one, or the name of a preset")
    model = config.model.build()
    wanted = positive("--tokens", tokens, INT32_MAX)
    return model if wanted is None else replace(model, tokens=wanted)


def _cluster(argument: str, source: str, config: Config) -> Cluster:
    if config.cluster is None:
        raise ValueError(f"{argument} {source} has no cluster; expected one, or the name of a preset")
    return config.cluster.build()


def _counts(config: Config, model: ModelShape, cluster: Cluster, trace: Path | None, imbalance: str | None) -> Counts:
    if trace is None:
        wanted = config.routing.imbalance if imbalance is None else _imbalance(imbalance)
        layers = min(config.routing.layers, model.layers)
        return skewed_counts(model, cluster.num_ranks, wanted, layers, config.routing.seed)[None]
    counts = read_routing(trace)
    if counts.shape[2:] != (cluster.num_ranks, model.experts):
        raise ValueError(
            f"--trace {trace} has {counts.shape[2]} ranks and {counts.shape[3]} experts; expected the cluster's "
            f"{cluster.num_ranks} ranks and the model's {model.experts} experts"
        )
    return counts


def _as_recorded(model: ModelShape, counts: Counts, trace: Path | None) -> ModelShape:
    """Gives the model as many tokens as the rank of a trace that has most."""
    if trace is None:
        return model
    tokens = -(-int(counts.sum(3).max()) // model.per_token)
    # A trace may hold no tokens at all, a model has at least one.
    return replace(model, tokens=max(tokens, 1))


def _imbalance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise ValueError(f"--imbalance is {shown(text)}; expected a number, at least 1")
    return value


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

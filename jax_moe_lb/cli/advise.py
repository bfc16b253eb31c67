"""Command `advise`, with JSON, table and text."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.advise.advise import SWEPT_TOKENS, UNIFORM, WORTH_IT, Advice
from jax_moe_lb.advise.advise import advise as find
from jax_moe_lb.advise.choice import Choice, simulate_flags, system_code, system_text, train_flags
from jax_moe_lb.advise.evaluate import Evaluator, Workload, drawn_workloads, recorded_workloads
from jax_moe_lb.advise.fit import expert_group, fits_in_memory, needs, remedies
from jax_moe_lb.advise.program import program
from jax_moe_lb.advise.search import FINALISTS, SLOTS, SearchResult, Space
from jax_moe_lb.cli.output import (
    FileLimitsOption,
    Json,
    OutputPath,
    note,
    one_line_errors,
    option,
    parse_limits,
    parse_number,
    print_json,
    print_table,
    print_text,
    working,
)
from jax_moe_lb.cli.simulate import (
    Imbalance,
    TokensOption,
    TraceFile,
    as_recorded,
    check_recorded,
    cluster_of,
    imbalance_of,
    model_of,
    recorded,
    report_json,
    slots_of,
    time_unit,
)
from jax_moe_lb.core.checks import Least
from jax_moe_lb.core.custom_calls import has_planning_module
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.layer.systems import exact
from jax_moe_lb.recordings.counts_files import naming
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.config import SimulationConfig, load_config, preset_names
from jax_moe_lb.sim.limits import MOST_PLANNED_RANKS, forecast
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.work import sample_of, sampled_model
from jax_moe_lb.transport.rule import dispatch_by_rule

SHOWN = 3
"""Number of choices printed with the flags."""

NOTHING_FITS = 1
"""Exit code if no choice fits into memory."""

DEFAULT_SLOTS = exact().replica_slots
"""Replica slots of the default system of a layer."""

NO_REMEDY = "No single change of cluster, pipeline stages, optimizer or tokens suffices; combine them."

SHOWN_SIZES = 4
"""Number of other sizes printed; the JSON has all."""

MOST_REFUSED = 5
"""Number of refused choices printed; the JSON has all."""


def advice_json(answer: Advice, judge: Evaluator, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Return the numbers of an advice as JSON."""
    return {
        "best": answer.best.choice.name,
        "dispatch": _rule(judge),
        "leave_off": answer.leave_off,
        "gain": answer.gain,
        "gain_range": [min(answer.gains), max(answer.gains)],
        "indistinguishable": [one.choice.name for one in answer.alike],
        "pays_from_tokens": answer.pays_from,
        "fits": answer.found.fits,
        "workloads": [workload.name for workload in workloads],
        "systems": [_row(one, answer, judge) for one in answer.found.outcomes],
        "compressed": [_row(one, answer, judge) for one in answer.compressed],
        "refused": {choice.name: why for choice, why in answer.found.refused.items()},
        "sizes": [asdict(size) | {"system": size.choice.name} for size in answer.sizes],
        "glances_s": {choice.name: took for choice, took in answer.found.glances.items()},
        "summary": summary_lines(answer, judge),
    }


def _row(one: SearchResult, answer: Advice, judge: Evaluator) -> dict[str, Any]:
    sizes = judge.candidate(one.choice).migration.sizes(judge.cluster)
    head = {"system": one.choice.name, "choice": asdict(one.choice), "domain_sizes": list(sizes)}
    # The report has means over workloads; the step time is their median.
    times = {"step_s": one.median_s, "times_s": list(one.times_s), "of_plain": list(one.ratios(answer.plain))}
    return head | report_json(one.report) | times | {"usage": {"code": code_of(one, judge), **_flags(one, judge)}}


def _built(one: SearchResult, judge: Evaluator) -> tuple[bool, str]:
    """Return whether a choice gathers experts again, and the class of its dispatch."""
    candidate = judge.candidate(one.choice)
    return candidate.migration.gather_again, type(candidate.system.dispatch).__name__


def _flags(one: SearchResult, judge: Evaluator) -> dict[str, str | None]:
    gather_again, dispatch = _built(one, judge)
    train = train_flags(one.choice, judge.cluster, dispatch)
    return {"train": train, "simulate": simulate_flags(one.choice, gather_again, dispatch)}


def code_of(one: SearchResult, judge: Evaluator) -> str:
    """Return the program of a choice, from the imports to a call of the layer."""
    return program(one.choice, judge.model, judge.cluster, *_built(one, judge))


def recommended(answer: Advice) -> SearchResult:
    """Return plain if balancing is to be left off, else the best choice."""
    return answer.plain if answer.leave_off else answer.best


def advice_table(title: str, answer: Advice) -> Table:
    """Return a table with one row per choice, and a section for choices with lossy compression."""
    unit, per_s = time_unit(answer.plain.median_s)
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    for header in (f"step {unit} (range)", "of plain (range)", "imbalance", "rounds", "memory"):
        table.add_column(header, justify="right", no_wrap=True)
    alike = {one.choice for one in (answer.best, *answer.alike)}
    for one in (*answer.found.outcomes, *answer.compressed[:SHOWN]):
        if answer.compressed and one is answer.compressed[0]:
            table.add_section()
            table.add_row("with lossy compression of experts:")
        ratios = one.ratios(answer.plain)
        table.add_row(
            ("= " if one.choice in alike else "  ") + escape(one.choice.name),
            _ranged([time * per_s for time in one.times_s], ".4g"),
            _ranged(ratios, ".3f"),
            f"{one.report.imbalance_after:.3f}",
            str(one.report.rounds),
            decimal(round(one.report.memory.total)),
        )
    return table


def _ranged(values: Sequence[float], digits: str) -> str:
    """Format the median, and the range if there are several values."""
    middle = f"{np.median(values):{digits}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{digits}}-{max(values):{digits}})"


def advice_lines(answer: Advice, judge: Evaluator, workloads: Sequence[Workload]) -> list[str]:
    """Return the recommendation, the assumptions and the refused choices as lines of text."""
    return [
        *_verdict(answer, judge),
        *_not_exact(answer, judge, workloads),
        f"Dispatch by rule, {_rule(judge)}.",
        *([] if answer.found.fits else [f"Plain is the baseline only: it {needs(judge, Choice())}."]),
        *_assumed(answer, judge, workloads),
        *_first_look(answer),
        *_sizes(answer, judge),
        *_how(answer, judge),
        *_tune(answer, judge),
        "",
        *code_of(recommended(answer), judge).splitlines(),
        "",
        *_refused(answer),
        *summary_lines(answer, judge),
    ]


def summary_lines(answer: Advice, judge: Evaluator) -> list[str]:
    """Return five lines: the best choice, certainty, memory, code, and the next best choice."""
    one = recommended(answer)
    faster, number = sum(ratio < 1 for ratio in one.ratios(answer.plain)), len(one.times_s)
    sure = f"faster than plain on {faster} of {number} workloads, by {answer.gain:.1%} of a step at the median"
    if one is answer.plain:
        sure = f"no choice saves {WORTH_IT:.0%} of a step on the median of {number} workloads"
    total, there = judge.memory(one.choice).total / 1e9, judge.cluster.memory_bytes
    room = "" if there is None else f" of {there / 1e9:.1f}"
    return [
        f"Best: {one.choice.name}.",
        f"Gain: {sure}; {len(answer.alike)} others are as fast. Simulated, not measured.",
        f"Memory: {total:.1f}{room} GB of a rank for these layers, without attention.",
        f"Code: {system_code(one.choice, _built(one, judge)[1])}; --out layer.py writes the program.",
        f"Next: {_next_best(one, answer)}",
    ]


def _next_best(one: SearchResult, answer: Advice) -> str:
    """Return the next best choice that fits, and its time over that of the recommended one."""
    others = [other for other in answer.found.outcomes if other is not one and other.choice not in answer.found.refused]
    if not others:
        return "none; no other choice fits into memory."
    other = others[0]
    ratio = float(np.median(other.ratios(one)))
    why = f"{ratio - 1:.1%} slower" if ratio > 1 else f"{1 - ratio:.1%} faster, less than its further parts require"
    return f"{other.choice.name}, {why}."


def _verdict(answer: Advice, judge: Evaluator) -> list[str]:
    best, tokens = answer.best.choice.name, judge.model.tokens
    if answer.leave_off:
        return [f"Leave balancing off: no choice reliably saves {WORTH_IT:.0%} of a step at {tokens} tokens per rank."]
    by_load = f" ({min(answer.gains):.1%} to {max(answer.gains):.1%} by workload)" if len(answer.gains) > 1 else ""
    lines = [f"Use {best}: {answer.gain:.1%} of a step less than plain at {tokens} tokens per rank{by_load}."]
    if answer.alike:
        lines.append(f"Indistinguishable on these workloads: {', '.join(one.choice.name for one in answer.alike)}.")
    if answer.pays_from is None:
        swept = judge.sample is None and answer.best.report.timeline.num_ranks > 1
        return lines if not swept else [*lines, f"{best} is not faster at {SWEPT_TOKENS[-1]} tokens per rank."]
    if answer.pays_from == SWEPT_TOKENS[0]:
        return [*lines, f"{best} is faster from {SWEPT_TOKENS[0]} tokens per rank, the smallest number tried."]
    return [*lines, f"{best} is faster from {answer.pays_from} tokens per rank."]


def _not_exact(answer: Advice, judge: Evaluator, workloads: Sequence[Workload]) -> list[str]:
    """Return the reason why the default system of a layer is not recommended."""
    one, absent = recommended(answer), judge.model.experts - judge.model.experts // judge.cluster.num_ranks
    default = Choice("exact", min(DEFAULT_SLOTS, absent))
    if not absent or one.choice == default:
        return []
    begin = f"Not {default.name}, the default: "
    if not fits_in_memory(judge, default):
        return [f"{begin}it {needs(judge, default)}."]
    if workloads[0].counts is None or not has_planning_module():
        return [f"{begin}systems with its planner were not tried."]
    steps = {other.choice: other for other in answer.found.outcomes}
    if default in steps:
        ratio, what = float(np.median(steps[default].ratios(one))), "a step"
    else:
        # The search stops early at choices that are slow on the first workload.
        times = [judge.glance(choice, workloads[0]) for choice in (default, one.choice)]
        ratio, what = times[0] / times[1], "one layer"
    return [f"{begin}{what} takes {ratio:.3f} x the time of {one.choice.name}."]


def _rule(judge: Evaluator) -> str:
    """Return the dispatch of choices without rails and expert domains, by the library's rule."""
    return dispatch_by_rule(judge.cluster.topology(), judge.model.experts, judge.model.per_token).reason


def misfit_lines(judge: Evaluator) -> list[str]:
    """Return the reason why nothing fits into memory, and the smallest changes with which plain does."""
    lines = [f"Nothing fits: plain, the smallest choice, {needs(judge, Choice())}."]
    found = remedies(judge)
    return [*lines, *(f"It fits with {one.what}." for one in found)] if found else [*lines, NO_REMEDY]


def misfit_json(judge: Evaluator) -> dict[str, Any]:
    """Return the required memory of plain and the changes with which it fits as JSON."""
    memory = asdict(judge.memory(Choice()))
    return {"fits": False, "memory_bytes": memory, "fits_with": [one.what for one in remedies(judge)]}


def _assumed(answer: Advice, judge: Evaluator, workloads: Sequence[Workload]) -> list[str]:
    first = workloads[0].counts
    if first is None:
        return [
            f"Assumed: uniform routing, because {judge.cluster.num_ranks} ranks exceed {MOST_PLANNED_RANKS} and no "
            "sample represents them. Systems with a planner were not tried, and times have no range. Pass --trace to "
            "plan for recorded counts."
        ]
    before = answer.plain.report.imbalance_before
    sampled = []
    if judge.sample is not None:
        part, level = judge.sample.levels[0].size, judge.cluster.levels[0]
        sampled = [
            f"Planned for a sample: {part} of the {level.size} members of level {level.name} represent all of them. "
            f"Expert domains of more than {part // 2} were not tried."
        ]
    return [
        *sampled,
        f"Workloads: {'; '.join(workload.name for workload in workloads)}; layers of each: {len(first)}; "
        f"imbalance without balancing {before:.2f}. The search tried {len(answer.found.glances)} choices.",
    ]


def _first_look(answer: Advice) -> list[str]:
    """Return the time of one layer per system without composition, relative to plain."""
    glances, best = answer.found.glances, dict[str, float]()
    for choice, took in glances.items():
        if choice.system != "plain" and choice.family == Choice(choice.system):
            best[choice.system] = min(took, best.get(choice.system, math.inf))
    plain = glances[Choice()]
    parts = [f"{name} {took / plain:.3f}" for name, took in sorted(best.items(), key=lambda one: one[1])]
    return [f"Time of one layer over plain's, by system: {', '.join(parts)}."] if parts and plain else []


def _sizes(answer: Advice, judge: Evaluator) -> list[str]:
    """Return the predicted time of other degrees of expert parallelism and other microbatches."""
    given = judge.cluster.num_ranks, judge.model.tokens
    own = [size for size in answer.sizes if (size.ranks, size.tokens) == given]
    shown = [size for size in answer.sizes if not size.refused and size not in own][:SHOWN_SIZES]
    if not own or not shown:
        return []
    lines = [
        f"Other sizes, without expert domains: time of a layer per token, relative to {given[0]} expert-parallel ranks "
        f"and {given[1]} tokens; gradient reductions over groups are exposed:"
    ]
    for size in shown:
        took, total = size.token_s / own[0].token_s, decimal(round(size.total_bytes))
        lines.append(f"    {size.ranks} ranks, {size.tokens} tokens: {took:.3f}, {size.choice.name}, {total}")
    return lines


def _how(answer: Advice, judge: Evaluator) -> list[str]:
    lines = []
    for one in [one for one in answer.found.outcomes if one is not answer.plain][:SHOWN]:
        train, simulate = _flags(one, judge).values()
        lines += [f"{one.choice.name}:"] if train or simulate else []
        lines += [f"    python -m models.train {train}"] if train else []
        lines += [f"    jax-moe-lb simulate ... {simulate}"] if simulate else []
    return lines if not answer.leave_off else []


def _tune(answer: Advice, judge: Evaluator) -> list[str]:
    """Return the command that compiles the recommended system and chooses chunks, saved arrays and scheduler."""
    system, model = system_text(recommended(answer).choice), judge.model
    if system is None:
        return []
    sizes = f"H={model.hidden},F={model.inner},E={model.experts},T={model.tokens},K={model.per_token}"
    command = f"jax-moe-lb tune --target TARGET --system {system} --sizes {sizes} --layers {model.layers}"
    return [
        "Chunks, saved arrays and the scheduler, by compiled programs of a target such as h100:1x8:",
        f"    {command}",
    ]


def _refused(answer: Advice) -> list[str]:
    refused = list(answer.found.refused.items())
    lines = [f"Refused: {choice.name} {why}." for choice, why in refused[:MOST_REFUSED]]
    more = len(refused) - MOST_REFUSED
    return [*lines, f"Refused for their memory: {more} more; see --json."] if more > 0 else lines


DRAWS = 2
"""Synthetic workloads per shape."""

MOST_STEPS, MOST_LAYERS = 8, 4
"""Steps and layers of a trace to evaluate."""

LOOKS = 120
"""Approximate simulated layers of a search per load shape, from searches of the presets."""

MODEL_PRESETS, CLUSTER_PRESETS = (", ".join(preset_names(section)) for section in ("model", "cluster"))


def advise(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"Configuration .yaml with a model, or a preset: {MODEL_PRESETS}.")
    ],
    cluster: Annotated[
        str,
        typer.Argument(metavar="CLUSTER", help=f"Configuration .yaml with a cluster, or a preset: {CLUSTER_PRESETS}."),
    ],
    trace: TraceFile = None,
    imbalance: Imbalance = None,
    tokens: TokensOption = None,
    replica_slots: Annotated[
        str | None, option("--replica-slots", "N", "Most replica slots per rank.", str(max(SLOTS)))
    ] = None,
    ratio: Annotated[
        str, option("--ratio", "X", "Compression ratio of gathered experts, tried beside no compression.")
    ] = "1.0",
    out: Annotated[
        Path | None, option("--out", "LAYER.py", "Output file of the recommended program."), OutputPath(".py")
    ] = None,
    file_limits: FileLimitsOption = None,
    as_json: Json = False,
) -> None:
    """Find the system with the fastest predicted step.

    The search covers systems, their options and their compositions. The baseline is plain expert parallelism.
    """
    with one_line_errors(imbalance=imbalance, tokens=tokens):
        limits, compression = parse_limits(file_limits), parse_number("--ratio", ratio, Least(1.0))
        of_model = load_config("MODEL", model, "model", limits=limits)
        of_cluster = load_config("CLUSTER", cluster, "cluster", limits=limits)
        if model != cluster and (unused := sorted({"routing", "step"} & of_model.model_fields_set)):
            note(f"MODEL {model}: {' and '.join(unused)} not used; advise reads routing and step of CLUSTER {cluster}")
        check_recorded(trace, imbalance=imbalance, tokens=tokens)
        shape, whole = model_of(of_model, tokens), cluster_of(of_cluster)
        machine, step = expert_group(shape, whole, of_cluster.step.build())
        slots = slots_of(replica_slots, None, shape, machine)
        most_slots = shape.experts - shape.experts // machine.num_ranks if slots is None else slots
        if trace is not None:
            steps = recorded(shape, machine, trace, limits)
            shape = as_recorded(shape, steps.counts)
            workloads = recorded_workloads(*steps, MOST_STEPS, MOST_LAYERS)
            shapes = workloads[:: max(1, len(workloads) - 1)]
            sample = None
        else:
            sample = sample_of(machine) if machine.num_ranks > MOST_PLANNED_RANKS else None
            workloads = _drawn(of_cluster, shape, machine, sample, imbalance)
            shapes = [workload for workload in workloads if workload.name.endswith(", draw 1")] or workloads
        # A sample has fewer experts to replicate.
        num_experts = sampled_model(shape, machine, sample or machine).experts
        space = Space(
            sample or machine,
            min(most_slots, num_experts - shape.experts // machine.num_ranks),
            planned=workloads[0].counts is not None,
            with_exact=has_planning_module(),
            with_relocation=all(workload.earlier is not None for workload in workloads),
            sampled=sample is not None,
            with_history=sample is None and all(workload.before is not None for workload in workloads),
        )
        judge = Evaluator(step.parallel.share(shape, machine), machine, step, sample)
        if not any(fits_in_memory(judge, choice) for choice in space.first()):
            _print_misfit(judge, as_json)
            raise typer.Exit(NOTHING_FITS)
        if machine != whole:
            note(f"{shape.experts} experts: groups of {machine.num_ranks} of the {whole.num_ranks} ranks share them")
        _note_forecast(workloads, shapes)
        with working("searching") as tell:
            judge.tell = tell
            answer = find(judge, space, shapes, workloads, compression)
        _write_program(out, answer, judge)
        if as_json:
            print_json(advice_json(answer, judge, workloads))
        else:
            print_table(advice_table(f"{model} on {cluster}", answer))
            print_text("\n".join(advice_lines(answer, judge, workloads)))


def _print_misfit(judge: Evaluator, as_json: bool) -> None:
    if as_json:
        print_json(misfit_json(judge))
    else:
        print_text("\n".join(misfit_lines(judge)))


def _write_program(out: Path | None, answer: Advice, judge: Evaluator) -> None:
    if out is not None:
        with naming("--out", out), whole_file(out) as part:
            part.write_text(code_of(recommended(answer), judge))


def _drawn(
    config: SimulationConfig, model: ModelShape, cluster: Cluster, sample: Cluster | None, imbalance: str | None
) -> list[Workload]:
    wanted = imbalance_of(config, imbalance)
    if sample is None and cluster.num_ranks > MOST_PLANNED_RANKS:
        return [UNIFORM]
    if sample is not None:
        model, cluster = sampled_model(model, cluster, sample), sample
    layers = min(config.routing.layers, model.layers)
    drift, seed = config.routing.drift, config.routing.seed
    return drawn_workloads(model, cluster.num_ranks, wanted, layers, list(LoadShape), DRAWS, seed, drift)


def _note_forecast(workloads: Sequence[Workload], shapes: Sequence[Workload]) -> None:
    first = workloads[0].counts
    if first is not None:
        layers, num_ranks, num_experts = first.shape
        plans = LOOKS * len(shapes) + FINALISTS * len(workloads) * layers
        note(forecast(plans, len(workloads) * layers, num_ranks, num_experts))

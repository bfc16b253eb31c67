"""`advise` is the command that says which system to take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from jax_moe_lb._custom_calls import has_planning_module
from jax_moe_lb.cli.advice import advice_json, advice_lines, advice_table
from jax_moe_lb.cli.errors import one_line_errors
from jax_moe_lb.cli.inputs import (
    PRESETS,
    Imbalance,
    Tokens,
    TraceFile,
    as_recorded,
    cluster_of,
    imbalance_of,
    model_of,
    recorded_counts,
    slots_of,
)
from jax_moe_lb.cli.options import Json
from jax_moe_lb.cli.report import note, print_json, print_table, print_text, working
from jax_moe_lb.sim import Cluster, ModelShape
from jax_moe_lb.sim.advise import UNIFORM
from jax_moe_lb.sim.advise import advise as find
from jax_moe_lb.sim.config import Config, load_config
from jax_moe_lb.sim.judge import Judge
from jax_moe_lb.sim.limits import MOST_PLANNED_RANKS, forecast
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.sample import experts_of, sample_of
from jax_moe_lb.sim.search import FINALISTS
from jax_moe_lb.sim.space import Space
from jax_moe_lb.sim.workloads import Workload, drawn_workloads, recorded_workloads

DRAWS = 2
"""So many workloads of each shape are drawn."""

MOST_STEPS, MOST_LAYERS = 8, 4
"""Of a trace so many steps and layers are judged."""

LOOKS = 120
"""A search simulates a layer about so often for each shape, as it did for presets."""


def advise(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"A preset or a file with a model; presets are {PRESETS}.")
    ],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A preset or a file with a cluster.")],
    trace: TraceFile = None,
    imbalance: Imbalance = None,
    tokens: Tokens = None,
    replica_slots: Annotated[
        str | None, typer.Option("--replica-slots", metavar="N", help="Of each rank, at most; 8 by default.")
    ] = None,
    ratio: Annotated[
        float,
        typer.Option("--ratio", metavar="X", help="Try gathered experts compressed so many times, too, and list them."),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Search systems, their options and compositions for the fastest predicted step; plain is the baseline."""
    with one_line_errors():
        of_model, of_cluster = load_config("MODEL", model), load_config("CLUSTER", cluster)
        shape, machine = model_of("MODEL", model, of_model, tokens), cluster_of("CLUSTER", cluster, of_cluster)
        slots = slots_of(replica_slots, None, shape, machine)
        most_slots = shape.experts - shape.experts // machine.num_ranks if slots is None else slots
        if trace is not None:
            counts = recorded_counts(shape, machine, trace)
            shape = as_recorded(shape, counts, trace)
            workloads = recorded_workloads(counts, MOST_STEPS, MOST_LAYERS)
            shapes = workloads[:: max(1, len(workloads) - 1)]
            sample = None
        else:
            sample = sample_of(machine) if machine.num_ranks > MOST_PLANNED_RANKS else None
            workloads = _drawn(of_cluster, shape, machine, sample, imbalance)
            shapes = workloads[: len({workload.name.split(", draw")[0] for workload in workloads})]
        space = Space(
            sample or machine,
            # A sample has fewer experts that could be elsewhere.
            min(most_slots, experts_of(shape, machine, sample or machine) - shape.experts // machine.num_ranks),
            planned=workloads[0].counts is not None,
            with_exact=has_planning_module(),
            with_relocation=all(workload.earlier is not None for workload in workloads),
            sampled=sample is not None,
            with_history=sample is None and all(workload.before is not None for workload in workloads),
        )
        _tell(workloads, shapes)
        step = of_cluster.step.build()
        judge = Judge(step.parallel.share(shape, machine), machine, step, sample)
        with working("searching"):
            answer = find(judge, space, shapes, workloads, ratio)
        if as_json:
            print_json(advice_json(answer, judge, workloads))
        else:
            print_table(advice_table(f"{model} on {cluster}", answer))
            for line in advice_lines(answer, judge, workloads):
                print_text(line)


def _drawn(
    config: Config, model: ModelShape, cluster: Cluster, sample: Cluster | None, imbalance: str | None
) -> list[Workload]:
    wanted = imbalance_of(config, imbalance)
    if sample is None and cluster.num_ranks > MOST_PLANNED_RANKS:
        return [UNIFORM]
    if sample is not None:
        model, cluster = replace(model, experts=experts_of(model, cluster, sample)), sample
    layers = min(config.routing.layers, model.layers)
    drift, seed = config.routing.drift, config.routing.seed
    return drawn_workloads(model, cluster.num_ranks, wanted, layers, list(LoadShape), DRAWS, seed, drift)


def _tell(workloads: Sequence[Workload], shapes: Sequence[Workload]) -> None:
    """Says what a large search needs before it starts."""
    first = workloads[0].counts
    if first is not None:
        layers, num_ranks, num_experts = first.shape
        plans = LOOKS * len(shapes) + FINALISTS * len(workloads) * layers
        note(forecast(plans, len(workloads) * layers, num_ranks, num_experts))

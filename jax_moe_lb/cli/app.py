"""The commands: they read arguments, call the library and print.

Bad input ends in one line on stderr and exit code 2, whichever command it was given to.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jax_moe_lb.cli import doctor as doctor_
from jax_moe_lb.cli.discover import load_balancer
from jax_moe_lb.cli.files import read_counts, read_trace, write_plans
from jax_moe_lb.cli.planning import Effect, Planner, mean_effect
from jax_moe_lb.cli.report import effect_json, effect_table, print_json, print_table, with_progress
from jax_moe_lb.topology import Topology

BAD_INPUT = 2
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's, which typer imports or ships a copy of, depending on its version."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

System = Annotated[str, typer.Option("--system", metavar="NAME", help="A balancer, by the name of its file.")]
RanksPerDomain = Annotated[
    int | None,
    typer.Option("--ranks-per-domain", metavar="M", min=1, help="Ranks among which experts may move [default: R]"),
]
Slots = Annotated[
    int | None, typer.Option("--slots", metavar="S", min=1, help="Slots per rank [default: home experts + 2]")
]
ExpertBytes = Annotated[
    int | None, typer.Option("--expert-bytes", min=1, help="Bytes of one expert's weights: shows what replicas cost.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="PLAN.npz", help="Write placement and quota there.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0, or 2 after bad input.
    """
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        return app(argv, prog_name="jax-moe-lb", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        return _refuse(error.format_message())
    except typer.Abort:
        return 130


@app.command()
def plan(
    counts_file: Annotated[Path, typer.Argument(metavar="COUNTS.npy", help="Integers [R, E] or [layers, R, E].")],
    system: System,
    ranks_per_domain: RanksPerDomain = None,
    slots: Slots = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    as_json: Json = False,
) -> None:
    """Plan for the counts of one microbatch, layer by layer.

    Planner time is that of the compiled planner for one layer on the default device, after a warm-up call.
    """
    with _one_line_errors():
        counts = read_counts(counts_file)
        planner = _planner(system, counts, ranks_per_domain, slots)
        (planned,) = planner.replay(counts[None])
        if out is not None:
            write_plans(out, [layer.plan for layer in planned], counts.shape[:1])
        rows = [(number, layer.effect) for number, layer in enumerate(planned)]
        _print("layer", rows, _head(system, planner, counts), expert_bytes, as_json)


@app.command()
def replay(
    trace_file: Annotated[
        Path, typer.Argument(metavar="TRACE.npz", help="Integers `counts` [steps, layers, R, E], and `steps`; or a npy.")
    ],
    system: System,
    ranks_per_domain: RanksPerDomain = None,
    slots: Slots = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    as_json: Json = False,
) -> None:
    """Plan for a recorded trace, step by step; a balancer that keeps history carries it along.

    Numbers are means over a step's layers. Planner time is that of one layer, after a warm-up call.
    """
    with _one_line_errors():
        steps, counts = read_trace(trace_file)
        planner = _planner(system, counts, ranks_per_domain, slots)
        rows, plans = [], []
        for number, planned in zip(steps, with_progress(planner.replay(counts), len(steps)), strict=True):
            rows.append((number, mean_effect([layer.effect for layer in planned])))
            # Plans of a long trace are large: they are kept only to be written.
            plans.extend([] if out is None else [layer.plan for layer in planned])
        if out is not None:
            write_plans(out, plans, counts.shape[:2])
        _print("step", rows, _head(system, planner, counts), expert_bytes, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices, and which implementation of each operation will run here."""
    with _one_line_errors():
        found = doctor_.diagnosis()
        if as_json:
            print_json(found)
            return
        print_table(doctor_.facts_table(found))
        print_table(doctor_.ops_table(found))


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Load balance of Mixture-of-Experts layers."""

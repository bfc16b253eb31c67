"""The commands: they read arguments, call the library and print.

Bad input ends in one line on stderr and exit code 2, whichever command it was given to.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jax_moe_lb.cli.discover import load_balancer
from jax_moe_lb.cli.doctor import diagnosis, facts_table, ops_table, version
from jax_moe_lb.cli.files import read_counts, read_trace, write_plans
from jax_moe_lb.cli.options import ExpertBytes, Json, Out, RanksPerDomain, Slots, System
from jax_moe_lb.cli.planning import Effect, Planner, mean_effect
from jax_moe_lb.cli.report import effect_json, effect_table, print_json, print_table, with_progress
from jax_moe_lb.topology import Topology

BAD_INPUT = 2
INTERRUPTED = 130
TABLE_COLUMNS = 100
UsageError: Any = typer.BadParameter.__mro__[1]
"""click's, which typer imports or ships a copy of, depending on its version."""

# Without markup, which would take the [R, E] of a help text for a style.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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
    except UsageError as error:
        _print_error(error.format_message())
        return BAD_INPUT
    except typer.Abort:
        return INTERRUPTED


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
        effects = [layer.effect for layer in planned]
        _print("layer", range(len(planned)), effects, _head(system, planner, counts), expert_bytes, as_json)


@app.command()
def replay(
    trace_file: Annotated[
        Path,
        typer.Argument(metavar="TRACE.npz", help="With integers counts [steps, layers, R, E] and steps; or a npy."),
    ],
    system: System,
    ranks_per_domain: RanksPerDomain = None,
    slots: Slots = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    as_json: Json = False,
) -> None:
    """Plan for a recorded trace, step by step; a balancer that keeps history carries it along.

    Every row is the mean over a step's layers. Planner time is that of the compiled planner for one layer on the
    default device, after a warm-up call.
    """
    with _one_line_errors():
        steps, counts = read_trace(trace_file)
        planner = _planner(system, counts, ranks_per_domain, slots)
        effects, plans = [], []
        for planned in with_progress(planner.replay(counts), len(steps)):
            effects.append(mean_effect([layer.effect for layer in planned]))
            # Plans of a long trace are large: they are kept only to be written.
            plans.extend([] if out is None else [layer.plan for layer in planned])
        if out is not None:
            write_plans(out, plans, counts.shape[:2])
        _print("step", steps, effects, _head(system, planner, counts), expert_bytes, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices, and which implementation of each operation will run here."""
    with _one_line_errors():
        found = diagnosis()
        if as_json:
            print_json(found)
        else:
            print_table(facts_table(found))
            print_table(ops_table(found))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("jax_moe_lb"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Load balance of Mixture-of-Experts layers, from recorded counts."""


def _planner(system: str, counts: np.ndarray, ranks_per_domain: int | None, slots: int | None) -> Planner:
    num_ranks, num_experts = counts.shape[-2:]
    slots = num_experts // num_ranks + 2 if slots is None else slots
    return Planner(load_balancer(system), Topology.flat(num_ranks, ranks_per_domain), slots)


def _head(system: str, planner: Planner, counts: np.ndarray) -> dict[str, str | int]:
    num_ranks, num_experts = counts.shape[-2:]
    return {"system": system, "num_ranks": num_ranks, "num_experts": num_experts, "slots": planner.slots}


def _print(
    index: str,
    numbers: Sequence[int],
    effects: Sequence[Effect],
    head: dict[str, str | int],
    expert_bytes: int | None,
    as_json: bool,
) -> None:
    """One row per layer or step, whichever `index` says."""
    mean = mean_effect(effects)
    if not as_json:
        title = ", ".join(f"{name} {value}" for name, value in head.items())
        print_table(effect_table(title, index, numbers, effects, mean, expert_bytes), TABLE_COLUMNS)
        return
    rows = [effect_json(effect, expert_bytes) for effect in effects]
    if index == "step":
        rows = [{"step": number, **row} for number, row in zip(numbers, rows, strict=True)]
    print_json({**head, f"{index}s": rows, "mean": effect_json(mean, expert_bytes)})


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        # Whoever reads stdout has gone; the interpreter's last flush must not complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from error
    except (ValueError, OSError) as error:
        _print_error(str(error))
        raise typer.Exit(BAD_INPUT) from error


def _print_error(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)

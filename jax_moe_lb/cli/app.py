"""The commands read arguments, call the library and print.

Bad input ends in one line on stderr and exit code 2, whichever command it was given to.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.cli.advise import advise
from jax_moe_lb.cli.compile import compile_command
from jax_moe_lb.cli.convert import convert, drift
from jax_moe_lb.cli.doctor import diagnosis, facts_table, ops_table, products_table, version
from jax_moe_lb.cli.output import (
    BAD_INPUT,
    BalancerOption,
    ExpertBytes,
    Head,
    Json,
    Out,
    RanksPerDomain,
    SlotsOption,
    one_line_errors,
    positive,
    print_effects,
    print_error,
    print_json,
    print_table,
    printing,
    with_progress,
)
from jax_moe_lb.cli.planning import PlanRunner, load_balancer, mean_effect
from jax_moe_lb.cli.simulate import calibrate, simulate
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.recordings.counts_files import read_counts, read_trace, write_plans

INTERRUPTED = 130
UsageError: Any = typer.BadParameter.__mro__[1]
"""It is click's, which typer imports or ships a copy of, depending on its version."""

# Without markup, which would take the [R, E] of a help text for a style.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; it is what the program `jax-moe-lb` calls.

    Args:
        argv: the arguments after the program's name; `None` takes those of the process.

    Returns:
        The exit code: 0, 1 where stdout takes no more, 2 after bad input, or 130 after an interrupt.
    """
    # JAX warns of accelerators that it does not find; a line of that is no part of the answer.
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        # What commands print says so itself; help and version are printed here.
        with printing():
            return app(argv, prog_name="jax-moe-lb", standalone_mode=False) or 0
    except UsageError as error:
        print_error(error.format_message())
        return BAD_INPUT
    except typer.Abort:
        return INTERRUPTED
    except typer.Exit as ended:
        return ended.exit_code


@app.command()
def plan(
    counts_file: Annotated[Path, typer.Argument(metavar="COUNTS.npy", help="Integers; or an npz with counts.")],
    balancer: BalancerOption,
    ranks_per_domain: RanksPerDomain = None,
    slots: SlotsOption = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    as_json: Json = False,
) -> None:
    """Plan for the counts [R, E] or [layers, R, E] of one microbatch, layer by layer.

    Planner time is that of the compiled planner for one layer on the default device, after a warm-up call.
    """
    with one_line_errors():
        counts, one_expert = read_counts(counts_file), positive("--expert-bytes", expert_bytes)
        planner = _planner(balancer, counts, ranks_per_domain, slots)
        (planned,) = planner.replay(counts[None])
        if out is not None:
            write_plans(out, [layer.plan for layer in planned], counts.shape[:1])
        effects = [layer.effect for layer in planned]
        print_effects("layer", range(len(planned)), effects, _head(balancer, planner, counts), one_expert, as_json)


@app.command()
def replay(
    trace_file: Annotated[
        Path,
        typer.Argument(metavar="TRACE.npz", help="With integers counts and steps; or an npy of counts."),
    ],
    balancer: BalancerOption,
    ranks_per_domain: RanksPerDomain = None,
    slots: SlotsOption = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    as_json: Json = False,
) -> None:
    """Plan for a trace [steps, layers, R, E], step by step; a balancer that keeps history carries it along.

    Every row is the mean over a step's layers. Planner time is that of the compiled planner for one layer on the
    default device, after a warm-up call.
    """
    with one_line_errors():
        (steps, counts), one_expert = read_trace(trace_file), positive("--expert-bytes", expert_bytes)
        planner = _planner(balancer, counts, ranks_per_domain, slots)
        effects, plans = [], []
        for planned in with_progress(planner.replay(counts), len(steps)):
            effects.append(mean_effect([layer.effect for layer in planned]))
            # Plans of a long trace are large: they are kept only to be written.
            plans.extend([] if out is None else [layer.plan for layer in planned])
        if out is not None:
            write_plans(out, plans, counts.shape[:2])
        print_effects("step", steps, effects, _head(balancer, planner, counts), one_expert, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices, and which implementation of each operation will run here."""
    with one_line_errors():
        found = diagnosis()
        if as_json:
            print_json(found)
        else:
            print_table(facts_table(found))
            print_table(ops_table(found))
            print_table(products_table(found))


for command in (convert, simulate, advise, calibrate, drift):
    app.command()(command)
app.command("compile")(compile_command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(version("jax_moe_lb"))
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Load balance of Mixture-of-Experts layers, from recorded counts."""


def _planner(balancer: str, counts: np.ndarray, ranks_per_domain: str | None, slots: str | None) -> PlanRunner:
    num_ranks, num_experts = counts.shape[-2:]
    topology = Topology.flat(num_ranks, positive("--ranks-per-domain", ranks_per_domain))
    wanted = positive("--slots", slots)
    if wanted is not None and wanted > num_experts:
        raise ValueError(f"--slots is {wanted}; expected at most the {num_experts} experts, each once on a rank")
    # On average over layers and steps.
    sizes = LayerCost(num_copies=max(1, round(counts.sum(dtype=np.float64) / math.prod(counts.shape[:-1]))))
    return PlanRunner(
        load_balancer(balancer).sized(sizes), topology, wanted or min(num_experts // num_ranks + 2, num_experts)
    )


def _head(balancer: str, planner: PlanRunner, counts: np.ndarray) -> Head:
    num_ranks, num_experts = counts.shape[-2:]
    return {"balancer": balancer, "num_ranks": num_ranks, "num_experts": num_experts, "slots": planner.slots}

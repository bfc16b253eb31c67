"""The program `jax-moe-lb` and its commands, which parse arguments, call the library and print.

Bad input prints one line on stderr and sets exit code 2, for every command.
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
from jax_moe_lb.cli.compile import compile_command, tune_command
from jax_moe_lb.cli.convert import convert, drift
from jax_moe_lb.cli.doctor import diagnosis, facts_table, implementations_table, products_table, version
from jax_moe_lb.cli.entry import INTERRUPTED
from jax_moe_lb.cli.output import (
    BAD_INPUT,
    BalancerOption,
    CheckedCommand,
    ExpertBytes,
    FileLimitsOption,
    Head,
    Json,
    Out,
    RanksPerDomain,
    ReplicaSlots,
    one_line_errors,
    parse_integer,
    parse_limits,
    parse_replica_slots,
    print_effects,
    print_error,
    print_json,
    print_table,
    printing,
    with_progress,
)
from jax_moe_lb.cli.planning import PlanRunner, load_balancer, mean_effect, no_op_reason
from jax_moe_lb.cli.simulate import calibrate, simulate
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.recordings.counts_files import read_counts, read_trace, write_plans

UsageError: Any = typer.BadParameter.__mro__[1]
"""`UsageError` of click, which typer imports or vendors, depending on the version."""

# Without markup, because rich would parse the [R, E] of a help text as a style.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; entry point of the program `jax-moe-lb`."""
    # Suppress JAX's warnings about absent accelerators.
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        # Commands check their own output; this covers the help and the version.
        with printing():
            return app(argv, prog_name="jax-moe-lb", standalone_mode=False) or 0
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return BAD_INPUT
        print_error(error.format_message())
        return BAD_INPUT
    except typer.Abort:
        return INTERRUPTED
    except typer.Exit as ended:
        return ended.exit_code


@app.command(no_args_is_help=True, cls=CheckedCommand)
def plan(
    counts_file: Annotated[
        Path, typer.Argument(metavar="COUNTS.npy", help="Integer token counts; or an npz with the array counts.")
    ],
    balancer: BalancerOption,
    ranks_per_domain: RanksPerDomain = None,
    replica_slots: ReplicaSlots = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    file_limits: FileLimitsOption = None,
    as_json: Json = False,
) -> None:
    """Plan each layer of one microbatch of recorded counts.

    Counts have the shape [R, E] or [layers, R, E]. The planner time excludes a warm-up call.
    """
    with one_line_errors(ranks_per_domain=ranks_per_domain):
        counts = read_counts(counts_file, parse_limits(file_limits))
        one_expert = parse_integer("--expert-bytes", expert_bytes)
        planner = _planner(balancer, counts, ranks_per_domain, replica_slots)
        (planned,) = planner.replay(counts[None])
        if out is not None:
            write_plans(out, [layer.plan for layer in planned], counts.shape[:1])
        effects = [layer.effect for layer in planned]
        reason = None if any(layer.changed for layer in planned) else no_op_reason(planner, counts[None])
        head = _head(balancer, planner, counts)
        print_effects("layer", range(len(planned)), effects, head, reason, one_expert, as_json)


@app.command(no_args_is_help=True, cls=CheckedCommand)
def replay(
    trace_file: Annotated[
        Path, typer.Argument(metavar="TRACE.npz", help="Integer arrays counts and steps; or an npy of counts.")
    ],
    balancer: BalancerOption,
    ranks_per_domain: RanksPerDomain = None,
    replica_slots: ReplicaSlots = None,
    out: Out = None,
    expert_bytes: ExpertBytes = None,
    file_limits: FileLimitsOption = None,
    as_json: Json = False,
) -> None:
    """Plan every step of a recorded trace, with history.

    Counts have the shape [steps, layers, R, E]. Each layer carries the balancer's state from step to step. Each row is
    the mean over the layers of a step. The planner time excludes a warm-up call.
    """
    with one_line_errors(ranks_per_domain=ranks_per_domain):
        steps, counts = read_trace(trace_file, parse_limits(file_limits))
        one_expert = parse_integer("--expert-bytes", expert_bytes)
        planner = _planner(balancer, counts, ranks_per_domain, replica_slots)
        effects, plans, changed = [], [], False
        for planned in with_progress(planner.replay(counts), len(steps)):
            effects.append(mean_effect([layer.effect for layer in planned]))
            changed = changed or any(layer.changed for layer in planned)
            # Plans of a long trace are large, so keep them only for the output file.
            plans.extend([] if out is None else [layer.plan for layer in planned])
        if out is not None:
            write_plans(out, plans, counts.shape[:2])
        reason = None if changed else no_op_reason(planner, counts)
        print_effects("step", steps, effects, _head(balancer, planner, counts), reason, one_expert, as_json)


@app.command(cls=CheckedCommand)
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and the implementations in use."""
    with one_line_errors():
        found = diagnosis()
        if as_json:
            print_json(found)
        else:
            print_table(facts_table(found))
            print_table(implementations_table("balancer", found["balancers"]))
            print_table(implementations_table("op", found["ops"]))
            print_table(products_table(found))


for command in (convert, simulate, advise, calibrate, drift):
    app.command(no_args_is_help=True, cls=CheckedCommand)(command)
app.command("compile", no_args_is_help=True, cls=CheckedCommand)(compile_command)
app.command("tune", no_args_is_help=True, cls=CheckedCommand)(tune_command)


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
    """Plan, simulate and compile load-balanced MoE layers."""


def _planner(balancer: str, counts: np.ndarray, ranks_per_domain: str | None, replica_slots: str | None) -> PlanRunner:
    num_ranks, num_experts = counts.shape[-2:]
    topology = Topology.flat(num_ranks, parse_integer("--ranks-per-domain", ranks_per_domain))
    num_home = num_experts // num_ranks
    wanted = parse_replica_slots(replica_slots, None, num_experts, num_home)
    slots = min(num_home + 2, num_experts) if wanted is None else num_home + wanted
    # Mean token copies of a rank over layers and steps.
    sizes = LayerCost(num_copies=max(1, round(counts.sum(dtype=np.float64) / math.prod(counts.shape[:-1]))))
    return PlanRunner(load_balancer(balancer).sized(sizes), topology, slots)


def _head(balancer: str, planner: PlanRunner, counts: np.ndarray) -> Head:
    num_ranks, num_experts = counts.shape[-2:]
    replica_slots = planner.slots - num_experts // num_ranks
    return {"balancer": balancer, "num_ranks": num_ranks, "num_experts": num_experts, "replica_slots": replica_slots}

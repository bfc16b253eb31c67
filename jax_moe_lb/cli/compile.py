"""`compile` compiles a layer for a machine that need not be there, and prints what came out."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

import typer

from jax_moe_lb.cli.compose import SPRAYED, with_slots, with_spray
from jax_moe_lb.cli.errors import one_line_errors
from jax_moe_lb.cli.options import Json, positive
from jax_moe_lb.cli.report import print_json
from jax_moe_lb.compiled import (
    LayerSizes,
    Target,
    compile_layer,
    print_report,
    quiet_stderr,
    use_no_accelerators,
)
from jax_moe_lb.sim.limits import shown
from jax_moe_lb.systems import System, system_named, system_names


def compile_command(
    target: Annotated[
        str, typer.Option("--target", metavar="TARGET", help="h100:1x8, gb200:1x18x4, v5e:2x4 or the like.")
    ],
    system: Annotated[
        str, typer.Option("--system", metavar="NAME", help="exact, ultraep, exact+rails or the like.")
    ] = "exact",
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", metavar="H=N,...", help="H=2048,F=768,E=128,T=4096,K=8 by default."),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="The gradients too.")] = False,
    fused: Annotated[bool, typer.Option("--fused", help="Gate and up projection in one weight.")] = False,
    replica_slots: Annotated[str | None, typer.Option("--replica-slots", metavar="N", help="Of each rank.")] = None,
    headroom: Annotated[
        str | None, typer.Option("--headroom", metavar="X", help="Receive buffer over the mean load.")
    ] = None,
    max_rounds: Annotated[
        str | None, typer.Option("--max-rounds", metavar="N", help="As many as a plan needs by default.")
    ] = None,
    own_kernels: Annotated[
        bool, typer.Option("--own-kernels", help="Products on Hopper by kernels of this library, not tokamax's.")
    ] = False,
    options: Annotated[
        list[str] | None, typer.Option("--xla", metavar="NAME=VALUE", help="An option of XLA; may be repeated.")
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Let the compiler write on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Compile a layer for a machine that need not be there: what each device holds, computes, sends and waits for.

    It needs the compiler of the machine: jax_moe_lb[cuda] or jax_moe_lb[tpu].
    """
    with one_line_errors():
        machine, layer = Target.parse(target), LayerSizes.parse(",".join(sizes)) if sizes else LayerSizes()
        chosen = _system(system, replica_slots, headroom, max_rounds)
        chosen = chosen.with_own_kernels() if own_kernels else chosen
        for_xla = _options(options)
        machine.require_compiler()
        with nullcontext() if logs else quiet_stderr():
            use_no_accelerators()
            report = compile_layer(chosen, machine, layer, gradients=train, fused=fused, options=for_xla)
        passes = "forward and gradients" if train else "forward"
        shape = ", ".join(f"{letter} {value}" for letter, value in layer.by_letter.items())
        title = f"{system} on {target}, {passes}, {shape}"
        if as_json:
            print_json({"title": title, **report.to_json()})
        else:
            print_report(report, title)


def _system(name: str, replica_slots: str | None, headroom: str | None, max_rounds: str | None) -> System:
    first, _, behind = name.partition("+")
    if first not in system_names() or behind not in ("", SPRAYED):
        raise ValueError(
            f"--system is {shown(name)}; expected one of {', '.join(system_names())}, with +{SPRAYED} behind it or not"
        )
    system = with_slots(system_named(first), positive("--replica-slots", replica_slots))
    if headroom is not None:
        system = replace(system, dispatch=replace(system.dispatch, headroom=_number("--headroom", headroom)))
    if max_rounds is not None:
        rounds = positive("--max-rounds", max_rounds)
        system = system.with_rounds(rounds)
    return with_spray(name, system) if behind else system


def _number(argument: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{argument} is {shown(text)}; expected a number above 0")
    return value


def _options(given: list[str] | None) -> dict[str, str | bool]:
    pairs = [text.partition("=") for text in given or []]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ValueError(f"--xla is {shown(name)}; expected NAME=VALUE, such as xla_gpu_autotune_level=0")
    words: dict[str, str | bool] = {"true": True, "false": False}
    return {name.removeprefix("--"): words.get(value.lower(), value) for name, _, value in pairs}

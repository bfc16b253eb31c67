"""Command `tune`: the fastest form of a layer for an absent machine within a limit of memory."""

import re
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx

from jax_moe_lb.aot.compile import quiet_stderr
from jax_moe_lb.aot.load import DEFAULT_LOAD
from jax_moe_lb.aot.sizes import LayerSizes
from jax_moe_lb.aot.targets import Target, use_no_accelerators
from jax_moe_lb.aot.tune import Tuned, print_tuned, tune, usage_lines
from jax_moe_lb.cli.compile import LoadName, Sizes, TargetName, planned_load, system_of
from jax_moe_lb.cli.output import Json, one_line_errors, parse_integer, print_json, working
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.system import System
from jax_moe_lb.nn.config import ExpertConfig, Precision
from jax_moe_lb.nn.moe import MoE
from jax_moe_lb.routing.routers import TopK

BYTES = {"MB": 10**6, "GB": 10**9}


def tune_command(
    target: TargetName,
    system: Annotated[
        str, typer.Option("--system", metavar="NAME[:KEY=VALUE]", help="System, such as exact:headroom=1.25.")
    ] = "exact",
    sizes: Sizes = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory of a device, as 2GB.", show_default="5 % more"),
    ] = None,
    layers: Annotated[str, typer.Option("--layers", metavar="N", help="Layers whose residuals exist together.")] = "1",
    load: LoadName = DEFAULT_LOAD,
    as_json: Json = False,
) -> None:
    """Find the fastest form of a layer for an absent machine.

    It compiles about ten forms of the layer with gradients, each in 10 to 30 seconds, and estimates their times. The
    forms differ in dispatch, chunks, saved arrays and the scheduler of the compiler.
    """
    with one_line_errors(layers=layers, memory=memory):
        machine, shape = Target.parse(target), LayerSizes.parse(",".join(sizes)) if sizes else LayerSizes()
        chosen, number = system_of(system), parse_integer("--layers", layers)
        limit = None if memory is None else _bytes(memory)
        planned_load(machine, shape, chosen, load)
        machine.require_compiler()
        use_no_accelerators()
        with quiet_stderr():
            layer, x = _layer(machine, shape, chosen)
        with working("compiling") as tell:
            tuned = tune(layer, x, memory_bytes=limit, layers=number or 1, load=load, progress=tell)
        if as_json:
            print_json(_json(tuned))
        else:
            print_tuned(tuned)


def _layer(machine: Target, sizes: LayerSizes, system: System) -> tuple[MoE, jax.ShapeDtypeStruct]:
    """Return an abstract layer and the tokens of all ranks, in bfloat16."""
    mesh = machine.mesh()
    topology = Topology.from_mesh(mesh, mesh.axis_names, rails_per_node=mesh.shape["expert"])

    def make() -> MoE:
        return MoE(
            sizes.hidden,
            sizes.experts,
            TopK(sizes.per_token),
            mesh=mesh,
            topology=topology,
            system=system,
            experts=ExpertConfig(sizes.inner),
            precision=Precision(jnp.bfloat16, jnp.bfloat16),
            rngs=nnx.Rngs(0),
        )

    return nnx.eval_shape(make), jax.ShapeDtypeStruct((mesh.size * sizes.tokens, sizes.hidden), jnp.bfloat16)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?(MB|GB)", text, re.ASCII)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--memory is {shown(text)}; expected a size such as 1500MB or 2.5GB")
    return int(float(found[1]) * BYTES[found[2]])


def _json(tuned: Tuned) -> dict[str, Any]:
    named = {"system": repr(tuned.system), "best": tuned.best.name, "usage": usage_lines(tuned)}
    forms = [vars(form) | {"system": repr(form.system)} for form in tuned.tried]
    return vars(tuned) | named | {"tried": forms}

"""Estimated step of one layer on TPUs by form: dispatch, chunks and saved arrays, with their memory.

The layer is the one of `timeline`: `exact` in one round, forward and gradients, at Zipf 1.0. Times are estimated
from the compiled program; nothing runs. Requires the compiler of the extra `tpu`, as installed by `ci/accelerators.sh`
into `.venv-accelerators`.
"""

import argparse
import pickle
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.compiled.timeline import each, keep_option
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, ExpertConfig, MoE, Precision, TopK, exact
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr
from jax_moe_lb.aot.layer_program import LayerProgram
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.layer.systems import System
from jax_moe_lb.transport import Saved

SIZES = LayerSizes()
TARGETS = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2")
FORMS = {
    "once": exact(max_rounds=1, dispatch="once"),
    "once, saved rows and replicas": exact(max_rounds=1, dispatch="once").replace(
        saved=Saved(rows=True, replicas=True)
    ),
    "direct": exact(max_rounds=1, dispatch="direct"),
    "direct, two chunks": exact(buffers=Buffers(max_rounds=1, chunks=2)),
    "direct, two chunks, saved rows and replicas": exact(buffers=Buffers(max_rounds=1, chunks=2)).replace(
        saved=Saved(rows=True, replicas=True)
    ),
}
"""System of each form. The rule chooses `Once` on v5e, and `Direct` in two chunks on v6e and v5p."""

COLUMNS = {
    "target": "",
    "form": "",
    "temporaries MB": ".0f",
    "at the peak MB": ".0f",
    "residuals of a layer MB": ".0f",
    "step ms": ".2f",
    "exposed ms": ".2f",
    "memory-bound ms": ".2f",
    "rows ms": ".2f",
    "FLOPs-bound ms": ".2f",
}


def compiled(target: Target, form: str, folder: Path) -> ProgramReport:
    """Return the report of a program, from the folder if it is there."""
    path = folder / f"{target.name.replace(':', '_')}_{form.replace(', ', '_').replace(' ', '_')}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    with quiet_stderr():
        found = compile_layer(FORMS[form], target, SIZES, gradients=True)
    path.write_bytes(pickle.dumps(found))
    return found


def residual_bytes(target: Target, system: System) -> int:
    """Return the bytes that a layer saves for its backward pass on one device."""
    with quiet_stderr():
        mesh = target.mesh()

    def make() -> MoE:
        router, experts, precision = TopK(SIZES.per_token), ExpertConfig(SIZES.inner), Precision(None, jnp.bfloat16)
        sizes = (SIZES.hidden, SIZES.experts)
        return MoE(*sizes, router, mesh=mesh, system=system, experts=experts, precision=precision, rngs=nnx.Rngs(0))

    x = jax.ShapeDtypeStruct((mesh.size * SIZES.tokens, SIZES.hidden), jnp.bfloat16)
    layer = nnx.eval_shape(make)
    return LayerProgram(layer, x, DEFAULT_LOAD).residual_bytes(layer.system)


def row(program: tuple[str, str], folder: Path) -> list[Value]:
    """Return the row of a program."""
    target, form = Target.parse(program[0]), program[1]
    found, topology = compiled(target, form, folder), target.topology()
    load = LayerLoad.of(FORMS[form], SIZES, topology, counts_of(DEFAULT_LOAD, SIZES, topology.num_ranks))
    timeline = found.timeline(load)
    bounds = timeline.bounds()
    memory = found.temp_bytes / 1e6, found.peak_bytes / 1e6, residual_bytes(target, FORMS[form]) / 1e6
    times = timeline.total_s, timeline.exposed_s, *(bounds.get(name, 0.0) for name in ("HBM", "rows", "FLOPs"))
    return [f"`{target.name}`", form, *memory, *(1e3 * seconds for seconds in times)]


def options(parser: argparse.ArgumentParser) -> None:
    keep_option(parser)
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, help="Targets to compile for.")
    parser.add_argument("--forms", nargs="+", default=tuple(FORMS), choices=FORMS, help="Forms to compile.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    found = each(row, product(given.targets, given.forms), given.keep)
    title = "`exact` in one round on TPUs, forward and gradients, estimated from the compiled program"
    return {"forms": Table(COLUMNS, found, title)}

"""Estimated step of one layer by options of XLA and of the layer, with the terms of its exposed communication.

The layer is that of `timeline`: `exact` with fused gates on one node of H100, at Zipf 1.0.
Times are estimated from the compiled program; nothing runs. Requires the compiler of the extra `cuda`, as installed by
`ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path

from benchmarks.compiled.timeline import each, keep_option
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, exact
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr
from jax_moe_lb.aot.compiler_options import LATENCY_HIDING
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.layer.systems import System
from jax_moe_lb.transport import Saved

SIZES = LayerSizes()
TARGET = Target.parse("h100:1x8")
SYSTEM = exact(dispatch="direct")

PROGRAMS: dict[str, tuple[System, bool]] = {
    "none": (SYSTEM, False),
    "latency hiding": (SYSTEM, True),
    "latency hiding, 2 chunks, saved rows and replicas": (
        SYSTEM.replace(buffers=Buffers(chunks=2), saved=Saved(rows=True, replicas=True)),
        True,
    ),
}
"""System of each row, and whether the latency-hiding scheduler is on."""

TERMS = {
    "tokens, forward": ("dispatch", "combine"),
    "tokens, backward": ("backward/dispatch", "backward/combine"),
    "replicas": ("replicate", "backward/replicate"),
}
"""Stages of each term of exposed communication; the rest is "others": counts, addresses and all-reduces."""

COLUMNS = {
    "options": "",
    "temporary MB": ".0f",
    "step ms": ".2f",
    "exposed ms": ".2f",
    **dict.fromkeys((*TERMS, "others"), ".2f"),
    "hidden ms": ".2f",
}


def compiled(name: str, folder: Path) -> ProgramReport:
    """Return the report of a program, from the folder if it is there."""
    path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    system, hides = PROGRAMS[name]
    with quiet_stderr():
        found = compile_layer(system, TARGET, SIZES, gradients=True, fused=True, options={LATENCY_HIDING: hides})
    path.write_bytes(pickle.dumps(found))
    return found


def row(name: str, folder: Path) -> list[Value]:
    """Return the row of a program."""
    topology, program = TARGET.topology(), compiled(name, folder)
    counts = counts_of(DEFAULT_LOAD, SIZES, topology.num_ranks)
    found = program.timeline(LayerLoad.of(PROGRAMS[name][0], SIZES, topology, counts))
    terms = dict.fromkeys((*TERMS, "others"), 0.0)
    for span in found.compute:
        if span.is_communication:
            terms[next((term for term, stages in TERMS.items() if span.stage in stages), "others")] += span.seconds
    times = found.total_s, found.exposed_s, *terms.values(), found.hidden_s
    return [name, program.temp_bytes / 1e6, *(1e3 * seconds for seconds in times)]


def options(parser: argparse.ArgumentParser) -> None:
    keep_option(parser)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    found = each(row, PROGRAMS, given.keep)
    title = "`exact` with fused gates on `h100:1x8`, forward and gradients, estimated from the compiled program"
    return {"options": Table(COLUMNS, found, title)}

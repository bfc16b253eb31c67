"""Checks of compiled programs against their runs: temporaries and times of operations."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.device import gpu_kind, kernel_seconds
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.layers import mesh_of
from benchmarks.layer.dispatches import sending_copies
from benchmarks.layer.workloads import WORKLOADS
from benchmarks.render.results import Table
from jax_moe_lb import TopK, exact
from jax_moe_lb.aot import ProgramReport, Target, compiler_options
from jax_moe_lb.aot.compile import read_report
from jax_moe_lb.aot.operation_time import rates_of
from tests.layer_cases import Case, sharded_moe, with_gradients

FULL = Case(num_tokens=4096, features=2048 - 64, mlp_dim=768, num_experts=64)
TINY = Case(num_tokens=32, features=112, mlp_dim=128)
PER_TOKEN = 8
MEMORY_WITHIN, TIME_WITHIN = 0.05, 1.5
"""Largest difference of temporaries, and largest ratio of estimated and measured time in either direction."""

WITHOUT_GRAPHS: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
"""Operations of CUDA graphs have no times of their own."""


@cache
def program_of(scale: Scale) -> tuple[ProgramReport, Any, tuple[Any, ...]]:
    """Compile a layer of `exact` with its gradients; return its report, the program and its arguments."""
    case, (mesh, topology) = scale.of(FULL, TINY), mesh_of(jax.device_count())
    kernel, experts = case.params("bfloat16")
    x, mask = case.tokens(WORKLOADS[0], mesh.size, "bfloat16")
    target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), "float32")
    router, system = TopK(scale.of(PER_TOKEN, 2)), sending_copies(exact())
    layer = with_gradients(sharded_moe(mesh, topology, system, router), checked=False)
    arguments = (x, mask, kernel, experts, target)
    machine = Target.parse(f"{gpu_kind() or 'h100'}:1x{mesh.size}")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if jax.default_backend() == "gpu":
            options = compiler_options(mesh, options | WITHOUT_GRAPHS)
        compiled = layer.lower(*arguments).compile(options)
        return read_report(machine, compiled, mesh, Path(folder), None, 0.0), compiled, arguments


def temporaries(scale: Scale) -> Finding:
    """Check that the peak of memory in a run is the one of the compiled program.

    Without preallocation, the peak is without symmetric memory, which then has an allocator of its own.
    """
    report, compiled, arguments = program_of(scale)
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    start = (device.memory_stats() or {}).get("bytes_in_use")
    jax.block_until_ready(compiled(*arguments))
    after = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if before is None or after == before:
        return Finding(None, f"{report.temp_bytes / 1e6:.1f} MB compiled; the run raised no peak")
    # Results that alias no argument are allocated beside the temporaries.
    measured = after - start - report.output_bytes
    parts = {"in use before": start, "peak": after, "results": report.output_bytes}
    of = ", ".join(f"{name} {nbytes / 1e6:.1f}" for name, nbytes in parts.items())
    found = f"{measured / 1e6:.1f} MB in the run, {report.temp_bytes / 1e6:.1f} MB compiled; {of}"
    return Finding(abs(measured / report.temp_bytes - 1) <= MEMORY_WITHIN, found)


def timeline(scale: Scale) -> Finding:
    """Check the estimated times of operations against the profile of a run."""
    if jax.default_backend() == "gpu" and gpu_kind() is None:
        return Finding(None, f"no rates of {jax.devices()[0].device_kind}; expected a device of aot.targets")
    report, compiled, arguments = program_of(scale)
    calls = scale.of(5, 1)
    durations = kernel_seconds(lambda: compiled(*arguments), calls)
    spans = {span.name: span for span in report.timeline().compute}
    measured = {op: sum(seconds) / calls for op, seconds in durations.items() if op in spans}
    if not measured:
        return Finding(None, "the profile has no operation of the program")
    estimated, run = 1e6 * sum(spans[op].seconds for op in measured), 1e6 * sum(measured.values())
    # The table has times at the whole bandwidth, so that `measured_rates.memory_share` follows from each run.
    share = {"HBM": rates_of(Target.parse(report.target)).memory_share}
    rows = [
        [span.stage, op, span.bound, 1e6 * span.seconds * share.get(span.bound, 1.0), 1e6 * s]
        for op, s in measured.items()
        for span in (spans[op],)
    ]
    rows.sort(key=lambda row: -row[4])
    columns = {"stage": "", "operation": "", "bound": "", "estimated us": ".1f", "us": ".1f"}
    ratio = max(estimated, run) / max(min(estimated, run), 1e-9)
    found = f"{estimated:.0f} us estimated, {run:.0f} us in the run, {len(rows)} of {len(spans)} operations"
    return Finding(ratio <= TIME_WITHIN, found, Table(columns, rows[:100]))

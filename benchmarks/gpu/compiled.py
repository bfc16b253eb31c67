"""Checks of compiled programs against their runs: temporaries and times of operations."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.device import gpu_kind, kernel_seconds
from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.gpu.layers import mesh_of
from benchmarks.layer.dispatches import sending_copies
from benchmarks.layer.workloads import WORKLOADS
from benchmarks.render.results import Table
from jax_moe_lb import TopK
from jax_moe_lb.aot import ProgramReport, Target, compiler_options
from jax_moe_lb.aot.compile import read_report
from jax_moe_lb.aot.operation_time import rates_of
from jax_moe_lb.layer.systems import system_named
from tests.layer_cases import Case, sharded_moe, with_gradients

FULL = Case(num_tokens=4096, features=2048 - 64, mlp_dim=768, num_experts=64)
TINY = Case(num_tokens=32, features=112, mlp_dim=128)
PER_TOKEN = 8
MEMORY_WITHIN, TIME_WITHIN = 0.05, 1.5
"""Largest difference of temporaries, and largest ratio of estimated and measured time in either direction."""

FIRST_WITH_LOOPS_IN_GRAPHS = (0, 12)
"""First JAX version whose CUDA graphs take loops with kernels of Pallas; compiled with 0.11.2, the host waits twice."""

WITHOUT_GRAPHS: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
"""Operations of CUDA graphs have no times of their own."""


@cache
def program_of(name: str, scale: Scale, *, graphs: bool = False) -> tuple[ProgramReport, Any, tuple[Any, ...]]:
    """Compile a layer with its gradients for the devices here; return its report, the program and its arguments."""
    case, (mesh, topology) = scale.of(FULL, TINY), mesh_of(jax.device_count())
    kernel, experts = case.params("bfloat16")
    x, mask = case.tokens(WORKLOADS[0], mesh.size, "bfloat16")
    target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), "float32")
    router = TopK(scale.of(PER_TOKEN, 2))
    layer = with_gradients(sharded_moe(mesh, topology, sending_copies(system_named(name)), router), checked=False)
    arguments = (x, mask, kernel, experts, target)
    machine = Target.parse(f"{gpu_kind() or 'h100'}:1x{mesh.size}")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if jax.default_backend() == "gpu":
            options = compiler_options(mesh, options if graphs else options | WITHOUT_GRAPHS)
        compiled = layer.lower(*arguments).compile(options)
        return read_report(machine, compiled, mesh, Path(folder), None, 0.0), compiled, arguments


def temporaries(name: str) -> Check:
    """Return the check that the peak of memory in a run is the one of the compiled program.

    Without preallocation, the peak is without symmetric memory, which then has an allocator of its own.
    """

    def check(scale: Scale) -> Finding:
        report, compiled, arguments = program_of(name, scale)
        device = jax.devices()[0]
        before = (device.memory_stats() or {}).get("peak_bytes_in_use")
        start = (device.memory_stats() or {}).get("bytes_in_use")
        jax.block_until_ready(compiled(*arguments))
        after = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if before is None or after == before:
            return Finding(None, f"{report.temp_bytes / 1e6:.1f} MB compiled; the run raised no peak")
        # Results that alias no argument are allocated beside the temporaries.
        measured = after - start - report.output_bytes
        ratio = measured / report.temp_bytes
        measured_mb, compiled_mb = measured / 1e6, report.temp_bytes / 1e6
        parts = {"in use before": start, "peak": after, "results": report.output_bytes}
        of = ", ".join(f"{name} {nbytes / 1e6:.1f}" for name, nbytes in parts.items())
        found = f"{measured_mb:.1f} MB in the run, {compiled_mb:.1f} MB compiled; {of}"
        return Finding(abs(ratio - 1) <= MEMORY_WITHIN, found)

    return check


def timeline(name: str) -> Check:
    """Return the check of the estimated times of operations against the profile of a run."""

    def check(scale: Scale) -> Finding:
        if jax.default_backend() == "gpu" and gpu_kind() is None:
            return Finding(None, f"no rates of {jax.devices()[0].device_kind}; expected a device of aot.targets")
        report, compiled, arguments = program_of(name, scale)
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

    return check


def no_host_waits(name: str) -> Check:
    """Return the check that a layer without loops waits for its host at no point."""

    def check(scale: Scale) -> Finding:
        if jax.default_backend() != "gpu":
            return Finding(None, "programs for CPUs have no thunks of GPUs")
        if jax.__version_info__ < FIRST_WITH_LOOPS_IN_GRAPHS:
            return Finding(
                None, f"JAX is {jax.__version__}; expected 0.12 or later, whose graphs take loops with kernels"
            )
        report, _, _ = program_of(name, scale, graphs=True)
        return Finding(report.host_waits == 0 if report.host_waits is not None else None, f"{report.host_waits} waits")

    return check

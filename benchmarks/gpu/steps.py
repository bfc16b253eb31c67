"""Checks of training steps of published models at reduced depth: time, memory and losses against their estimates."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from benchmarks.gpu.compiled import MEMORY_WITHIN, WITHOUT_GRAPHS
from benchmarks.gpu.device import gpu_kind, kernel_seconds
from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.gpu.step_cases import (
    CASES,
    OUTSIDE,
    TINY,
    StepCase,
    Work,
    classes_of,
    compile_step,
    seconds_by_class,
    spans_of,
    works_of,
)
from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import ProgramReport, Target

TIME_WITHIN = 1.25
"""Largest ratio of estimated and measured time of a step, in either direction."""

MOST_OPERATIONS = 100
"""Rows of single operations."""

COLUMNS = {
    "what": "",
    "name": "",
    "unit": "",
    "estimated": ".4g",
    "measured": ".4g",
    "measured / estimated": ".2f",
    "GB": ".4g",
    "GFLOP": ".4g",
}


@dataclass(frozen=True)
class Step:
    """Compiled programs of a case."""

    case: StepCase
    mesh: Mesh
    init: Compiled
    step: Compiled
    profiled: Compiled
    report: ProgramReport
    compile_s: float

    @classmethod
    def of(cls, case: StepCase) -> "Step":
        """Trace and compile a case for the device here."""
        begin = time.perf_counter()
        mesh = case.mesh(jax.devices()[0])
        programs, target = case.programs(mesh), target_here()
        lowered = case.lower(programs, mesh, target)
        with ThreadPoolExecutor(1) as pool:
            init = pool.submit(programs.init.lower().compile)  # type: ignore[attr-defined]
            step, _ = compile_step(lowered, mesh, target, case.ideal_flops, {}, read=False)
            seconds = time.perf_counter() - begin
            # After the other one, whose tuned products it takes over.
            options = WITHOUT_GRAPHS if jax.default_backend() == "gpu" else {}
            profiled, report = compile_step(lowered, mesh, target, case.ideal_flops, options)
        assert report is not None
        return cls(case, mesh, init.result(), step, profiled, report, seconds)


def target_here() -> Target:
    """Return the target of this GPU; an H100 in a dry run."""
    return Target.parse(f"{gpu_kind() or 'h100'}:1x1")


@dataclass
class Run:
    """Training state, which each step donates, and the losses of all steps."""

    state: Any
    tokens: jax.Array
    losses: list[jax.Array] = field(default_factory=list)

    def step(self, program: Compiled) -> jax.Array:
        """Run a step, and return its loss."""
        self.state, loss, *_ = program(self.state, self.tokens)
        self.losses.append(loss)
        return loss

    def seconds(self, program: Compiled, number: int) -> tuple[list[float], float]:
        """Return the seconds of steps that the host awaits, and of a step of as many back-to-back steps."""
        times = []
        for _ in range(number):
            begin = time.perf_counter()
            jax.block_until_ready(self.step(program))
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(number):
            loss = self.step(program)
        jax.block_until_ready(loss)
        return times, (time.perf_counter() - begin) / number


def step_holds(name: str) -> Check:
    """Return the check of a step's time, memory and losses against the estimates."""

    def check(scale: Scale) -> Finding:
        if scale.dry and name != "qwen3":
            return Finding(None, "not in a dry run")
        step = Step.of(scale.of(CASES[name], TINY))
        rows = _Rows(step, scale)
        try:
            return _measured(step, rows, scale)
        except jax.errors.JaxRuntimeError as error:
            # Later cases may fit, while other errors may be of the device.
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            return Finding(False, " ".join(str(error).split())[:400], rows.table())

    return check


def _measured(step: Step, rows: "_Rows", scale: Scale) -> Finding:
    """Measure a step, and compare it with its estimates."""
    device, tokens = jax.devices()[0], step.case.tokens(step.mesh)
    empty = _memory(device)[0]
    run = Run(jax.block_until_ready(step.init()), tokens)
    start, before = _memory(device)
    jax.block_until_ready(run.step(step.step))
    peak = _memory(device)[1]
    measured = peak - start if peak > before else None
    held = step.step.memory_analysis()
    compiled = held.temp_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    memory_apart = None if measured is None else abs(measured / compiled - 1)
    rows.add("memory", "arguments", "GB", held.argument_size_in_bytes / 1e9, (start - empty) / 1e9 or None)
    rows.add("memory", "temporaries", "GB", compiled / 1e9, None if measured is None else measured / 1e9)
    ratio = _times(run, step, rows, scale)
    losses = [float(loss) for loss in run.losses]
    for i in (0, 1, 4, 9, len(losses) - 1):
        if i < len(losses):
            rows.add("loss", f"step {i + 1}", "nats", None, losses[i])
    learns = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    holds = learns and max(ratio, 1 / ratio) <= TIME_WITHIN and (memory_apart or 0) <= MEMORY_WITHIN
    memory = "no new peak of memory" if memory_apart is None else f"memory apart by {memory_apart:.1%}"
    found = f"time x {ratio:.2f} of the estimate, {memory}, loss {losses[0]:.2f} to {losses[-1]:.2f}"
    return Finding(holds, found, rows.table())


def _memory(device: jax.Device) -> tuple[int, int]:
    """Return the bytes in use and the peak; 0 for a CPU."""
    found = device.memory_stats() or {}
    return found.get("bytes_in_use", 0), found.get("peak_bytes_in_use", 0)


class _Rows:
    """Table of a case, which is kept while it grows."""

    def __init__(self, step: Step, scale: Scale) -> None:
        self.step, self.scale, self.rows = step, scale, list[list[Value]]()

    def add(
        self,
        what: str,
        name: str,
        unit: str,
        estimated: float | None,
        measured: float | None,
        work: Work | None = None,
    ) -> None:
        ratio = measured / estimated if estimated and measured is not None else None
        giga: list[Value] = [None, None] if work is None else [work.nbytes / 1e9, work.flops / 1e9]
        self.rows.append([what, name, unit, estimated, measured, ratio, *giga])

    def keep(self) -> None:
        self.scale.keep(self.table())

    def table(self) -> Table:
        return Table(COLUMNS, self.rows, str(self.step.case))


def _times(run: Run, step: Step, rows: _Rows, scale: Scale) -> float:
    """Measure times, and return the ratio of the measured time and the estimate."""
    estimated_s, number = step.report.timeline().total_s, scale.of(6, 2)
    jax.block_until_ready(run.step(step.step))
    times, behind_s = run.seconds(step.step, number)
    median_s = float(np.median(times))
    rows.add("step", "time", "ms", estimated_s * 1e3, median_s * 1e3)
    rows.add("step", "time, back to back", "ms", estimated_s * 1e3, behind_s * 1e3)
    jax.block_until_ready(run.step(step.profiled))
    without_s = run.seconds(step.profiled, scale.of(3, 1))[1]
    rows.add("step", "time without CUDA graphs", "ms", estimated_s * 1e3, without_s * 1e3)
    rows.add("step", "tokens/s", "", step.case.num_tokens / estimated_s, step.case.num_tokens / median_s)
    device = target_here().device
    if device is not None:
        ideal_s = step.case.ideal_flops / device.flops_per_s
        rows.add("step", "model FLOPs utilization", "", ideal_s / estimated_s, ideal_s / median_s)
    rows.add("step", "compilation", "s", None, step.compile_s)
    rows.keep()
    _operations(run, step, rows, scale.of(2, 1))
    return median_s / estimated_s


def _operations(run: Run, step: Step, rows: _Rows, calls: int) -> None:
    """Measure each operation, and add classes and the longest ones."""
    spans, classes, estimated = spans_of(step.report), classes_of(step.report), seconds_by_class(step.report)
    works = works_of(step.report)
    durations = kernel_seconds(lambda: run.step(step.profiled), calls)
    measured = {name: sum(all_of) / calls for name, all_of in durations.items()}
    by_class: dict[str, float] = {}
    for name, seconds in measured.items():
        kind = classes.get(name, OUTSIDE)
        by_class[kind] = by_class.get(kind, 0.0) + seconds
    rows.add("step", "time of kernels", "ms", sum(estimated.values()) * 1e3, sum(measured.values()) * 1e3)
    for kind in sorted(estimated | by_class, key=lambda kind: -max(estimated.get(kind, 0), by_class.get(kind, 0))):
        work = sum((one for name, one in works.items() if classes[name] == kind), Work())
        rows.add("class", kind, "ms", _of(estimated, kind, 1e3), _of(by_class, kind, 1e3), work)
    longest = sorted(spans.keys() | measured.keys(), key=lambda name: -_longest(name, spans, measured))
    for name in longest[:MOST_OPERATIONS]:
        span = spans.get(name)
        label = f"{classes.get(name, OUTSIDE)}: {name}" + (f" ({span.bound}, {span.stage})" if span else "")
        seconds = None if span is None else span.seconds * 1e6
        rows.add("operation", label, "us", seconds, _of(measured, name, 1e6), works.get(name))
    rows.keep()


def _of(found: dict[str, float], name: str, factor: float) -> float | None:
    return None if name not in found else found[name] * factor


def _longest(name: str, spans: dict[str, Any], measured: dict[str, float]) -> float:
    return max(spans[name].seconds if name in spans else 0.0, measured.get(name, 0.0))

"""Checks of training steps of published models at reduced depth: time, memory and losses against their estimates.

The first check of a process starts the compilation of all cases, and small models in processes of their own, so that
all cores compile. Nothing is timed before they end.
"""

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from benchmarks.gpu import constants
from benchmarks.gpu.compiled import MEMORY_WITHIN, WITHOUT_GRAPHS
from benchmarks.gpu.device import gpu_kind, kernel_seconds
from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.gpu.step_cases import (
    CASES,
    MEASURED,
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
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import Table, Value, read
from jax_moe_lb.aot import ProgramReport, Target

TIME_WITHIN = 1.25
"""Largest ratio of estimated and measured time of a step, in either direction."""

RATE_WITHIN = 1.5
"""Largest ratio of a measured rate of a large operation and the assumed one, in either direction."""

LOSS_WITHIN = 0.01
"""Largest relative difference of the first losses in bfloat16 and float32."""

FIRST_STEPS = 3
"""Compared losses; later ones differ by rounding that training amplifies."""

COMPILE_S, DRY_RUN_S = 180.0, 450.0
"""Limits of the compilation of all cases, and in a dry run on a small machine."""

CHILD_FRACTION = 0.03
"""Share of the GPU's memory for a small model."""

MOST_OPERATIONS = 100
"""Rows of single operations."""

COLUMNS = {
    "what": "",
    "name": "",
    "unit": "",
    "predicted": ".4g",
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


@dataclass(frozen=True, eq=False)
class Background:
    """Compilations and small models of this process."""

    tracing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    compiling: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(12))
    steps: dict[str, Future[Future[Step]]] = field(default_factory=dict)
    small: dict[str, Future[subprocess.CompletedProcess[str]]] = field(default_factory=dict)

    def start(self, name: str, case: StepCase) -> None:
        """Trace and compile a case."""
        if name not in self.steps:
            self.steps[name] = self.tracing.submit(_compile, case, self.compiling)

    def start_small(self, name: str, *, dry: bool) -> None:
        """Train a small model in a process of its own."""
        if name in self.small:
            return
        # Both platforms are in use.
        environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"} | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(CHILD_FRACTION),
        }
        command = [sys.executable, "-m", "benchmarks.gpu.tiny_losses", name, *(["--dry-run"] if dry else [])]
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        limit_s = DRY_RUN_S if dry else COMPILE_S
        self.small[name] = self.compiling.submit(subprocess.run, command, env=environment, timeout=limit_s, **options)


background = cache(Background)
"""Return the compilations of this process."""


def _compile(case: StepCase, pool: ThreadPoolExecutor) -> Future[Step]:
    """Trace a case in this thread, and start its compilations."""
    begin = time.perf_counter()
    device = jax.devices()[0]
    mesh = case.mesh(device)
    programs = case.programs(mesh)
    target = target_here()
    lowered = case.lower(programs, mesh, target)
    init = pool.submit(programs.init.lower().compile)  # type: ignore[attr-defined]

    def compiled() -> Step:
        step, _ = compile_step(lowered, mesh, target, case.ideal_flops, {}, read=False)
        seconds = time.perf_counter() - begin
        # After the other one, whose tuned products it takes over.
        options = WITHOUT_GRAPHS if jax.default_backend() == "gpu" else {}
        profiled, report = compile_step(lowered, mesh, target, case.ideal_flops, options)
        assert report is not None
        return Step(case, mesh, init.result(), step, profiled, report, seconds)

    return pool.submit(compiled)


def target_here() -> Target:
    """Return the target of this GPU; an H100 in a dry run."""
    return Target.parse(f"{gpu_kind() or 'h100'}:1x1")


def case_of(name: str, scale: Scale) -> StepCase:
    """Return a case, or a small model of its architecture in a dry run."""
    if not scale.dry:
        return CASES[name]
    return replace(TINY[name.removesuffix("-plain")], system=CASES[name].system)


def compiled_step(name: str, scale: Scale) -> Step:
    """Return the programs of a case; it is compiled alone if `constants_hold` did not start it."""
    work = background()
    work.start(name, case_of(name, scale))
    limit_s = scale.of(COMPILE_S, DRY_RUN_S)
    return work.steps[name].result(limit_s).result(limit_s)


def constants_hold(scale: Scale) -> Finding:
    """Measure the rates of the timeline, after all compilations."""
    work = background()
    dry_cases = ("qwen3",)
    for name in TINY if not scale.dry else dry_cases:
        work.start_small(name, dry=scale.dry)
    # The one with the longest compilation first.
    for name in reversed(MEASURED) if not scale.dry else dry_cases:
        work.start(name, case_of(name, scale))
    table = constants.measure(scale, lambda: _await(work, scale.of(COMPILE_S, DRY_RUN_S)))
    large = [row for row in table.rows if row[0] in ("memory", "product") and row[5] is not None]
    far = [f"{row[1]} x {row[5]:.2f}" for row in large if not 1 / RATE_WITHIN <= float(row[5]) <= RATE_WITHIN]  # type: ignore[arg-type]
    found = f"{len(far)} of {len(large)} differ by more: {'; '.join(far)}"
    return Finding(not far if large else None, found if far else f"all {len(large)} rates", table)


def _await(work: Background, limit_s: float) -> None:
    """Wait for all compilations and small models; their checks raise the exceptions."""
    end = time.monotonic() + limit_s
    traced, _ = wait(work.steps.values(), limit_s)
    compiling = [future.result() for future in traced if future.exception() is None]
    wait([*compiling, *work.small.values()], max(end - time.monotonic(), 0))


# ---- losses of small models ---------------------------------------------------------


def losses_agree(name: str) -> Check:
    """Return the check of the losses of a small model, in bfloat16 here against float32 on the CPU."""

    def check(scale: Scale) -> Finding:
        work = background()
        if scale.dry and name != "qwen3":
            return Finding(None, "not in a dry run")
        work.start_small(name, dry=scale.dry)
        try:
            ended = work.small[name].result()
        except subprocess.TimeoutExpired as error:
            return Finding(False, f"not trained within {error.timeout:.0f} s")
        if ended.returncode:
            return Finding(False, " ".join(ended.stderr.split())[-400:])
        here, reference = json.loads(ended.stdout.splitlines()[-1])
        rows: list[list[Value]] = [[i + 1, *pair] for i, pair in enumerate(zip(here, reference, strict=True))]
        table = Table({"step": "d", "bfloat16, here": ".4f", "float32, CPU": ".4f"}, rows)
        apart = max(abs(a / b - 1) for _, a, b in rows[:FIRST_STEPS])  # type: ignore[operator]
        holds = all(map(math.isfinite, here)) and here[-1] < here[0] and apart <= LOSS_WITHIN
        return Finding(holds, f"loss {here[0]:.3f} to {here[-1]:.3f}, first ones apart by {apart:.2%}", table)

    return check


# ---- steps --------------------------------------------------------------------------


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
        step = compiled_step(name, scale)
        rows = _Rows(name, step, scale)
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

    def __init__(self, name: str, step: Step, scale: Scale) -> None:
        self.step, self.scale, self.rows = step, scale, list[list[Value]]()
        self.predicted = {} if scale.dry else predictions(name)

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
        predicted = self.predicted.get((what, name))
        giga: list[Value] = [None, None] if work is None else [work.nbytes / 1e9, work.flops / 1e9]
        self.rows.append([what, name, unit, predicted, estimated, measured, ratio, *giga])

    def keep(self) -> None:
        self.scale.keep(self.table())

    def table(self) -> Table:
        return Table(COLUMNS, self.rows, str(self.step.case))


def predictions(name: str) -> dict[tuple[str, str], float]:
    """Return the estimates of a case from its program for an absent GPU, by the first columns of the table."""
    path = RESULTS / "predicted_steps.json"
    run = read(path).get(f"{path.stem}_{name}") if path.exists() else None
    rows = run.tables["steps"].rows if run else []
    return {(str(row[1]), str(row[2])): row[4] for row in rows}  # type: ignore[misc]


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

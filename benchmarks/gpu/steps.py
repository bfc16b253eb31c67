"""Checks of training steps of published models at reduced depth: time, memory and losses against their estimates."""

import json
import math
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from benchmarks.gpu.compiled import MEMORY_WITHIN
from benchmarks.gpu.device import gpu_kind
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import ProgramReport, Target, compiler_options
from jax_moe_lb.aot.compile import read_report
from models.architectures.config_json import Fields
from models.architectures.published import PUBLISHED
from models.architectures.registry import configured
from models.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.decoder.config import DecoderConfig
from models.dry_run.step import decoder_flops_per_token
from models.mesh import batch_sharding, make_system, mesh_from
from models.training.step import Programs, make_programs

TIME_WITHIN = 1.25
"""Largest ratio of estimated and measured time of a step, in either direction."""

COLUMNS = {"what": "", "unit": "", "estimated": ".4g", "measured": ".4g", "measured / estimated": ".2f"}

STEPS = 40
"""Steps of the learning rate schedule, more than a check runs."""

SKEW = 4
"""Power of uniform random numbers in the synthetic tokens: a quarter of the tokens is from a 256th of the words."""


@dataclass(frozen=True)
class StepCase:
    """Training step of a published model on one device."""

    model: str
    layers: int
    batch: int
    length: int = 4096
    fields: Mapping[str, Any] = field(default_factory=dict)
    param_dtype: str = "float32"

    def __str__(self) -> str:
        more = "".join(f", {name} {value}" for name, value in self.fields.items())
        sizes = f"{self.layers} layers{more}, {self.batch} x {self.length} tokens"
        return f"{self.model}, {sizes}, parameters {self.param_dtype}, `exact`"

    @property
    def decoder(self) -> DecoderConfig:
        """Sizes of the model."""
        raw = PUBLISHED[self.model] | {"num_hidden_layers": self.layers} | dict(self.fields)
        return configured(Fields(json.dumps(raw)), compute_dtype="bfloat16", param_dtype=self.param_dtype)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(compute_dtype="bfloat16"),
            parallel=ParallelConfig(expert_parallel=1, system="exact"),
            batch=BatchConfig(self.batch, self.length),
            optimizer=OptimizerConfig(learning_rate=3e-4, state_dtype=self.param_dtype),
            data=DataConfig(within_documents=False),
            steps=STEPS,
        )

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length

    @property
    def ideal_flops(self) -> int:
        """Ideal floating-point operations of a step, without rematerialized ones and the optimizer."""
        return decoder_flops_per_token(self.decoder, self.length) * self.num_tokens

    def programs(self, mesh: Mesh) -> Programs:
        """Return the programs of the run, not compiled."""
        return make_programs(self.config, mesh, make_system(self.config.parallel), self.decoder)

    def mesh(self, device: jax.Device) -> Mesh:
        return mesh_from([device], self.config.parallel)

    def tokens(self, mesh: Mesh) -> jax.Array:
        """Return synthetic tokens of one document, of uneven frequency so that few steps lower the loss."""
        uniform = np.random.default_rng(0).random((self.batch, self.length + 1))
        tokens = np.floor(uniform**SKEW * self.decoder.vocab_size).astype(np.int32)
        return jax.device_put(tokens, batch_sharding(mesh))

    def lower(self, programs: Programs, mesh: Mesh) -> Lowered:
        shape = (self.batch, self.length + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
        return programs.step.lower(programs.state_shapes, tokens)


CASES = {
    "qwen3": StepCase("Qwen3-30B-A3B", 2, 4),
    "deepseek": StepCase(
        "DeepSeek-V3", 1, 4, fields={"n_routed_experts": 32, "first_k_dense_replace": 0}, param_dtype="bfloat16"
    ),
}
"""Cases by growing memory, since an allocator keeps its peak."""

_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 64}
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
TINY = StepCase("Qwen3-30B-A3B", 2, 4, 256, fields=_SIZES | _EXPERTS)
"""Case of a dry run."""


@dataclass(frozen=True)
class Step:
    """Compiled programs of a case."""

    case: StepCase
    mesh: Mesh
    init: Compiled
    step: Compiled
    report: ProgramReport
    compile_s: float

    @classmethod
    def of(cls, case: StepCase) -> "Step":
        """Trace and compile a case for the device here."""
        begin = time.perf_counter()
        mesh = case.mesh(jax.devices()[0])
        programs, target = case.programs(mesh), target_here()
        lowered = case.lower(programs, mesh)
        with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
            init = pool.submit(programs.init.lower().compile)  # type: ignore[attr-defined]
            dumps: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            step = lowered.compile(compiler_options(mesh, dumps))
            report = read_report(target, step, mesh, Path(folder), case.ideal_flops, 0.0)
            return cls(case, mesh, init.result(), step, report, time.perf_counter() - begin)


def target_here() -> Target:
    """Return the target of this GPU; an H100 in a dry run."""
    return Target.parse(f"{gpu_kind() or 'h100'}:1x1")


@dataclass
class Run:
    """Training state, which each step donates, and the losses of all steps."""

    program: Compiled
    state: Any
    tokens: jax.Array
    losses: list[jax.Array] = field(default_factory=list)

    def step(self) -> jax.Array:
        self.state, loss, *_ = self.program(self.state, self.tokens)
        self.losses.append(loss)
        return loss

    def seconds(self, number: int) -> tuple[float, float]:
        """Return the median seconds of steps that the host awaits, and of as many back-to-back steps."""
        times = []
        for _ in range(number):
            begin = time.perf_counter()
            jax.block_until_ready(self.step())
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(number):
            loss = self.step()
        jax.block_until_ready(loss)
        return float(np.median(times)), (time.perf_counter() - begin) / number


def step_holds(name: str, scale: Scale) -> Finding:
    """Check a step's time, memory and losses against the estimates."""
    if scale.dry and name != "qwen3":
        return Finding(None, "not in a dry run")
    try:
        return _measured(Step.of(scale.of(CASES[name], TINY)), scale)
    except jax.errors.JaxRuntimeError as error:
        # Later cases may fit, while other errors may be of the device.
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return Finding(False, " ".join(str(error).split())[:400])


def _measured(step: Step, scale: Scale) -> Finding:
    """Measure a step, and compare it with its estimates."""
    device, case, rows = jax.devices()[0], step.case, list[list[Value]]()

    def add(what: str, unit: str, estimated: float | None, measured: float | None) -> None:
        ratio = measured / estimated if estimated and measured is not None else None
        rows.append([what, unit, estimated, measured, ratio])

    empty = _memory(device)[0]
    run = Run(step.step, jax.block_until_ready(step.init()), case.tokens(step.mesh))
    start, before = _memory(device)
    jax.block_until_ready(run.step())
    peak = _memory(device)[1]
    measured = peak - start if peak > before else None
    held = step.step.memory_analysis()
    compiled = held.temp_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    memory_apart = None if measured is None else abs(measured / compiled - 1)
    add("arguments", "GB", held.argument_size_in_bytes / 1e9, (start - empty) / 1e9 or None)
    add("temporaries", "GB", compiled / 1e9, None if measured is None else measured / 1e9)
    estimated_s = step.report.timeline().total_s
    median_s, behind_s = run.seconds(scale.of(6, 2))
    add("time", "ms", estimated_s * 1e3, median_s * 1e3)
    add("time, back to back", "ms", estimated_s * 1e3, behind_s * 1e3)
    add("tokens/s", "", case.num_tokens / estimated_s, case.num_tokens / median_s)
    if (peak_rate := target_here().device) is not None:
        ideal_s = case.ideal_flops / peak_rate.flops_per_s
        add("model FLOPs utilization", "", ideal_s / estimated_s, ideal_s / median_s)
    add("compilation", "s", None, step.compile_s)
    losses = [float(loss) for loss in run.losses]
    for i in sorted({0, 1, 4, 9, len(losses) - 1} & set(range(len(losses)))):
        add(f"loss of step {i + 1}", "nats", None, losses[i])
    ratio = median_s / estimated_s
    learns = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    holds = learns and max(ratio, 1 / ratio) <= TIME_WITHIN and (memory_apart or 0) <= MEMORY_WITHIN
    memory = "no new peak of memory" if memory_apart is None else f"memory apart by {memory_apart:.1%}"
    found = f"time x {ratio:.2f} of the estimate, {memory}, loss {losses[0]:.2f} to {losses[-1]:.2f}"
    return Finding(holds, found, Table(COLUMNS, rows, str(case)))


def _memory(device: jax.Device) -> tuple[int, int]:
    """Return the bytes in use and the peak; 0 for a CPU."""
    found = device.memory_stats() or {}
    return found.get("bytes_in_use", 0), found.get("peak_bytes_in_use", 0)

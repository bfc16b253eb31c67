"""Training steps of published models at reduced depth on one device: programs, and estimates of compiled ones."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jax_moe_lb.aot import ProgramReport, Target, compiler_options
from jax_moe_lb.aot.compile import read_report
from jax_moe_lb.aot.schedule import Kind, ScheduledOperation
from jax_moe_lb.aot.timeline import WAIT, Span
from models.architectures.config_json import Fields
from models.architectures.published import PUBLISHED
from models.architectures.registry import configured
from models.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.decoder.config import DecoderConfig
from models.dry_run.step import decoder_flops_per_token
from models.mesh import batch_sharding, make_system, mesh_from
from models.training.step import Programs, make_programs

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
        """Configuration of the run."""
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
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def ideal_flops(self) -> int:
        """Ideal floating-point operations of a step, without rematerialized ones and the optimizer."""
        return decoder_flops_per_token(self.decoder, self.length) * self.num_tokens

    def programs(self, mesh: Mesh) -> Programs:
        """Return the programs of the run, not compiled."""
        return make_programs(self.config, mesh, make_system(self.config.parallel), self.decoder)

    def mesh(self, device: jax.Device) -> Mesh:
        """Return the mesh of one device."""
        return mesh_from([device], self.config.parallel)

    def tokens(self, mesh: Mesh) -> jax.Array:
        """Return synthetic tokens of one document, of uneven frequency so that few steps lower the loss."""
        uniform = np.random.default_rng(0).random((self.batch, self.length + 1))
        tokens = np.floor(uniform**SKEW * self.decoder.vocab_size).astype(np.int32)
        return jax.device_put(tokens, batch_sharding(mesh))

    def lower(self, programs: Programs, mesh: Mesh, target: Target) -> Lowered:
        """Trace the step for a device, which may be absent."""
        shape = (self.batch, self.length + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
        device = mesh.devices.flat[0]
        # Third-party kernels query the default device for its architecture.
        with jax.default_device(device):
            platforms = (target.platform,) if device.platform in ("gpu", "cuda") else None
            return programs.step.trace(programs.state_shapes, tokens).lower(lowering_platforms=platforms)


CASES = {
    "qwen3": StepCase("Qwen3-30B-A3B", 2, 4),
    "deepseek": StepCase(
        "DeepSeek-V3", 1, 4, fields={"n_routed_experts": 32, "first_k_dense_replace": 0}, param_dtype="bfloat16"
    ),
}
"""Cases by growing memory, since an allocator keeps its peak."""

TINY = StepCase(
    "Qwen3-30B-A3B",
    2,
    4,
    256,
    fields={
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
)
"""Case of a dry run."""


def compile_step(
    lowered: Lowered, mesh: Mesh, target: Target, ideal_flops: int, options: Mapping[str, Any], *, read: bool = True
) -> tuple[Compiled, ProgramReport | None]:
    """Compile a traced step."""
    with tempfile.TemporaryDirectory() as folder:
        dumps: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if read else {}
        compiled = lowered.compile(compiler_options(mesh, dumps | dict(options)))
        report = read_report(target, compiled, mesh, Path(folder), ideal_flops, 0.0) if read else None
    return compiled, report


CLASSES = (
    ("sorts", r"sort"),
    ("scatters", r"scatter"),
    ("gathers", r"gather"),
    ("reductions", r"reduce|softmax"),
    ("copies and pads", r"copy|pad_|wrapped_(slice|transpose|convert)|concatenate|dynamic|transpose_fusion|slice_fus"),
)
"""Classes of operations bound by memory, by the names that XLA gives them; the rest is elementwise."""

OUTSIDE = "outside of the schedule"
"""Class of kernels with other names than those of the schedule."""


def operations_of(schedule: tuple[ScheduledOperation, ...]) -> Iterator[ScheduledOperation]:
    """Yield the operations of a schedule, those of loops too."""
    for one in schedule:
        yield one
        yield from operations_of(one.body)


def class_of(one: ScheduledOperation) -> str:
    """Return the class of an operation: its kind of product, or its access to memory."""
    if one.product is not None and "attention" in one.name:
        return "attention"
    if one.product is not None:
        form = one.product
        return "dense products" if form.kind == "dense" else f"grouped: {form.kind}, {form.kernel}"
    if one.kind is Kind.KERNEL:
        return next((name for name, pattern in CLASSES if re.search(pattern, one.name)), "elementwise")
    return {Kind.LOOP: "waits of the host"}.get(one.kind, f"{one.kind.value}s")


def spans_of(report: ProgramReport) -> dict[str, Span]:
    """Return the estimated operations of a step by name, without waits for other streams."""
    return {span.name: span for span in report.timeline().spans if not span.name.startswith(WAIT)}


def classes_of(report: ProgramReport) -> dict[str, str]:
    """Return the class of each operation by name."""
    return {one.name: class_of(one) for one in operations_of(report.schedule)}


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and floating-point operations, in all executions."""

    nbytes: int = 0
    flops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)


def works_of(report: ProgramReport) -> dict[str, Work]:
    """Return the work of each estimated operation by name."""
    spans = spans_of(report)
    return {
        one.name: Work(spans[one.name].times * one.nbytes, spans[one.name].times * one.flops)
        for one in operations_of(report.schedule)
        if one.name in spans
    }


def seconds_by_class(report: ProgramReport) -> dict[str, float]:
    """Return the estimated seconds of each class, largest first."""
    classes, found = classes_of(report), dict[str, float]()
    for name, span in spans_of(report).items():
        found[classes[name]] = found.get(classes[name], 0.0) + span.seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))

"""Memory model of the simulator against programs compiled for H100s not present: layers of three models in a step.

A training step runs a stack of layers in a loop, inside `jax.checkpoint` with the names set by a layer. It uses Adam
with weights in bfloat16 and a copy in float32, and donates the state. Inference runs the same layers forward.

Requires the GPU compiler: the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.layer.dispatches import sending_copies
from benchmarks.render.results import Table
from jax_moe_lb import Experts, MoEParams, System, TopK, Topology, moe
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_for, quiet_stderr, use_no_accelerators
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape, Step
from jax_moe_lb.sim.memory import Memory, memory_of

LAYERS = 4
"""Layers per step; memory is linear in their number."""

AGREES = 0.1
"""Maximum relative difference between prediction and program, checked by a test."""

DECAYS, RATE = (0.9, 0.95), 1e-4


@dataclass(frozen=True)
class Case:
    model: str
    target: str
    system: str
    train: bool
    sizes: LayerSizes
    max_rounds: int | None = None

    @property
    def name(self) -> str:
        passes = "training" if self.train else "inference"
        return f"{self.model}, {passes}, {self.system}" + (", one round" if self.max_rounds == 1 else "")

    def built(self) -> System:
        """Return the system with the options of the case."""
        system = sending_copies(system_named(self.system))
        buffers = replace(system.dispatch.buffers, max_rounds=self.max_rounds)
        return system.replace(buffers=buffers)

    def predicted(self) -> Memory:
        sizes = asdict(self.sizes)
        model = ModelShape(layers=LAYERS, gradient_itemsize=2, **sizes)
        mesh = [int(number) for number in self.target.split(":")[1].split("x")]
        levels = [Links(name, size, 1e9) for name, size in zip(("node", "gpu"), mesh, strict=True) if size > 1]
        step = Step(backward=self.train)
        return memory_of(self.built(), model, Cluster(tuple(levels)), Migration(), step)

    def compile(self) -> ProgramReport:
        target = Target.parse(self.target)
        mesh = target.mesh()
        layer = partial(_layer, mesh=mesh, system=self.built(), per_token=self.sizes.per_token)
        program = partial(_step if self.train else _forward, layer)
        state, x = _arguments(self.sizes, mesh, self.train)
        jitted = jax.jit(program, donate_argnums=0 if self.train else ())
        return compile_for(target, jitted, (state, x), mesh)


QWEN = LayerSizes(hidden=2048, inner=768, experts=128, tokens=4096, per_token=8)
MIXTRAL = LayerSizes(hidden=4096, inner=14336, experts=8, tokens=4096, per_token=2)
DEEPSEEK = LayerSizes(hidden=7168, inner=2048, experts=256, tokens=4096, per_token=8)
MODELS = {
    "Qwen3-30B-A3B": ("h100:1x8", QWEN),
    "Mixtral-8x7B": ("h100:1x8", MIXTRAL),
    "DeepSeek-V3": ("h100:4x8", DEEPSEEK),
}
CASES = (
    *(
        Case(model, target, system, train, sizes)
        for model, (target, sizes) in MODELS.items()
        for system, train in (("exact", True), ("plain", True), ("exact", False))
    ),
    Case("Qwen3-30B-A3B", "h100:1x8", "exact", True, QWEN, max_rounds=1),
    Case("Qwen3-30B-A3B", "h100:1x8", "feplb", True, QWEN),
)


def _layer(x: jax.Array, kernel: jax.Array, experts: Experts, *, mesh: Mesh, system: System, per_token: int) -> Any:
    topology, ranks = Topology.from_mesh(mesh, mesh.axis_names), PartitionSpec(mesh.axis_names)

    def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> jax.Array:
        return moe(x, MoEParams(kernel, experts), TopK(per_token), system, topology)[0]

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=(ranks, PartitionSpec(), ranks), out_specs=ranks)
    return run(x, kernel, experts)


def _forward(layer: Any, weights: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, one: (x + layer(x, *one), None), x, weights)[0]


def _step(layer: Any, state: Any, x: jax.Array) -> Any:
    weights, copies, *moments = state
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)

    def loss(weights: Any) -> jax.Array:
        y = _forward(jax.checkpoint(layer, policy=policy), weights, x)
        return jnp.square(y.astype(jnp.float32)).mean()

    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(weights))
    first, second = (
        jax.tree.map(lambda m, g, b=b, p=p: b * m + (1 - b) * g**p, moment, gradients)
        for moment, b, p in zip(moments, DECAYS, (1, 2), strict=True)
    )
    copies = jax.tree.map(lambda w, m, v: w - RATE * m / (jnp.sqrt(v) + 1e-8), copies, first, second)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), copies, weights), copies, first, second


def _arguments(sizes: LayerSizes, mesh: Mesh, train: bool) -> tuple[Any, Any]:
    ranks, each = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names)

    def like(shape: Sequence[int], spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))

    into, out = (LAYERS, sizes.experts, sizes.hidden, sizes.inner), (LAYERS, sizes.experts, sizes.inner, sizes.hidden)
    kernel = like((LAYERS, sizes.hidden, sizes.experts), PartitionSpec())
    weights = kernel, Experts(like(into, each), like(out, each), like(into, each))
    x = like((mesh.size * sizes.tokens, sizes.hidden), ranks)
    wide = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=w.sharding), weights)
    return ((weights, wide, wide, wide) if train else weights), x


def compared(case: Case, compiled_bytes: float) -> list[Any]:
    """Return a row: total bytes, and bytes without weights, gradients and optimizer state, which are simple to
    predict.
    """
    said = case.predicted()
    homes = said.weights + said.gradients + said.optimizer
    whole = said.total, compiled_bytes
    beside = [number - homes for number in whole]
    numbers = [(mine / 1e9, its / 1e9, mine / its - 1) for mine, its in (whole, beside)]
    return [case.name, case.target, *numbers[0], *numbers[1]]


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_no_accelerators()
    rows: list[list[Any]] = []
    for case in CASES:
        with quiet_stderr():
            rows.append(compared(case, case.compile().total_bytes))
        print(rows[-1], flush=True)
    columns = {"GB": ".2f", "compiled GB": ".2f", "deviation": "+.1%"}
    beside = {"beside GB": ".2f", "compiled beside GB": ".2f", "beside deviation": "+.1%"}
    return {"compared": Table({"layers": "", "target": "", **columns, **beside}, rows)}

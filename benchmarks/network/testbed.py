"""Training of a small language model on four ranks with an equal CPU quota each, joined by shaped links.

A rank is a process with one device. Its threads share one core and `CORES` of its time. Every rank has its own network
interface to one switch, limited in both directions.
"""

import ctypes
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.layer.dispatches import sending_copies
from benchmarks.network.jax_ranks import barrier, check_same_program, launch_jax
from benchmarks.network.launch import Rank
from benchmarks.network.quota import CpuGroup, cpu_groups
from benchmarks.network.replayed import OWN, Replayed
from benchmarks.network.topologies import one_switch
from jax_moe_lb import Stats, System, TopK, Topology, compiler_options, exact, plain, ultraep
from jax_moe_lb.nn.variables import RouterBias
from jax_moe_lb.transport import ExpertDomains, GatherExpertDomain, hybrid_mesh
from models.config import BatchConfig, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from models.data.corpus import Corpus
from models.data.marks import num_predicted
from models.decoder.model import Decoder
from models.mesh import make_mesh, place_batch, placed_shapes, state_shardings
from models.training.optimizer import apply_gradients, make_optimizer
from models.training.source import preset_config
from models.training.step import loss_and_gradients
from tests.models.reference_loss import next_token_loss

NUM_RANKS, CORES = 4, 0.35

KEEP_MEMORY = ":".join(
    f"glibc.malloc.{option}" for option in ("mmap_max=0", f"trim_threshold={2**36}", "arena_max=1", "hugetlb=1")
)
"""Make the allocator keep large buffers, as on accelerators; otherwise every step faults their pages again."""

CONFIG = TrainConfig(
    model=ModelConfig(num_layers=2, embed_dim=128, num_heads=4, mlp_dim=768, num_experts=8, experts_per_token=2),
    parallel=ParallelConfig(expert_parallel=NUM_RANKS, system="plain"),
    batch=BatchConfig(size=128, sequence_length=128),
    data=DataConfig(max_corpus_bytes=2_000_000),
    steps=1000,
)
"""The model: experts take most of the floating-point operations."""

WARM_STEPS = 1
"""First steps of a measurement to exclude from its time."""


@dataclass(frozen=True)
class Case:
    """A program of the testbed.

    With `has_rates` the system weighs plans in seconds. `gathered` has the ranks of an expert domain, whose experts
    travel in place of tokens.
    """

    system: System | None
    capacity_factor: float | None = None
    aux_loss: float = 0.0
    bias_rate: float = 0.0
    gathered: tuple[int, ...] = ()
    has_rates: bool = False


SYSTEMS: dict[str, System] = {"plain": plain(), "exact": exact(), "ultraep": ultraep()}
"""Dropless systems."""

RATES = {"bytes_per_s": (185e6,), "flops_per_s": 73e9}
"""Rates of a rank at 2 Gbit/s, as a user of `jax-moe-lb calibrate` passes them."""


def layout(case: Case, mesh: Mesh) -> tuple[Mesh, Topology, System]:
    """Return the mesh and topology of the expert layers, and the system."""
    topology = Topology.from_mesh(mesh, **(RATES if case.has_rates else {}))
    system = sending_copies(plain() if case.system is None else case.system)
    if not case.gathered:
        return mesh, topology, system
    mesh = hybrid_mesh(mesh, dict(zip(topology.expert_axes, case.gathered, strict=True)))
    domains = ExpertDomains.from_mesh(mesh, topology)
    return mesh, domains.between, system.replace(migrate=GatherExpertDomain(domains))


class Program:
    """Compiled training step of a case, with its states: `own`, and `replayed` for replayed routing."""

    def __init__(self, case: Case, config: TrainConfig, mesh: Mesh, records: np.ndarray) -> None:
        self.config, self.case = config, case
        self.mesh, self.topology, self.system = layout(case, mesh)
        mesh = self.mesh
        init, step, self.model = _functions(case, config, mesh, self.topology, self.system, records)
        everywhere = NamedSharding(mesh, PartitionSpec())
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=everywhere)
        shapes = nnx.eval_shape(init, seed)
        shardings = state_shardings(shapes, mesh)
        self.make = jax.jit(init, out_shardings=shardings).lower(seed).compile()
        self.evaluate = jax.jit(self._loss, out_shardings=everywhere, compiler_options=compiler_options(mesh))
        self.states: dict[str, nnx.State] = {}
        self.placed = {OWN: self._bias(OWN, everywhere)}
        self.everywhere = everywhere
        jitted = jax.jit(
            step, donate_argnums=0, out_shardings=(shardings, everywhere, everywhere),
            compiler_options=compiler_options(mesh),
        )  # fmt: skip
        tokens = place_batch(np.zeros((config.batch.size, config.batch.sequence_length + 1), np.int32), mesh)
        state = placed_shapes(shapes, shardings)
        self.lowered = jitted.lower(state, tokens, [self.placed[OWN]] * config.model.num_layers)
        self.program = self.lowered.compile()

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a rank, in bytes, by the compiler."""
        found = self.program.memory_analysis()
        return int(found.argument_size_in_bytes + found.temp_size_in_bytes)

    def initial(self, seed: int) -> nnx.State:
        """Return the state before the first step."""
        return self.make(jax.make_array_from_callback((), self.everywhere, lambda _: np.uint32(seed)))

    def state(self, name: str) -> nnx.State:
        """Return a state, initialized at first."""
        if name not in self.states:
            self.states[name] = self.initial(self.config.seed)
        return self.states[name]

    def _loss(self, state: nnx.State, tokens: jax.Array) -> jax.Array:
        return next_token_loss(self.model(state), tokens)[0]

    def _bias(self, record: float, sharding: NamedSharding) -> jax.Array:
        value = np.full(self.config.model.num_experts, record, np.float32)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def step(self, tokens: jax.Array, records: Sequence[float] | None = None) -> tuple[Any, Any]:
        """Run one step and return its loss and statistics on the host, after all results are ready."""
        chosen = [OWN] * self.config.model.num_layers if records is None else list(records)
        for record in chosen:
            if record not in self.placed:
                self.placed[record] = self._bias(record, self.everywhere)
        name, placed = "own" if records is None else "replayed", [self.placed[record] for record in chosen]
        state = self.state(name)
        self.states[name], loss, stats = self.program(state, tokens, placed)
        jax.block_until_ready(self.states[name])
        return jax.device_get((loss, stats))


def _functions(
    case: Case, config: TrainConfig, mesh: Mesh, topology: Topology, system: System, records: np.ndarray
) -> tuple[Callable, Callable, Callable]:
    """Return functions `seed -> state`, `(state, tokens, records) -> (state, loss, statistics)`, `state -> model`."""
    model_config = dataclasses.replace(config.model, aux_loss=case.aux_loss, bias_rate=case.bias_rate)
    top_k = TopK(config.model.experts_per_token, capacity_factor=case.capacity_factor, selection_bias=True)
    router = Replayed(router=top_k, records=records, capacity_factor=case.capacity_factor)

    def create(seed: jax.Array) -> tuple[Decoder, nnx.Optimizer]:
        rngs = nnx.Rngs(jax.random.key(seed))
        model = Decoder(preset_config(model_config), mesh=mesh, topology=topology, system=system, rngs=rngs)
        if not case.bias_rate:
            for block in model.blocks:
                block.moe.router = router
                block.moe.bias = nnx.data(RouterBias(jnp.full(config.model.num_experts, OWN)))
        return model, nnx.Optimizer(model, make_optimizer(config), wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(create, jax.ShapeDtypeStruct((), np.uint32)))

    def step(state: nnx.State, tokens: jax.Array, of_layers: list[jax.Array]) -> tuple[nnx.State, jax.Array, Any]:
        model, optimizer = nnx.merge(graph, state)
        if case.system is None:
            without_experts = nnx.value_and_grad(lambda of: next_token_loss(partial(_without_experts, of), tokens)[0])
            loss, gradients = without_experts(model)
            stats: Stats | int = jnp.int32(0)
        else:
            if not case.bias_rate:
                for block, record in zip(model.blocks, of_layers, strict=True):
                    block.moe.bias.set_value(record)
            counts = num_predicted(tokens)
            loss, stats, gradients = loss_and_gradients(model, nnx.Param, next_token_loss, tokens, counts, 1, mesh)
        apply_gradients(model, optimizer, gradients)
        for layer, block in enumerate(model.blocks if case.bias_rate else ()):
            block.moe.update_bias(jax.tree.map(lambda leaf, layer=layer: leaf[layer], stats), case.bias_rate)
        return nnx.state((model, optimizer)), loss, stats

    return lambda seed: nnx.state(create(seed)), step, lambda state: nnx.merge(graph, state)[0]


def _without_experts(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, Any]:
    x, positions = model.embed(tokens), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x).astype(x.dtype), positions, None)[0]
        x = x + block.moe_norm(x).astype(x.dtype)
    return model.head(model.norm(x)), jnp.int32(0)


class Testbed:
    """One rank of the testbed, inside its process."""

    def __init__(self, rank: Rank, group: CpuGroup) -> None:
        self.rank, self.group = rank, group
        self.mesh = make_mesh(CONFIG.parallel)

    def limits(self, bits_per_s: float | None, cores: float | None) -> None:
        """Set the rate of all links and the quota of this rank, on all ranks together."""
        barrier("before limits")
        if self.rank.index == 0:
            self.rank.network.set_rate(bits_per_s)
        self.group.limit(cores)
        barrier("after limits")

    def compiled(
        self, cases: Mapping[str, Case], records: np.ndarray, config: TrainConfig = CONFIG
    ) -> dict[str, Program]:
        """Compile the programs of cases, the same on all ranks, and return the memory of compilation to the system."""
        programs = {}
        for name, case in cases.items():
            programs[name] = Program(case, config, self.mesh, records)
            check_same_program(programs[name].lowered.as_text())
            self.say(f"{name}: compiled")
        ctypes.CDLL(None).malloc_trim(0)
        return programs

    def say(self, line: str) -> None:
        """Print a line with the time on rank 0."""
        if self.rank.index == 0:
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def times(
        self, program: Program, corpus: Corpus, steps: int, records: Sequence[Sequence[float]] | None, warm_steps: int
    ) -> dict[str, Any]:
        config, rows = program.config, []
        for number in range(warm_steps + steps):
            batch = corpus.batch(config.seed, 1 + number, config.batch.size, config.batch.sequence_length)
            tokens = place_batch(batch, program.mesh)
            barrier("step")
            start_s = time.perf_counter()
            loss, stats = program.step(tokens, None if records is None else records[number % len(records)])
            row = {"loss": float(loss), "seconds": time.perf_counter() - start_s}
            after = {"after": float(np.mean(stats.imbalance_after))} if isinstance(stats, Stats) else {}
            rows.append(row | after)
        return {name: [row[name] for row in rows[warm_steps:]] for name in rows[0]}


def prepare(groups: Sequence[CpuGroup], rank: Rank) -> None:
    """Move a rank into its group, on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank.index % len(cores)]})
    groups[rank.index].enter()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()


def run(body: Callable[[Testbed], Any], deadline_s: float) -> list[Any]:
    """Run a function on all ranks of the testbed, and return the results."""
    with cpu_groups(NUM_RANKS) as groups, one_switch(NUM_RANKS) as network:
        # Compilation on a busy machine delays heartbeats.
        options = {"devices_per_process": 1, "deadline_s": deadline_s, "heartbeat_s": 100}
        start = partial(prepare, groups)
        return launch_jax(network, lambda rank: body(Testbed(rank, groups[rank.index])), prepare=start, **options)

"""A user's comparison on one GPU: the slowest rank of an expert-parallel group under several systems.

One GPU plays one rank of 8 after another, forward and backward, with the rows that the plan of the group gives it; see
`one_rank.py` for the parts left out. The systems are plain expert parallelism in rounds, with a worst-case buffer and
with a capacity limit that drops copies, and `exact` with any number of rounds, with one, and with saved arrays. The
systems take turns, so that the clocks of the GPU are equal for all.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.compiled import WITHOUT_GRAPHS
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.kit import compile_all, in_words, lowered
from benchmarks.gpu.layers import mesh_of
from benchmarks.gpu.one_rank import LocalExchange, RankInputs, rank_step
from benchmarks.plans.popular_ranks import Case, popularity
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, Experts, Plan, System, Topology, exact, plain
from jax_moe_lb.aot import compiler_options
from jax_moe_lb.core.plan import load
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.routing.capacity import capacity, within_capacity
from jax_moe_lb.transport.exchange import Saved

EVEN = "even"
SKEWS: tuple[float | str, ...] = (4.0, EVEN, 1.2, 1.05, 2.0, 1.5, 1.1, 1.35, 3.0, 1.0)
"""Expected loads of the busiest rank over the mean, the most valuable first; `EVEN` for equal counts."""

BATCHES, BATCH_MS, MOST_CALLS = 5, 40.0, 8
"""Timed batches, least milliseconds of one, and most calls in it."""

LAYER_S = 20.0
"""Seconds of a layer after which no further skew is measured: all layers share the limit of their part."""

FLOP_PER_WEIGHT = 18
"""Operations of a SwiGLU expert per row and `H x F`: three products forward and six backward, two operations each."""

PEAK_FLOPS = 989e12
"""bfloat16 rate of an H100 and an H200 from the data sheet."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer."""

    ranks: int
    tokens: int
    experts: int
    per_token: int
    hidden: int
    inner: int

    @property
    def home(self) -> int:
        """Home experts of a rank, `L`."""
        return self.experts // self.ranks

    @property
    def copies(self) -> int:
        """Token copies of a rank, the mean load."""
        return self.tokens * self.per_token

    @property
    def floor_ms(self) -> float:
        """Time of the operations at the mean load and the peak rate, without rematerialization."""
        return 1e3 * FLOP_PER_WEIGHT * self.copies * self.hidden * self.inner / PEAK_FLOPS


LAYERS = {
    "qwen3": Layer(ranks=8, tokens=8192, experts=128, per_token=8, hidden=2048, inner=768),
    "mixtral": Layer(ranks=8, tokens=4096, experts=8, per_token=2, hidden=4096, inner=14336),
    "deepseek": Layer(ranks=8, tokens=4096, experts=256, per_token=8, hidden=7168, inner=2048),
    "gpt-oss": Layer(ranks=8, tokens=8192, experts=128, per_token=4, hidden=2880, inner=2880),
}
"""Layers of Qwen3-30B-A3B, Mixtral-8x7B, DeepSeek-V3 and GPT-OSS-120B, without biases."""

TINY = Layer(ranks=8, tokens=64, experts=16, per_token=2, hidden=128, inner=128)

PLAIN, WORST = "plain, in rounds", "plain, worst-case buffer"
BALANCED, ONE_ROUND = "exact", "exact, one round"
SAVED = {
    "exact, one round, rows saved": Saved(rows=True),
    "exact, one round, rows and hidden saved": Saved(rows=True, hidden=True),
}
"""Arrays that variants of `exact` save for the backward pass."""

FACTOR = 1.25
PROFILED = (ONE_ROUND, PLAIN, *list(SAVED)[-1:])
"""Systems that `rank_kernels` profiles."""


@dataclass(frozen=True)
class Variant:
    """A system, and the capacity limit of its router."""

    system: System
    factor: float | None = None

    def capacity(self, layer: Layer) -> int | None:
        """Return the maximum number of copies per expert and rank."""
        return None if self.factor is None else capacity(self.factor, layer.copies, layer.experts)


def variants(layer: Layer) -> dict[str, Variant]:
    """Return the compared systems, the most valuable first."""
    # The router chooses distinct experts.
    worst = layer.ranks * min(layer.per_token, layer.home) / layer.per_token
    # Every expert may be full.
    full = layer.experts * capacity(FACTOR, layer.copies, layer.experts) / layer.copies
    one_round = exact(buffers=Buffers(max_rounds=1))
    return {
        PLAIN: Variant(plain()),
        BALANCED: Variant(exact()),
        ONE_ROUND: Variant(one_round),
        **{name: Variant(one_round.replace(saved=saved)) for name, saved in SAVED.items()},
        WORST: Variant(plain(Buffers(worst, max_rounds=1))),
        f"capacity {FACTOR}": Variant(plain(Buffers(full, max_rounds=1)), FACTOR),
    }


@cache
def routing(layer: Layer, skew: float | str) -> np.ndarray:
    """Return the experts `[R, T, K]` of all copies, int32, in the order of choices.

    They are sampled without replacement. On a rank, the popularity of experts falls as 1, 1/2, 1/3 and so on.
    """
    if skew == EVEN:
        first = np.arange(layer.ranks * layer.tokens)[:, None] * layer.per_token
        experts = (first + np.arange(layer.per_token)) % layer.experts
    else:
        case = Case(layer.experts, layer.ranks, 0, float(skew))
        weights = jnp.asarray(popularity(case, layer.per_token, inside=1.0), jnp.float32)
        noise = jax.random.gumbel(jax.random.key(0), (layer.ranks * layer.tokens, layer.experts))
        experts = jax.lax.top_k(noise + jnp.log(weights)[None], layer.per_token)[1]
    return np.asarray(experts, np.int32).reshape(layer.ranks, layer.tokens, layer.per_token)


def counts_of(layer: Layer, routed: np.ndarray) -> np.ndarray:
    """Return the counts `[R, E]`, int32."""
    return np.stack([np.bincount(one[one >= 0], minlength=layer.experts) for one in routed]).astype(np.int32)


_within = jax.jit(within_capacity, static_argnums=(1, 2))


@dataclass(frozen=True)
class Served:
    """Routing and plan of a variant for the whole group."""

    routed: np.ndarray
    counts: np.ndarray
    plan: Plan
    dropped: float
    hurt: float

    @classmethod
    def of(cls, layer: Layer, variant: Variant, skew: float | str) -> "Served":
        """Route, limit and plan on the host."""
        routed = routing(layer, skew)
        kept = routed
        if (limit := variant.capacity(layer)) is not None:
            kept = np.stack([np.asarray(_within(one, layer.experts, limit)) for one in routed])
        counts, lost = counts_of(layer, kept), kept < 0
        plan = plan_on_host(variant.system, counts, Topology.flat(layer.ranks)).plan
        return cls(routed, counts, plan, float(lost.mean()), float(lost.any(2).mean()))

    def slow_ranks(self) -> list[int]:
        """Return the rank with the most rows, then the one with the most replicas if it is another."""
        loads, replicas = np.asarray(load(self.plan)), (self.plan.placement[:, self.plan.num_home :] >= 0).sum(1)
        # Among ranks with equally many replicas, the one with the most rows.
        ranks = int(loads.argmax()), int(np.lexsort((loads, replicas))[-1])
        return list(dict.fromkeys(ranks)) if replicas.any() else [ranks[0]]


def arguments(layer: Layer, served: Served, rank: int, fixed: tuple[jax.Array, jax.Array, Experts]) -> RankInputs:
    x, upstream, experts = fixed
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(1), (layer.tokens, layer.per_token)))
    data = served.routed[rank], served.counts, served.plan
    routed, counts, plan = jax.tree.map(jnp.asarray, data)
    # A plan without relays: replicas are local copies.
    plan = Plan(plan.placement, plan.quota, domain=plan.domain, split=plan.split)
    return RankInputs(jnp.int32(rank), routed, weights, counts, plan, x, experts, upstream)


def fixed_arrays(layer: Layer) -> tuple[jax.Array, jax.Array, Experts]:
    """Return random tokens, gradients of outputs and home experts, bfloat16."""

    @jax.jit
    def make() -> tuple[jax.Array, jax.Array, Experts]:
        keys = jax.random.split(jax.random.key(2), 5)
        tokens, inner = (layer.tokens, layer.hidden), (layer.home, layer.hidden, layer.inner)
        x, upstream = (jax.random.normal(key, tokens, jnp.bfloat16) for key in keys[:2])
        up, gate, down = (jax.random.normal(key, inner, jnp.bfloat16) / layer.hidden**0.5 for key in keys[2:])
        return x, upstream, Experts(up, down.mT, gate)

    return make()


def program(layer: Layer, variant: Variant, mesh: jax.sharding.Mesh) -> Any:
    """Return the jitted step of a rank, `RankInputs -> (outputs, gradients)`."""
    exchange = LocalExchange(variant.system.dispatch.buffers, saved=variant.system.dispatch.saved)
    topology = Topology.flat(layer.ranks)
    step = partial(rank_step, exchange=exchange, capacity=variant.capacity(layer), topology=topology)
    # Only a mesh gives the package's code its platform.
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


class RankProgram(NamedTuple):
    """Step of a rank as a program of `kit`."""

    layer: Layer
    name: str
    has_graphs: bool

    def lower(self, device: jax.Device | None) -> Lowered:
        """Trace the step for an absent device, or for the default one if `None`."""
        mesh = _mesh(device)
        whole = NamedSharding(mesh, PartitionSpec())
        inputs = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole), input_shapes(self.layer, self.name)
        )
        return lowered(program(self.layer, variants(self.layer)[self.name], mesh), [inputs], device)

    def options(self, device: jax.Device | None) -> dict[str, Any]:
        """Return the compiler options, by default those of users."""
        on_gpu = device is not None or jax.default_backend() == "gpu"
        return compiler_options(_mesh(device), {} if self.has_graphs or not on_gpu else WITHOUT_GRAPHS)


def _mesh(device: jax.Device | None) -> jax.sharding.Mesh:
    if device is None:
        return mesh_of(1)[0]
    return jax.sharding.Mesh(np.array([device]), ("expert",), axis_types=(AxisType.Auto,))


def input_shapes(layer: Layer, name: str) -> RankInputs:
    """Return the shapes of a variant's inputs."""
    counts = np.full((layer.ranks, layer.experts), layer.copies // layer.experts, np.int32)
    plan = plan_on_host(variants(layer)[name].system, counts, Topology.flat(layer.ranks)).plan
    routed = np.zeros((layer.ranks, layer.tokens, layer.per_token), np.int32)
    served = Served(routed, counts, plan, 0.0, 0.0)
    return jax.eval_shape(lambda: arguments(layer, served, 0, fixed_arrays(layer)))


def rank_programs(layer: Layer, profiled: Sequence[str] = PROFILED) -> dict[tuple[Any, ...], RankProgram]:
    """Return the programs of a layer's variants, the most valuable first, and those of profiles."""
    found = [RankProgram(layer, name, True) for name in variants(layer)]
    return {tuple(one): one for one in [*found, *(RankProgram(layer, name, False) for name in profiled)]}


class Programs:
    """Programs of all variants, loaded or compiled in threads, and run once each in the order of their memory.

    On a GPU, those of `PROFILED` are also compiled without CUDA graphs.
    """

    def __init__(self, layer: Layer, first: Mapping[str, RankInputs]) -> None:
        self.reasons: dict[str, str] = {}
        self.peak_gb: dict[str, float | None] = {}
        self.compiled: dict[str, Compiled] = {}
        self.profiled: dict[str, Compiled | Exception] = {}
        on_gpu = jax.default_backend() == "gpu"
        for (_, name, has_graphs), one in compile_all(rank_programs(layer, PROFILED if on_gpu else ())).items():
            if not has_graphs:
                self.profiled[name] = one
            elif isinstance(one, Exception):
                self.reasons[name] = in_words(one)
            else:
                self.compiled[name] = one
        if not on_gpu:
            self.profiled |= self.compiled
        for name in sorted(self.compiled, key=self.compiled_bytes):
            with attempt(partial(self.reasons.__setitem__, name)):
                self._run_first(name, first[name])

    def compiled_bytes(self, name: str) -> int:
        """Return the bytes of temporaries and results; 0 if the program does not report them."""
        # Loaded programs report them on CPUs.
        with suppress(AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
            memory: Any = self.compiled[name].memory_analysis()
            return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
        return 0

    def _run_first(self, name: str, inputs: RankInputs) -> None:
        def stats() -> dict[str, int]:
            return jax.devices()[0].memory_stats() or {}

        limit, start, before = (stats().get(key) for key in ("bytes_limit", "bytes_in_use", "peak_bytes_in_use"))
        needed = self.compiled_bytes(name)
        if limit is not None and start is not None and start + needed > limit:
            self.reasons[name] = f"does not fit: {needed / 1e9:.1f} GB beside {start / 1e9:.1f} of {limit / 1e9:.1f} GB"
            return
        _, (_, _, of_experts) = jax.block_until_ready(self.compiled[name](inputs))
        after = stats().get("peak_bytes_in_use")
        # A peak counts only if it is higher than those of the programs before.
        raised = after is not None and before is not None and start is not None and after > before
        self.peak_gb[name] = (after - start) / 1e9 if raised else None  # type: ignore[operator]
        # Outputs have uninitialized rows if fewer rows arrive than this rank sends.
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(of_experts)):
            self.reasons[name] = "gradients are not finite"


@contextmanager
def attempt(keep: Callable[[str], None]) -> Iterator[None]:
    """Keep the reason of a failure and go on."""
    try:
        yield
    except Exception as error:
        keep(in_words(error))


Key = TypeVar("Key")


class Timed(NamedTuple):
    """Milliseconds of a call: median of some batches, the lowest and the highest; and the median clock in MHz."""

    median: float
    lowest: float
    highest: float
    mhz: float | None

    @classmethod
    def of(cls, ms: Sequence[float], mhz: Sequence[float]) -> "Timed":
        """Summarize the times and clocks of batches."""
        clock = float(np.median(mhz))
        return cls(float(np.median(ms)), min(ms), max(ms), None if math.isnan(clock) else clock)


def times_of(calls: Mapping[Key, Callable[[], object]], scale: Scale, clocks: Clocks) -> dict[Key, Timed]:
    """Return the times of programs in batches of asynchronous calls; the programs take turns."""

    def batch_ms(name: Key, number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            result = calls[name]()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / number

    for call in calls.values():
        jax.block_until_ready(call())
    numbers = {name: min(MOST_CALLS, max(2, math.ceil(BATCH_MS / batch_ms(name, 1)))) for name in calls}
    found: dict[Key, list[tuple[float, float]]] = {name: [] for name in calls}
    for batch in range(scale.of(BATCHES, 1)):
        # In both directions, so that no program always follows the same one.
        for name in list(calls)[:: 1 if batch % 2 else -1]:
            clocks.start()
            found[name].append((batch_ms(name, scale.of(numbers[name], 1)), clocks.mhz() or math.nan))
    return {name: Timed.of(*zip(*batches, strict=True)) for name, batches in found.items()}


COLUMNS = {"skew": "", "system": "", "load / mean": ".2f", "rounds": "d", "replicas": "d"}
COLUMNS |= {"ms": ".2f", "lowest ms": ".2f", "highest ms": ".2f", "SM MHz": ".0f", "floor ms": ".2f"}
COLUMNS |= {"GB": ".2f", "GB compiled": ".2f", "dropped copies": ".1%", "tokens with a dropped copy": ".1%", "": ""}
TIME, COMPILED_MEMORY = (list(COLUMNS).index(name) for name in ("ms", "GB compiled"))


@dataclass(frozen=True)
class Prepared:
    """Everything of a layer before its first timing."""

    layer: Layer
    programs: Programs
    served: Mapping[tuple[str, float | str], Served]
    inputs: Mapping[tuple[str, float | str], list[RankInputs]]


@cache
def prepared(layer: Layer) -> Prepared:
    """Route, plan, and compile and run all programs once."""
    names, fixed = variants(layer), fixed_arrays(layer)
    served = {(name, skew): Served.of(layer, variant, skew) for skew in SKEWS for name, variant in names.items()}
    inputs = {case: [arguments(layer, one, rank, fixed) for rank in one.slow_ranks()] for case, one in served.items()}
    first = {name: inputs[name, SKEWS[0]][0] for name in names}
    return Prepared(layer, Programs(layer, first), served, inputs)


def reason_of(ready: Prepared, name: str, skew: float | str) -> str:
    """Return the reason why a system does not run at a skew; empty if it does."""
    buffers, rounds = variants(ready.layer)[name].system.dispatch.buffers, rounds_of(ready, name, skew)
    if buffers.max_rounds is not None and rounds > buffers.max_rounds:
        return ready.programs.reasons.get(name) or f"{rounds} rounds; max_rounds is {buffers.max_rounds}"
    return ready.programs.reasons.get(name, "")


def busiest_of(ready: Prepared, name: str, skew: float | str) -> int:
    """Return the rows of the busiest rank."""
    return int(np.asarray(load(ready.served[name, skew].plan)).max())


def rounds_of(ready: Prepared, name: str, skew: float | str) -> int:
    buffers = variants(ready.layer)[name].system.dispatch.buffers
    return -(-busiest_of(ready, name, skew) // buffers.rows(ready.layer.copies))


def measured(ready: Prepared, skew: float | str, scale: Scale, clocks: Clocks) -> list[list[Value]]:
    """Return the row of each system at a skew; a failure is its last cell."""
    names = list(variants(ready.layer))
    reasons = {name: reason_of(ready, name, skew) for name in names}
    calls = {
        (name, rank): partial(ready.programs.compiled[name], one)
        for name in names
        if not reasons[name]
        for rank, one in enumerate(ready.inputs[name, skew])
    }
    times: dict[tuple[str, int], Timed] = {}
    for (name, _), call in calls.items():
        with attempt(partial(reasons.__setitem__, name)):
            jax.block_until_ready(call())
    with attempt(lambda reason: reasons.update({name: reasons[name] or reason for name in names})):
        times = times_of({key: call for key, call in calls.items() if not reasons[key[0]]}, scale, clocks)
    return [_row(ready, name, skew, times, reasons[name]) for name in names]


def _row(
    ready: Prepared, name: str, skew: float | str, times: Mapping[tuple[str, int], Timed], reason: str
) -> list[Value]:
    layer, programs, served = ready.layer, ready.programs, ready.served[name, skew]
    # The slowest of the ranks.
    took = max((one for (system, _), one in times.items() if system == name), default=(None,) * 4)
    compiled_bytes = programs.compiled_bytes(name) if name in programs.compiled else 0
    replicas = int((served.plan.placement[:, served.plan.num_home :] >= 0).sum())
    shown = skew if isinstance(skew, str) else f"{skew:g}"
    loads = busiest_of(ready, name, skew) / layer.copies, rounds_of(ready, name, skew), replicas
    compiled_gb = compiled_bytes / 1e9 if compiled_bytes else None
    memory, drops = (programs.peak_gb.get(name), compiled_gb), (served.dropped, served.hurt)
    return [shown, name, *loads, *took, layer.floor_ms, *memory, *drops, reason]


def rows_of(layer: Layer, scale: Scale) -> Iterator[list[list[Value]]]:
    """Yield the rows of each skew, the most valuable first, as long as others have time."""
    ready, begin = prepared(layer), time.monotonic()
    with Clocks() as clocks:
        for skew in scale.of(SKEWS, SKEWS[:2]):
            if time.monotonic() - begin < LAYER_S:
                yield measured(ready, skew, scale, clocks)


def balanced_is_faster(name: str, scale: Scale) -> Finding:
    """Check one layer.

    At the highest skew, the slowest rank of `exact` takes less than half the time of plain expert parallelism, and less
    memory than a worst-case buffer.
    """
    if scale.dry and name != next(iter(LAYERS)):
        return Finding(None, "not in a dry run")
    rows: list[list[Value]] = []
    for of_skew in rows_of(scale.of(LAYERS[name], TINY), scale):
        rows += of_skew
        scale.keep(Table(COLUMNS, rows))
    if all(row[TIME] is None for row in of_skew):
        # Errors of CUDA may remain in the process: end it.
        raise RuntimeError(f"the last case failed: {rows[-1][-1]}")
    at_highest = {row[1]: row for row in rows if row[0] == rows[0][0]}
    times: dict[str, Any] = {one: at_highest[one][TIME] for one in (PLAIN, WORST, BALANCED)}
    memory: dict[str, Any] = {one: at_highest[one][COMPILED_MEMORY] for one in (WORST, BALANCED)}
    if None in (times[PLAIN], times[BALANCED], *memory.values()):
        return Finding(None, "a case failed; see the table", Table(COLUMNS, rows))
    holds = times[BALANCED] < times[PLAIN] / 2 and memory[BALANCED] < memory[WORST]
    found = (
        f"{times[BALANCED]:.1f} ms and {memory[BALANCED]:.1f} GB; plain {times[PLAIN]:.1f} ms; "
        f"worst-case buffer {memory[WORST]:.1f} GB"
    )
    return Finding(holds, found, Table(COLUMNS, rows))

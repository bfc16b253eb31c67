"""A user's comparison on one GPU: the slowest rank of an expert-parallel group under several systems.

One GPU plays one rank of 8 after another, forward and backward, with the rows that the plan of the group gives it; see
`one_rank.py` for the parts left out. The systems are plain expert parallelism in rounds, with a worst-case buffer and
with a capacity limit that drops copies, and `exact` with any number of rounds and with one.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.stages import Compiled

from benchmarks.gpu.compiled import WITHOUT_GRAPHS
from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.gpu.layers import mesh_of
from benchmarks.gpu.one_rank import LocalExchange, RankInputs, rank_step
from benchmarks.popular_ranks import Case, popularity
from benchmarks.results import Table, Value
from jax_moe_lb import Buffers, Experts, Plan, System, Topology, exact, plain
from jax_moe_lb.aot import compiler_options
from jax_moe_lb.core.plan import load
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.routing.more_routers import capacity, within_capacity

EVEN = "even"
SKEWS: tuple[float | str, ...] = (4.0, 2.0, 1.0, EVEN)
"""Expected loads of the busiest rank over the mean, the most valuable first; `EVEN` for equal counts."""

BATCHES, BATCH_MS, MOST_CALLS = 5, 40.0, 8
"""Timed batches, least milliseconds of one, and most calls in it."""

FLOP_PER_WEIGHT = 18
"""Operations of a SwiGLU expert per row and `H x F`: three products forward and six backward, two operations each."""

PEAK_FLOPS = 989e12
"""bfloat16 rate of an H100 and an H200 from the data sheet."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer.

    Args:
        ranks: `R`.
        tokens: `T`, per rank.
        experts: `E`.
        per_token: `K`.
        hidden: `H`.
        inner: `F`.
    """

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
}
"""Layers of Qwen3-30B-A3B, Mixtral-8x7B and DeepSeek-V3."""

TINY = Layer(ranks=8, tokens=64, experts=16, per_token=2, hidden=128, inner=128)

PLAIN, WORST = "plain, in rounds", "plain, worst-case buffer"
BALANCED, ONE_ROUND = "exact", "exact, one round"
FACTOR = 1.25
PROFILED = (ONE_ROUND, PLAIN)
"""Systems that `rank_kernels` profiles."""


@dataclass(frozen=True)
class Variant:
    """A system, and the capacity limit of its router.

    Args:
        system: system with the buffers of a rank.
        factor: capacity of an expert over its mean load; `None` (default) drops no copies.
    """

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
    return {
        PLAIN: Variant(plain()),
        BALANCED: Variant(exact()),
        ONE_ROUND: Variant(exact(buffers=Buffers(max_rounds=1))),
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
    """Routing and plan of a variant for the whole group.

    Args:
        routed: `[R, T, K]`, experts of all copies before the capacity limit.
        counts: `[R, E]`, counts after the limit.
        plan: plan of the group.
        dropped: share of the copies dropped.
        hurt: share of the tokens that lost a copy.
    """

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
    """Return the inputs of a rank on the device."""
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
    exchange = LocalExchange(variant.system.dispatch.buffers)
    topology = Topology.flat(layer.ranks)
    step = partial(rank_step, exchange=exchange, capacity=variant.capacity(layer), topology=topology)
    # Only a mesh gives the package's code its platform.
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


class Programs:
    """Programs of all variants, compiled in threads, and run once each in the order of their memory.

    Those of `PROFILED` are also compiled without CUDA graphs.
    """

    def __init__(self, layer: Layer, first: Mapping[str, RankInputs], mesh: jax.sharding.Mesh) -> None:
        self.reasons: dict[str, str] = {}
        self.peak_gb: dict[str, float | None] = {}
        self.compiled: dict[str, Compiled] = {}
        self.profiled: dict[str, Compiled] = {}
        on_gpu = jax.default_backend() == "gpu"
        with_graphs, without = compiler_options(mesh), compiler_options(mesh, WITHOUT_GRAPHS if on_gpu else {})
        futures: dict[str, Future[Compiled]] = {}
        others: dict[str, Future[Compiled]] = {}
        with ThreadPoolExecutor(len(first) + len(PROFILED)) as threads:
            for name, variant in variants(layer).items():
                with self._reasons_of(name):
                    # Tracing holds Python's lock; only XLA runs beside it.
                    lowered = program(layer, variant, mesh).lower(first[name])
                    futures[name] = threads.submit(lowered.compile, with_graphs)
                    if name in PROFILED:
                        others[name] = threads.submit(lowered.compile, without)
        for name, future in futures.items():
            with self._reasons_of(name):
                self.compiled[name] = future.result()
                if name in others:
                    self.profiled[name] = others[name].result()
        for name in sorted(self.compiled, key=self.compiled_bytes):
            with self._reasons_of(name):
                self._run_first(name, first[name])

    def compiled_bytes(self, name: str) -> int:
        """Return the bytes of temporaries and results."""
        memory: Any = self.compiled[name].memory_analysis()
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

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

    def _reasons_of(self, name: str) -> "Attempt":
        return Attempt(partial(self.reasons.__setitem__, name))


class Attempt:
    """Context that keeps the reason of a failure and goes on."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        self.keep = keep

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.keep(" ".join(f"{type(error).__name__}: {error}".split())[:200])
        return isinstance(error, Exception)


class Times(NamedTuple):
    """Milliseconds of a call: median of some batches, the lowest and the highest."""

    median: float
    lowest: float
    highest: float


def times_of(call: Callable[[], object], scale: Scale) -> Times:
    """Return the times of a call in batches of asynchronous calls, after two more."""
    jax.block_until_ready(call())

    def batch_ms(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / calls

    calls = min(MOST_CALLS, max(2, math.ceil(BATCH_MS / batch_ms(1))))
    found = [batch_ms(scale.of(calls, 1)) for _ in range(scale.of(BATCHES, 1))]
    return Times(float(np.median(found)), min(found), max(found))


COLUMNS = {
    "skew": "",
    "system": "",
    "load / mean": ".2f",
    "rounds": "d",
    "replicas": "d",
    "ms": ".2f",
    "lowest ms": ".2f",
    "highest ms": ".2f",
    "floor ms": ".2f",
    "GB": ".2f",
    "GB compiled": ".2f",
    "dropped copies": ".1%",
    "tokens with a dropped copy": ".1%",
    "": "",
}
TIME, COMPILED_MEMORY = (list(COLUMNS).index(name) for name in ("ms", "GB compiled"))


@dataclass(frozen=True)
class Prepared:
    """Everything of a layer before its first timing.

    Args:
        layer: its sizes.
        programs: compiled programs.
        served: routing and plan by system and skew.
        inputs: inputs of the slow ranks of each case, on the device.
    """

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
    return Prepared(layer, Programs(layer, first, mesh_of(1)[0]), served, inputs)


def measured(ready: Prepared, name: str, skew: float | str, scale: Scale) -> list[Value]:
    """Return the row of a system at a skew; a failure is its last cell."""
    layer, programs, served = ready.layer, ready.programs, ready.served[name, skew]
    reason = {"": programs.reasons.get(name, "")}
    buffers, busiest = variants(layer)[name].system.dispatch.buffers, int(np.asarray(load(served.plan)).max())
    rounds = -(-busiest // buffers.rows(layer.copies))
    if buffers.max_rounds is not None and rounds > buffers.max_rounds:
        reason[""] = reason[""] or f"{rounds} rounds; max_rounds is {buffers.max_rounds}"
    took: tuple[float | None, ...] = (None,) * 3
    if not reason[""]:
        with Attempt(partial(reason.__setitem__, "")):
            # The slowest of these ranks.
            took = max(times_of(partial(programs.compiled[name], one), scale) for one in ready.inputs[name, skew])
    compiled = programs.compiled_bytes(name) / 1e9 if name in programs.compiled else None
    replicas = int((served.plan.placement[:, served.plan.num_home :] >= 0).sum())
    shown = skew if isinstance(skew, str) else f"{skew:.0f}"
    loads, times = (busiest / layer.copies, rounds, replicas), (*took, layer.floor_ms)
    memory, drops = (programs.peak_gb.get(name), compiled), (served.dropped, served.hurt)
    return [shown, name, *loads, *times, *memory, *drops, reason[""]]


def rows_of(layer: Layer, scale: Scale) -> Iterator[list[Value]]:
    """Yield the rows of all cases, the most valuable first."""
    ready = prepared(layer)
    for skew in SKEWS:
        for name in variants(layer):
            yield measured(ready, name, skew, scale)


def balanced_is_faster(name: str) -> Check:
    """Return the check of one layer.

    At the highest skew, the slowest rank of `exact` takes less than half the time of plain expert parallelism, and less
    memory than a worst-case buffer.
    """

    def check(scale: Scale) -> Finding:
        if scale.dry and name != next(iter(LAYERS)):
            return Finding(None, "not in a dry run")
        rows: list[list[Value]] = []
        for row in rows_of(scale.of(LAYERS[name], TINY), scale):
            rows.append(row)
            scale.keep(Table(COLUMNS, rows))
        if rows[-1][TIME] is None:
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

    return check

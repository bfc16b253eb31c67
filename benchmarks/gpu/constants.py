"""Measured rates of a GPU beside those of the timeline: memory, dense products, launches and waits."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from benchmarks.gpu.compiled import WITHOUT_GRAPHS
from benchmarks.gpu.device import gpu_kind, kernel_seconds
from benchmarks.gpu.findings import Scale
from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import Target
from jax_moe_lb.aot.operation_time import OperationTime, rates_of
from jax_moe_lb.aot.product_form import ProductForm
from jax_moe_lb.aot.schedule import Kind, ScheduledOperation

COLUMNS = {
    "kind": "",
    "operation": "",
    "unit": "",
    "assumed": ".4g",
    "measured": ".4g",
    "measured / assumed": ".2f",
    "us": ".1f",
    "estimated us": ".1f",
}

TIMED_S = 0.05
"""Seconds of repeated calls."""

CHAIN = 200
"""Operations of a chain."""

LONG = 1024
"""Width of products whose kernels take longer than their launch."""


@dataclass(frozen=True)
class Probe:
    """Program whose time shows a rate."""

    kind: str
    name: str
    run: Callable[..., Any]
    arrays: Callable[[], tuple[jax.Array, ...]]
    amount: int
    product: ProductForm | None = None

    def estimate_s(self, target: Target) -> float:
        """Return the estimate of the timeline."""
        nbytes, flops = (0, self.amount) if self.product else (self.amount, 0)
        kind = Kind.PRODUCT if self.product else Kind.KERNEL
        one = ScheduledOperation(self.name, kind, "other", nbytes=nbytes, flops=flops, product=self.product)
        return OperationTime(target).of(one, 0).seconds


def normal(shape: tuple[int, ...], dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    """Return random numbers; zeros would take less power and time."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def memory_probes(scale: Scale) -> list[Probe]:
    """Return operations that read and write device memory, with the bytes that they cannot avoid."""
    n, rows, width, copies = scale.of((2**26, 2**16, 4096, 2**17), (2**10, 2**6, 64, 2**7))
    few = copies // 8
    f32, bf16 = jnp.float32, jnp.bfloat16
    line, other = partial(normal, (4 * n,), f32), partial(normal, (4 * n,), f32, 1)
    matrix = partial(normal, (rows, width))
    tokens = partial(normal, (few, width // 2))
    permutation = np.random.default_rng(0).permutation(copies).astype(np.int32)

    def adam(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(f32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(bf16)

    def keys() -> tuple[jax.Array]:
        return (jnp.asarray(permutation),)

    def combine(x: jax.Array, index: jax.Array) -> jax.Array:
        return x[index].reshape(few, 8, -1).astype(f32).sum(1).astype(bf16)

    cell = width // 2 * 2
    found: list[tuple[str, Callable[..., Any], Callable[[], tuple[jax.Array, ...]], int]] = [
        ("copy of an array", jnp.copy, lambda: (line(),), 32 * n),
        ("sum of two arrays", jnp.add, lambda: (line(), other()), 48 * n),
        ("product with a number", lambda x: x * 1.5, lambda: (line(),), 32 * n),
        ("AdamW of float32", adam, lambda: tuple(abs(normal((n,), f32, i)) for i in range(4)), 28 * n),
        ("float32 to bfloat16", lambda x: x.astype(bf16), lambda: (line(),), 24 * n),
        ("sum of all numbers", jnp.sum, lambda: (line(),), 16 * n),
        ("constant array", lambda x: jnp.broadcast_to(x, (4 * n,)), lambda: (jnp.float32(2.5),), 16 * n),
        ("RMS norm of rows", norm, lambda: (matrix(),), 4 * rows * width),
        ("transposed matrix", lambda x: x.T, lambda: (matrix(),), 4 * rows * width),
        ("padded rows", lambda x: jnp.pad(x, ((0, 0), (0, 64))), lambda: (matrix(),), rows * (4 * width + 128)),
        (
            "gather: 8 copies of a token",
            lambda x, i: x[i // 8],
            lambda: (tokens(), jnp.asarray(permutation)),
            (few + copies) * cell,
        ),
        (
            "gather: permuted rows",
            lambda x, i: x[i],
            lambda: (normal((copies, width // 2)), jnp.asarray(permutation)),
            2 * copies * cell,
        ),
        (
            "gather and sum of 8 rows",
            combine,
            lambda: (normal((copies, width // 2)), jnp.asarray(permutation)),
            (few + copies) * cell,
        ),
        (
            "scatter: sum of 8 rows, float32",
            lambda x, i: jnp.zeros((few, width // 2), f32).at[i // 8].add(x.astype(f32)),
            lambda: (normal((copies, width // 2)), jnp.asarray(permutation)),
            copies * cell + 2 * few * cell * 2,
        ),
        ("sort of int32 keys with values", lambda k: jax.lax.sort((k, k + 1), num_keys=1), keys, 4 * 4 * copies),
        ("cumulative sum", lambda x: jnp.cumsum(x, 0), lambda: (normal((few, 128), f32),), 2 * 4 * 128 * few),
        ("top 8 of 128", lambda x: jax.lax.top_k(x, 8), lambda: (normal((few, 128), f32),), (128 + 16) * 4 * few),
    ]
    return [Probe("memory", *one) for one in found]


def product_probes(scale: Scale) -> list[Probe]:
    """Return dense products: of attention, of heads and of cubes."""
    shapes = scale.of(
        (
            (8192, 8192, 8192),
            (4096, 4096, 4096),
            (2048, 2048, 2048),
            (16384, 2048, 4096),
            (16384, 4096, 2048),
            (16384, 2048, 512),
            (16384, 2048, 128),
            (4096, 2048, 151936),
            (2048, 4096, 151936),
            (4096, 151936, 2048),
            (2048, 2880, 201088),
            (16384, 7168, 1536),
        ),
        ((64, 64, 64),),
    )
    wide = scale.of(((8192, 8192, 8192), (16384, 2048, 128)), ())
    return [_product(*shape, jnp.bfloat16) for shape in shapes] + [_product(*shape, jnp.float32) for shape in wide]


def _product(rows: int, inner: int, columns: int, dtype: Any) -> Probe:
    precision = "highest" if dtype == jnp.float32 else None
    form = ProductForm("dense", "library", "f32" if precision else "bf16", rows, columns)
    return Probe(
        "product",
        f"{rows} x {inner} x {columns}, {jnp.dtype(dtype).name}",
        partial(jnp.matmul, precision=precision),
        lambda: (normal((rows, inner), dtype), normal((inner, columns), dtype, 1)),
        2 * rows * inner * columns,
        form,
    )


def call_seconds(call: Callable[[], Any], least: int = 3, most: int = 200) -> float:
    """Return the seconds of a call in back-to-back calls, of which the host awaits the last."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    calls = int(np.clip(TIMED_S / (time.perf_counter() - begin), least, most))
    begin = time.perf_counter()
    for _ in range(calls):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / calls


def compiled_all(programs: list[Callable[[], Any]]) -> list[Any]:
    """Compile programs at once; an exception takes the place of a program that does not compile."""

    def compiled(program: Callable[[], Any]) -> Any:
        try:
            return program()
        except Exception as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(compiled, programs))


def compiled_probe(probe: Probe) -> tuple[Compiled, Compiled]:
    """Compile a probe, and the program of its arguments."""
    arrays = jax.jit(probe.arrays).lower().compile()
    return arrays, jax.jit(probe.run).lower(*jax.eval_shape(probe.arrays)).compile()


def probe_row(probe: Probe, programs: Any, target: Target) -> list[Value]:
    """Measure a program; a failure is the text of its row."""
    unit, estimate_s = "TFLOP/s" if probe.product else "TB/s", probe.estimate_s(target)
    try:
        if isinstance(programs, Exception):
            raise programs
        arrays = jax.block_until_ready(programs[0]())
        seconds = call_seconds(lambda: programs[1](*arrays))
    except Exception as error:
        return [probe.kind, f"{probe.name}: {_in_words(error)}", unit, *[None] * 5]
    assumed, measured = probe.amount / estimate_s / 1e12, probe.amount / seconds / 1e12
    return [probe.kind, probe.name, unit, assumed, measured, measured / assumed, seconds * 1e6, estimate_s * 1e6]


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# ---- launches ----------------------------------------------------------------------------


def _launch_row(name: str, assumed_s: float | None, seconds: float | None) -> list[Value]:
    ratio = None if assumed_s is None or seconds is None else seconds / assumed_s
    us = [None if one is None else one * 1e6 for one in (assumed_s, seconds)]
    return ["launch", name, "us", *us, ratio, None, None]


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return given if jax.default_backend() == "gpu" else {}


def chains(scale: Scale) -> list[tuple[int, dict[str, Any]]]:
    """Return the widths and options of chains: kernels shorter and longer than a launch, launched and in a graph."""
    return [(width, options) for width in scale.of((128, 2048), (8,)) for options in (WITHOUT_GRAPHS, {})]


def compiled_chain(width: int, options: dict[str, Any]) -> Compiled:
    """Compile a chain of products."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = x @ w
        return x

    shape = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    return jax.jit(run).lower(shape, shape).compile(_options(options))


def chain_rows(width: int, options: dict[str, Any], program: Any, target: Target) -> list[list[Value]]:
    """Measure a chain: its products, their kernels by the profile, and the time between them."""
    where = "launched by the host" if options else "in a CUDA graph"
    label = f"chain of {CHAIN} products of width {width}, {where}"
    try:
        if isinstance(program, Exception):
            raise program
        x, w = normal((width, width)), normal((width, width), seed=1) / width**0.5
        total = call_seconds(lambda: program(x, w)) / CHAIN
        durations = kernel_seconds(lambda: program(x, w), 1)
    except Exception as error:
        return [_launch_row(f"{label}: {_in_words(error)}", None, None)]
    rates = rates_of(target)
    inside = sum(map(sum, durations.values())) / CHAIN or None
    is_short = bool(options) and width < LONG
    rows = [
        _launch_row(f"{label}: a product", rates.launch if is_short else None, total),
        _launch_row(f"{label}: its kernels", None, inside),
        _launch_row(f"{label}: between kernels", None if is_short else rates.start, inside and total - inside),
    ]
    events = sum(map(len, durations.values())) / CHAIN
    return [*rows, ["launch", f"{label}: events in the profile", "", None, events, None, None, None]]


def compiled_loop() -> Compiled:
    """Compile a loop whose condition the host reads."""

    def run(stop: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + 1, c[1] * 1.01), (jnp.int32(0), x))[1]

    shapes = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1024,), jnp.float32)
    return jax.jit(run).lower(*shapes).compile(_options(WITHOUT_GRAPHS))


def host_rows(loop: Any, target: Target) -> list[list[Value]]:
    """Measure a loop whose condition the host reads, and calls of a small program."""
    try:
        if isinstance(loop, Exception):
            raise loop
        stop, x = jnp.int32(CHAIN), normal((1024,), jnp.float32)
        seconds = call_seconds(lambda: loop(stop, x)) / CHAIN
        rows = [_launch_row("iteration of a loop, with its kernels", rates_of(target).host_wait, seconds)]
        one = jnp.float32(1)
        empty = jax.jit(lambda x: x + 1).lower(one).compile()
        rows.append(_launch_row("call of a program of one kernel", None, call_seconds(lambda: empty(one), 200)))
        begin = time.perf_counter()
        for _ in range(CHAIN):
            jax.block_until_ready(empty(one))
        return [*rows, _launch_row("the same, awaited by the host", None, (time.perf_counter() - begin) / CHAIN)]
    except Exception as error:
        return [_launch_row(f"waits of the host: {_in_words(error)}", None, None)]


def measure(scale: Scale, ready: Callable[[], None]) -> Table:
    """Measure all rates; each is kept at once."""
    target = Target.parse(f"{gpu_kind() or 'h100'}:1x1")
    probes = [*memory_probes(scale), *product_probes(scale)]
    in_chains = chains(scale)
    programs = compiled_all(
        [
            *(partial(compiled_probe, probe) for probe in probes),
            *(partial(compiled_chain, *chain) for chain in in_chains),
            compiled_loop,
        ]
    )
    ready()
    rows = [probe_row(probe, program, target) for probe, program in zip(probes, programs, strict=False)]
    scale.keep(Table(COLUMNS, rows))
    for chain, program in zip(in_chains, programs[len(probes) :], strict=False):
        rows += chain_rows(*chain, program, target)
    rows += host_rows(programs[-1], target)
    return Table(COLUMNS, rows)

"""Rates of the library's gathers and sums of rows, beside those of kernels: whether such kernels are worth writing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import kit
from benchmarks.gpu.comparison import LAYERS, TINY, Layer
from benchmarks.gpu.device import kernel_seconds
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.render.results import Table, Value
from jax_moe_lb.core.manual_axes import unvarying_call
from jax_moe_lb.transport.exchange import Receipt, combine, to_sending_order

BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100 from its data sheet."""

WITHIN = 1.2
"""Largest time of the library's form, relative to the fastest form."""

ROWS_AT_ONCE = 4
CALLS = 10
LIBRARY, SIGNED, WORDS, KERNEL = "library", "signed indices", "words of 4 bytes", "kernel"

COLUMNS = {"layer": "", "operation": "", "form": "", "us": ".1f", "GB/s": ".0f", "of the sheet": ".2f", "": ""}


def _receipt(order: jax.Array, place: jax.Array) -> Receipt:
    return Receipt(
        rounds=jnp.int32(1), follows_plan=None, order=order, place=place, num_going=jnp.int32(order.shape[0])
    )


def _library(tokens: Any, order: Any, place: Any, per_token: int) -> Any:
    return to_sending_order(tokens, _receipt(order, place), per_token)


def _signed(tokens: Any, order: Any, _: Any, per_token: int) -> Any:
    return tokens[order // per_token]


def _words(tokens: Any, order: Any, _: Any, per_token: int) -> Any:
    words = jax.lax.bitcast_convert_type(tokens.reshape(tokens.shape[0], -1, 2), jnp.uint32)
    rows = words[order.astype(jnp.uint32) // per_token]
    return jax.lax.bitcast_convert_type(rows, tokens.dtype).reshape(rows.shape[0], -1)


def _kernel(tokens: Any, order: Any, _: Any, per_token: int) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    hidden = tokens.shape[1]

    def copy(tokens: Any, order: Any, out: Any) -> None:
        start = pl.program_id(0) * ROWS_AT_ONCE
        for row in range(ROWS_AT_ONCE):
            token = jax.lax.div(triton.load(order.at[start + row]), per_token)
            triton.store(out.at[start + row, pl.ds(0, hidden)], triton.load(tokens.at[token, pl.ds(0, hidden)]))

    call: Any = pl.pallas_call(
        copy,
        grid=(order.shape[0] // ROWS_AT_ONCE,),
        out_shape=jax.ShapeDtypeStruct((order.shape[0], hidden), tokens.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="gather_rows",
    )
    return unvarying_call(call, tokens, order)


def _combine(copies: Any, order: Any, place: Any, weights: Any) -> Any:
    return combine(copies, weights, _receipt(order, place))


def _combine_kernel(copies: Any, _: Any, place: Any, weights: Any) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (tokens, per_token), hidden = weights.shape, copies.shape[1]

    def add(copies: Any, place: Any, weights: Any, out: Any) -> None:
        token, total = pl.program_id(0), jnp.zeros((hidden,), jnp.float32)
        for k in range(per_token):
            row = triton.load(place.at[token * per_token + k])
            values = triton.load(copies.at[row, pl.ds(0, hidden)]).astype(jnp.float32)
            total = total + values * triton.load(weights.at[token * per_token + k])
        triton.store(out.at[token, pl.ds(0, hidden)], total.astype(out.dtype))

    call: Any = pl.pallas_call(
        add,
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), copies.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="combine_rows",
    )
    return unvarying_call(call, copies, place, weights.reshape(-1))


GATHERS: dict[str, Callable[..., Any]] = {LIBRARY: _library, SIGNED: _signed, WORDS: _words, KERNEL: _kernel}
SUMS: dict[str, Callable[..., Any]] = {LIBRARY: _combine, KERNEL: _combine_kernel}


def programs(name: str, layer: Layer, *, kernels: bool = True) -> kit.Programs:
    """Return the programs of a layer, by its name, operation and form; without `kernels`, those that CPUs run."""
    rows = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    order = jax.ShapeDtypeStruct((layer.copies,), jnp.int32)
    weights = jax.ShapeDtypeStruct((layer.tokens, layer.per_token), jnp.float32)
    tokens, copies = rows((layer.tokens, layer.hidden)), rows((layer.copies, layer.hidden))
    found: kit.Programs = {}
    for form, gather in GATHERS.items():
        function = partial(gather, per_token=layer.per_token)
        found[name, "gather", form] = kit.Program(function, (tokens, order, order))
    for form, add in SUMS.items():
        found[name, "sum", form] = kit.Program(add, (copies, order, order, weights))
    return {key: program for key, program in found.items() if kernels or key[2] != KERNEL}


def _arguments(layer: Layer) -> dict[str, tuple[jax.Array, ...]]:
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 3)
    # Each expert takes tokens in their order, as in `sending_order`.
    expert = rng.integers(0, layer.experts, layer.copies)
    order = np.argsort(expert, kind="stable").astype(np.int32)
    addresses = jnp.asarray(order), jnp.asarray(np.argsort(order).astype(np.int32))
    tokens = jax.random.normal(keys[0], (layer.tokens, layer.hidden), jnp.bfloat16)
    copies = jax.random.normal(keys[1], (layer.copies, layer.hidden), jnp.bfloat16)
    weights = jax.nn.softmax(jax.random.normal(keys[2], (layer.tokens, layer.per_token)))
    return {"gather": (tokens, *addresses), "sum": (copies, *addresses, weights)}


def gathers_are_fast(scale: Scale) -> Finding:
    """Check that the library's forms take at most `WITHIN` times as long as the fastest forms."""
    layers = {"tiny": TINY} if scale.dry else {name: LAYERS[name] for name in ("qwen3", "mixtral")}
    given = {
        key: one for name, layer in layers.items() for key, one in programs(name, layer, kernels=not scale.dry).items()
    }
    compiled = kit.compile_all(given)
    rows: list[list[Value]] = []
    for name, layer in layers.items():
        arguments = _arguments(layer)
        moved = 2 * layer.hidden * (layer.copies + layer.tokens)
        for (of, operation, form), program in compiled.items():
            if of == name:
                library = compiled[name, operation, LIBRARY]
                us, reason = _us(program, library, arguments[operation], scale.of(CALLS, 1))
                rate = us and 1e-3 * moved / us
                rows.append([name, operation, form, us, rate, rate and 1e9 * rate / BYTES_PER_S, reason])
        scale.keep(Table(COLUMNS, rows))
    ratios = _ratios(rows)
    found = "; ".join(f"{name}: {ratio:.2f} x the fastest" for name, ratio in ratios.items())
    return Finding(bool(ratios) and max(ratios.values()) <= WITHIN, found or "no times", Table(COLUMNS, rows))


def _us(program: Any, library: Any, arguments: tuple[jax.Array, ...], calls: int) -> tuple[float | None, str]:
    """Return the microseconds of a call, and the reason of a failure."""
    try:
        if isinstance(program, Exception):
            raise program
        found, expected = program(*arguments), library(*arguments)
        if not bool(jnp.allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-2)):
            return None, "wrong values"
        seconds = kernel_seconds(lambda: program(*arguments), calls)
        return 1e6 * sum(float(np.median(one)) for one in seconds.values()) or None, ""
    except Exception as error:  # the other forms are measured without it
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _ratios(rows: list[list[Value]]) -> dict[str, float]:
    """Return the time of the library's form relative to the fastest form, by layer and operation."""
    times: dict[str, dict[str, float]] = {}
    for layer, operation, form, us, *_ in rows:
        if us is not None:
            times.setdefault(f"{layer}, {operation}", {})[str(form)] = float(us)  # type: ignore[arg-type]
    return {name: one[LIBRARY] / min(one.values()) for name, one in times.items() if LIBRARY in one}

"""Clocks of the GPU while programs run, and the rates of memory and of dense products beside them."""

import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.kit import Program, compile_all, compiled_one, in_words
from benchmarks.render.results import Table, Value

QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
PERIOD_MS, NUMBER = 100, re.compile(r"\d+(\.\d+)?")

REPEATS = 5

TIMED_S, MOST_CALLS = 0.05, 200
"""Seconds of repeated calls, and most of them."""

COLUMNS = {"operation": "", "unit": "", "rate": ".4g", "us": ".1f"}
COLUMNS |= {"SM MHz": ".0f", "memory MHz": ".0f", "W": ".0f", "degrees C": ".0f"}


class Clocks:
    """Context that samples clocks by `nvidia-smi`; without it, there are no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float | None]]] = []
        self._start, self._process = 0.0, None

    def __enter__(self) -> "Clocks":
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(QUERY)}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with suppress(OSError):
            self._process = subprocess.Popen(command, **pipes)
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, lines: Any) -> None:
        for line in lines:
            # A driver may not report a value.
            values = [float(one) if NUMBER.fullmatch(one.strip()) else None for one in line.split(",")]
            if len(values) == len(QUERY):
                self._samples.append((time.monotonic(), values))

    def start(self) -> None:
        """Forget the earlier samples."""
        self._start = time.monotonic()

    def medians(self) -> list[float | None]:
        """Return the medians of `QUERY` since `start`; the last sample if none is later."""
        since = [values for at, values in self._samples if at >= self._start] or [v for _, v in self._samples[-1:]]
        known = [[one for one in of if one is not None] for of in zip(*since, strict=True)] or [[]] * len(QUERY)
        return [float(np.median(of)) if of else None for of in known]

    def mhz(self) -> float | None:
        """Return the median clock of the multiprocessors since `start`, in MHz."""
        return self.medians()[0]


class Probe(NamedTuple):
    """Program whose time shows a rate: its arrays, and the bytes or operations that it cannot avoid."""

    unit: str
    amount: int
    run: Callable[..., Any]
    arrays: Callable[[], tuple[jax.Array, ...]]


def probes(scale: Scale) -> dict[str, Probe]:
    """Return copies, gathers and dense products by name."""
    numbers, copies, width = scale.of((2**28, 2**17, 2048), (2**12, 2**7, 32))
    few, cell = copies // 8, 2 * width
    permutation = np.random.default_rng(0).permutation(copies).astype(np.int32)

    def rows(number: int) -> tuple[jax.Array, ...]:
        return _normal((number, width)), jnp.asarray(permutation)

    def combine(x: jax.Array, index: jax.Array) -> jax.Array:
        return x[index].reshape(few, 8, -1).astype(jnp.float32).sum(1).astype(jnp.bfloat16)

    def square(size: int) -> Probe:
        shape = (size, size)
        return Probe("TFLOP/s", 2 * size**3, jnp.matmul, lambda: (_normal(shape), _normal(shape, 1)))

    line = partial(_normal, (numbers,), dtype=jnp.float32)
    return {
        "copy of an array": Probe("TB/s", 8 * numbers, jnp.copy, lambda: (line(),)),
        "gather: 8 copies of a token": Probe("TB/s", (few + copies) * cell, lambda x, i: x[i // 8], lambda: rows(few)),
        "gather: permuted rows": Probe("TB/s", 2 * copies * cell, lambda x, i: x[i], lambda: rows(copies)),
        "gather and sum of 8 rows": Probe("TB/s", (few + copies) * cell, combine, lambda: rows(copies)),
        **{f"{size} x {size} x {size}, bfloat16": square(size) for size in scale.of((8192, 4096), (64,))},
    }


def _normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    # Zeros would take less power and time.
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def call_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call in back-to-back calls, of which the host awaits the last."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    calls = int(np.clip(TIMED_S / (time.perf_counter() - begin), 3, MOST_CALLS))
    begin = time.perf_counter()
    for _ in range(calls):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / calls


def rates(scale: Scale) -> Finding:
    """Measure copies, gathers and dense products on random data several times, with the clocks."""
    wanted = probes(scale)
    programs = {("arrays", name): Program(one.arrays, ()) for name, one in wanted.items()}
    programs |= {("run", name): Program(one.run, jax.eval_shape(one.arrays)) for name, one in wanted.items()}
    compiled, rows = compile_all(programs), list[list[Value]]()
    measured: dict[str, list[float]] = {}
    with Clocks() as clocks:
        for _ in range(scale.of(REPEATS, 1)):
            for name, probe in wanted.items():
                clocks.start()
                try:
                    arrays, run = (compiled_one(compiled, (what, name)) for what in ("arrays", "run"))
                    seconds = call_seconds(partial(run, *arrays()))
                except Exception as error:  # the others are measured
                    rows.append([f"{name}: {in_words(error)}", probe.unit, None, None, *clocks.medians()])
                    continue
                rate = probe.amount / seconds / 1e12
                measured.setdefault(f"{name}: {{:.4g}} {probe.unit}", []).append(rate)
                rows.append([name, probe.unit, rate, seconds * 1e6, *clocks.medians()])
            scale.keep(Table(COLUMNS, rows))
    found = "; ".join(text.format(np.median(values)) for text, values in measured.items())
    return Finding(len(measured) == len(wanted), found, Table(COLUMNS, rows))

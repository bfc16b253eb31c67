"""Clocks of the GPU while programs run, and the rates of memory and of dense products beside them."""

import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu import constants
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.steps import target_here
from benchmarks.render.results import Table, Value

QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
PERIOD_MS = 100

NAMES = (
    "copy of an array",
    "gather: 8 copies of a token",
    "gather: permuted rows",
    "gather and sum of 8 rows",
    "8192 x 8192 x 8192, bfloat16",
    "4096 x 4096 x 4096, bfloat16",
)
"""Probes of `constants` that are measured with clocks."""

REPEATS = 5

COLUMNS = constants.COLUMNS | {"SM MHz": ".0f", "memory MHz": ".0f", "W": ".0f", "degrees C": ".0f"}


class Clocks:
    """Context that samples clocks by `nvidia-smi`; without it, there are no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        self._start, self._process = 0.0, None

    def __enter__(self) -> "Clocks":
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(QUERY)}"]
        command += ["--format=csv,noheader,nounits", f"-lms={PERIOD_MS}"]
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
            with suppress(ValueError):
                self._samples.append((time.monotonic(), [float(one) for one in line.split(",")]))

    def start(self) -> None:
        """Forget the earlier samples."""
        self._start = time.monotonic()

    def medians(self) -> list[float | None]:
        """Return the medians of `QUERY` since `start`; the last sample if none is later."""
        since = [values for at, values in self._samples if at >= self._start] or [v for _, v in self._samples[-1:]]
        return [float(one) for one in np.median(since, 0)] if since else [None] * len(QUERY)

    def mhz(self) -> float | None:
        """Return the median clock of the multiprocessors since `start`, in MHz."""
        return self.medians()[0]


def rates(scale: Scale) -> Finding:
    """Measure copies, gathers and dense products on random data several times, with the clocks."""
    target = target_here()
    probes = [*constants.memory_probes(scale), *constants.product_probes(scale)]
    probes = [one for one in probes if one.name in NAMES or scale.dry][: len(NAMES)]
    programs = constants.compiled_all([partial(constants.compiled_probe, one) for one in probes])
    rows: list[list[Value]] = []
    with Clocks() as clocks:
        for _ in range(scale.of(REPEATS, 1)):
            for probe, program in zip(probes, programs, strict=True):
                clocks.start()
                rows.append([*constants.probe_row(probe, program, target), *clocks.medians()])
            scale.keep(Table(COLUMNS, rows))
    measured: dict[str, list[float]] = {}
    for row in rows:
        if row[4] is not None:
            measured.setdefault(f"{row[1]}: {{:.4g}} {row[2]}", []).append(float(row[4]))  # type: ignore[arg-type]
    found = "; ".join(text.format(np.median(values)) for text, values in measured.items())
    return Finding(len(measured) == len(probes), found, Table(COLUMNS, rows))

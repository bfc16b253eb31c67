"""Hardware counters of the grouped products of one model, by Nsight Compute.

`python -m benchmarks.gpu.counters NAME` calls each product of a model once, as the profiled process.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import jax
import jax.numpy as jnp

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.kit import compile_all
from benchmarks.gpu.once import EndedBefore, marked
from benchmarks.gpu.products import work_of
from benchmarks.gpu.tiles import DENSE, MODELS, OPERANDS, TABLE, TINY, Model, group_sizes, loads, model_programs
from benchmarks.render.results import Table, Value
from jax_moe_lb.kernels.operands import RowGroups

METRICS = {
    "gpu__time_duration.sum": "us",
    "sm__cycles_elapsed.avg.per_second": "SM Hz",
    "lts__t_sectors_op_read.sum": "sectors read from L2",
    "lts__t_bytes.sum.per_second": "L2 bytes/s",
    "dram__bytes.sum.per_second": "HBM bytes/s",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "GMMA pipe, %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe, %",
    "launch__registers_per_thread": "registers",
}
"""Metrics of Nsight Compute; an unknown one is absent from its report."""

LIMIT_S, CALLS_S = 46.0, 25.0
"""Limit of Nsight Compute, which reports at its end, and seconds after which the profiled process calls no product."""

KERNELS = "regex:product|outer|gmm|matmul|mosaic"
"""Names of kernels of grouped products."""

COLUMNS = {"kernel": "", "metric": "", "unit": "", "value": ".4g"}


def run_products(model: Model) -> list[str]:
    """Call the chosen kernel of each product once, and return their names."""
    programs = model_programs(model)
    wanted = {
        key: one
        for key, one in programs.items()
        if key[1] == OPERANDS or (key[1] != DENSE and getattr(key[1], "tiles", "") == TABLE)
    }
    compiled, called, end = compile_all(wanted), [], time.monotonic() + CALLS_S
    for case in dict.fromkeys(key[0] for key in wanted):
        left, right = compiled[case, OPERANDS](jax.random.key(1))
        sizes = jnp.asarray(group_sizes(loads(model)[0], case.product.all_groups, model.slots))
        for (of, kernel), program in compiled.items():
            if of != case or kernel == OPERANDS or isinstance(program, Exception) or time.monotonic() > end:
                continue
            with suppress(EndedBefore), marked(work_of(case.product.kind, kernel.backend.name)):
                jax.block_until_ready(program(left, right, RowGroups(sizes)))
                called.append(f"{case}, {kernel}")
    return called


def read_counters(text: str) -> list[list[Value]]:
    """Return rows of `COLUMNS` from the CSV of Nsight Compute, which may follow other lines."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return [_row(one) for one in csv.DictReader(io.StringIO("\n".join(lines[start:])))]


def _row(one: Mapping[str, str]) -> list[Value]:
    name = METRICS.get(one["Metric Name"], one["Metric Name"])
    try:
        value: Value = float(one["Metric Value"].replace(",", ""))
    except ValueError:
        value = None
    return [f"{one['ID']}: {one['Kernel Name'][:80]}", name, one["Metric Unit"], value]


def counters(name: str, scale: Scale) -> Finding:
    """Read the counters of a model's products."""
    profiled = [sys.executable, "-m", "benchmarks.gpu.counters", name]
    if scale.dry:
        subprocess.run([*profiled, "--dry-run"], check=True, capture_output=True, timeout=LIMIT_S)
        return Finding(None, "not in a dry run, except for the profiled process")
    command = ["ncu", "--csv", "--clock-control", "none", "--target-processes", "all"]
    command += ["--kernel-name", KERNELS, "--metrics", ",".join(METRICS), *profiled]
    # Nsight Compute saves and restores the arrays of a kernel, at worst with the whole allocation around them.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(None, f"ncu does not run: {error}"[:200])
    rows = read_counters(ended.stdout)
    if not rows:
        return Finding(None, f"ncu reports no kernel: {ended.stdout[-200:]} {ended.stderr[-200:]}")
    kernels = len({row[0] for row in rows})
    return Finding(True, f"{kernels} kernels, {len(rows)} values", Table(COLUMNS, rows))


def main() -> None:
    """Call the products of a model, or of a tiny one on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--dry-run", action="store_true", help="use a tiny model and the CPU")
    given = parser.parse_args()
    if given.dry_run:
        jax.config.update("jax_platforms", "cpu")
    print("\n".join(run_products(TINY if given.dry_run else MODELS[given.model])))


if __name__ == "__main__":
    main()

"""Effects of XLA and layer options on programs compiled for GPUs and TPUs not present.

Requires their compilers: the extras `cuda` and `tpu`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import jax.numpy as jnp

from benchmarks.dispatches import sending_copies
from benchmarks.results import Table, Value, out_alone, report
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.compiler_options import IN_GRAPHS
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.transport import QuantizedTransfer

XLAS_OWN = ",".join(name for name in IN_GRAPHS if name not in ("WHILE", "COLLECTIVES"))
SIZES = LayerSizes()
MEAN_LOAD_BYTES = SIZES.tokens * SIZES.per_token * SIZES.hidden * jnp.dtype(jnp.bfloat16).itemsize
"""Bytes of the rows served by each rank at equal load."""

DECOMPOSER = "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"
MEMORY_PERCENT = "xla_tpu_scheduler_percent_shared_memory_limit"


@dataclass(frozen=True)
class Row:
    """One program.

    Args:
        target: name of the target.
        system: name of the system.
        what: label of the option under test.
        train: if True, compile the gradients, too.
        max_rounds: rounds of the program; `None` for a loop.
        fused: if True, experts have gate and up projection in one weight.
        options: XLA options, overriding `compiler_options`.
        wire: precision of rows in the forward pass.
    """

    target: str
    system: str
    what: str
    train: bool = True
    max_rounds: int | None = None
    fused: bool = False
    options: tuple[tuple[str, str | bool], ...] = ()
    wire: QuantizedTransfer | None = None

    def compile(self) -> ProgramReport:
        """Compile the layer of the reference sizes and return its report."""
        system = sending_copies(system_named(self.system))
        buffers = replace(system.dispatch.buffers, max_rounds=self.max_rounds)
        system = system.replace(buffers=buffers, transfer=self.wire)
        return compile_layer(
            system, Target.parse(self.target), gradients=self.train, fused=self.fused, options=dict(self.options)
        )


ROWS = (
    Row("h100:1x8", "plain", "no loop", train=False, max_rounds=1),
    Row("h100:1x8", "plain", "no loop, `fused`", train=False, max_rounds=1, fused=True),
    Row("h100:1x8", "plain", "no loop", max_rounds=1),
    Row("h100:1x8", "plain", "no loop, `fused`", max_rounds=1, fused=True),
    Row("h100:1x8", "plain", "a loop", train=False),
    Row("h100:1x8", "plain", "a loop"),
    Row("h100:1x8", "exact", "no loop", train=False, max_rounds=1),
    Row("h100:1x8", "exact", "no loop, `fused`", train=False, max_rounds=1, fused=True),
    Row("h100:1x8", "exact", "no loop", max_rounds=1),
    Row("h100:1x8", "exact", "no loop, `fused`", max_rounds=1, fused=True),
    Row("h100:1x8", "exact", "no loop, rows in fp8", max_rounds=1, wire=QuantizedTransfer()),
    Row("h100:1x8", "exact", "a loop", train=False),
    Row("h100:1x8", "exact", "a loop, `fused`", train=False, fused=True),
    Row("h100:1x8", "exact", "a loop, XLA's own graphs", options=(("xla_gpu_enable_command_buffer", XLAS_OWN),)),
    Row("h100:1x8", "exact", "a loop"),
    Row("h100:1x8", "exact", "a loop, `fused`", fused=True),
    Row("h100:1x8", "exact", "a loop, latency hiding", options=(("xla_gpu_enable_latency_hiding_scheduler", True),)),
    Row("h100:8x8", "plain", "no loop, exchanges apart", train=False, max_rounds=1, options=((DECOMPOSER, True),)),
    Row("h100:8x8", "plain", "no loop", train=False, max_rounds=1),
    Row("b200:1x8", "plain", "no loop", max_rounds=1),
    Row("b200:1x8", "exact", "no loop, `fused`", max_rounds=1, fused=True),
    Row("a100:1x8", "plain", "no loop", max_rounds=1),
    Row("a100:1x8", "exact", "no loop, `fused`", max_rounds=1, fused=True),
    Row("v5e:2x4", "plain", "no loop", train=False, max_rounds=1),
    Row("v5e:2x4", "plain", "no loop", max_rounds=1),
    Row("v5e:2x4", "plain", "no loop, 5 % of memory", max_rounds=1, options=((MEMORY_PERCENT, "5"),)),
    Row("v5e:2x4", "exact", "no loop", max_rounds=1),
    Row("v5e:2x4", "exact", "no loop, 3 % of memory", max_rounds=1, options=((MEMORY_PERCENT, "3"),)),
    Row("v5e:2x4", "exact", "no loop, rows in fp8", max_rounds=1, wire=QuantizedTransfer()),
)


COLUMNS = {
    "target": "",
    "system": "",
    "passes": "",
    "program": "",
    "temporary MB": ".0f",
    "times the mean load": ".1f",
    "memory traffic GB": ".2f",
    "host waits": "d",
    "exchanges, beside": "",
}


def measured(row: Row) -> list[Value]:
    """Return one row of the table."""
    with quiet_stderr():
        found = row.compile()
    moving = [one for one in found.collectives if one.kind == "ragged-all-to-all"]
    exchanges, beside = (sum(getattr(one, name) for one in moving) for name in ("count", "asynchronous"))
    bytes_of = found.temp_bytes / 1e6, found.temp_bytes / MEAN_LOAD_BYTES, found.hbm_bytes / 1e9
    what = f"`{row.target}`", row.system, "both" if row.train else "forward", row.what
    return [*what, *bytes_of, found.host_waits, f"{exchanges}, {beside}"]


def main() -> None:
    """Report the table."""
    out = out_alone(__doc__)
    # Kernel compilers keep the architecture of the first program in a process and reject others. As the benchmark
    # measures no times, two programs compile in parallel.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, use_no_accelerators, max_tasks_per_child=1) as pool:
        found = list(pool.map(measured, ROWS))
    report({"programs": Table(COLUMNS, found)}, out)


if __name__ == "__main__":
    main()

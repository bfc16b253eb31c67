"""Compile layers for accelerators not present, and check limits.

At small sizes only the structure of a program is checked: its memory, its products, and collectives over mesh axes.
The reference sizes are compiled for the cases of `LIMITS`. A run compiles about a quarter of the programs;
`--nightly` compiles all of them.

Run `ci/accelerators.sh`, which installs the compilers.
"""

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.collectives.one_shot_lists import MOST_BLOCKS
from jax_moe_lb.layer.systems import System, system_named, system_names
from jax_moe_lb.transport import AutoDispatch, Direct, Forward, Saved

TARGETS = ("h100:1x8", "h100:2x8", "v5e:2x4", "v5e:2x4:2")
SMALL = LayerSizes(hidden=256, inner=128, experts=32, tokens=256, per_token=2)
TILED = replace(SMALL, tokens=1024)
"""Small sizes with a receive buffer of whole tiles, for which GPUs use kernels of grouped products."""

SMALL_SYSTEMS = {
    "h100:1x8": {"lplb"},
    "h100:2x8": {"hybridep", "rails"},
    "v5e:2x4": set(),
    "v5e:2x4:2": set(),
}
"""Systems compiled at small sizes in every run, beside those of `STEP_MS`; `--nightly` compiles all systems."""

REFUSED = {("lplb", "cuda"): "calls the host"}
"""Systems without an ahead-of-time form for a platform, and the expected error."""

PROCESSES = 2
"""Parallel compilations; each may use several cores and 1 to 2 GB of memory."""


SMALL_BYTES = 1e6
"""Bytes of an exchange below which its time is that of its start."""


@dataclass(frozen=True)
class Limits:
    """Upper limits per device.

    Args:
        temp_mb: temporaries, in 10^6 bytes.
        hbm_gb: memory traffic, in 10^9 bytes.
        flops_over_ideal: floating-point operations of products, over the ideal.
        host_waits: host waits in a balanced step.
    """

    temp_mb: float
    hbm_gb: float
    flops_over_ideal: float
    host_waits: int

    def broken(self, report: ProgramReport) -> Iterator[str]:
        """Yield a message for each exceeded limit."""
        found = {
            "temp_mb": report.temp_bytes / 1e6,
            "hbm_gb": report.hbm_bytes / 1e9,
            "flops_over_ideal": report.flops_over_ideal or 0.0,
            "host_waits": report.host_waits or 0,
        }
        for name, value in found.items():
            if value > getattr(self, name):
                yield f"{name} is {value:.4g}; expected at most {getattr(self, name):.4g}"
        # Operands of small layers have too few rows for all blocks.
        of_size = [one.exchange for one in report.collectives if one.nbytes > SMALL_BYTES * one.count]
        for form in filter(None, of_size):
            if form.blocks_per_peer not in (None, MOST_BLOCKS):
                yield f"an exchange has {form.blocks_per_peer} thread blocks per peer; expected {MOST_BLOCKS}"


@dataclass(frozen=True)
class Case:
    """One program to compile.

    Args:
        target: name of the target.
        system: name of the system.
        train: if True, compile the gradients, too.
        sizes: sizes of the layer.
        max_rounds: rounds of the program; `None` for a loop.
        fused: if True, experts have gate and up projection in one weight.
        once_per_node: if True, the dispatch is `Forward`.
        by_rule: if True, the dispatch is that of `dispatch_by_rule`; otherwise it is `Direct`.
        saved: arrays saved for the backward pass.
    """

    target: str
    system: str
    train: bool = False
    sizes: LayerSizes = field(default_factory=LayerSizes)
    max_rounds: int | None = None
    fused: bool = False
    once_per_node: bool = False
    by_rule: bool = False
    saved: Saved = field(default_factory=Saved)

    def __str__(self) -> str:
        size = {SMALL: "small", TILED: "tiled"}.get(self.sizes, "reference")
        rounds = "a loop" if self.max_rounds is None else f"{self.max_rounds} round"
        what = f"{self.target:11} {self.system:10} {'gradients' if self.train else 'forward':9} {size:9}"
        form = "once per node" if self.once_per_node else "by rule" if self.by_rule else ""
        saved = " ".join(name for name, is_saved in vars(self.saved).items() if is_saved)
        return f"{what} {rounds:7} {'fused' if self.fused else '':5} {form:13} {saved}"

    @property
    def configured(self) -> System:
        """System of the program."""
        system = system_named(self.system)
        buffers = replace(system.dispatch.buffers, max_rounds=self.max_rounds)
        chosen = Forward() if self.once_per_node else Direct()
        system = replace(system, dispatch=chosen) if system.dispatch == AutoDispatch() and not self.by_rule else system
        return system.replace(buffers=buffers, saved=self.saved)

    def compile(self) -> ProgramReport:
        """Compile the program and return its report."""
        target = Target.parse(self.target)
        return compile_layer(self.configured, target, self.sizes, gradients=self.train, fused=self.fused)

    def step_ms(self, report: ProgramReport) -> float:
        """Return the estimated milliseconds of the program under the default load of timelines."""
        topology = Target.parse(self.target).topology()
        counts = counts_of(DEFAULT_LOAD, self.sizes, topology.num_ranks)
        return 1e3 * report.timeline(LayerLoad.of(self.configured, self.sizes, topology, counts)).total_s


LIMITS = {
    Case("h100:1x8", "plain", max_rounds=1, fused=True): Limits(300, 1.7, 1.06, 0),
    Case("h100:1x8", "plain", train=True, max_rounds=1, fused=True): Limits(563, 5.72, 1.29, 0),
    Case("h100:1x8", "plain", train=True): Limits(1037, 6.14, 1.29, 0),
    Case("h100:1x8", "exact", train=True): Limits(1079, 6.49, 1.29, 0),
    Case("h100:1x8", "exact", train=True, max_rounds=1): Limits(603, 6.49, 1.29, 0),
    Case("h100:1x8", "exact", train=True, max_rounds=1, saved=Saved(hidden=True)): Limits(697, 5.9, 1.06, 0),
    Case("h100:1x8", "exact", fused=True): Limits(476, 1.79, 1.06, 0),
    Case("h100:1x8", "exact", train=True, fused=True): Limits(1043, 5.65, 1.29, 0),
    Case("h100:1x8", "exact", max_rounds=1, fused=True): Limits(300, 1.75, 1.06, 0),
    Case("h100:1x8", "exact", train=True, max_rounds=1, fused=True): Limits(589, 5.74, 1.29, 0),
    Case("h100:1x8", "ultraep", train=True, max_rounds=1, fused=True): Limits(569, 5.57, 1.29, 0),
    Case("h100:1x8", "ultraep", train=True, sizes=SMALL): Limits(4.6, 0.022, 1.34, 0),
    Case("h100:1x8", "feplb", train=True, max_rounds=1): Limits(1555, 11.8, 3.83, 0),
    Case("h100:2x8", "exact", train=True, max_rounds=1, once_per_node=True): Limits(609, 8.28, 1.36, 0),
    Case("h100:8x8", "plain", max_rounds=1): Limits(438, 2.33, 1.06, 0),
    Case("h100:8x8", "exact", train=True): Limits(926, 7.31, 1.29, 2),
    Case("b200:1x8", "plain", train=True, max_rounds=1): Limits(577, 6.4, 1.29, 0),
    Case("v5e:2x4", "exact", train=True): Limits(1201, 5.32, 1.29, 0),
    Case("v5e:2x4", "exact", train=True, max_rounds=1): Limits(941, 5.58, 1.29, 0),
    Case("v5e:2x4", "exact", train=True, max_rounds=1, by_rule=True): Limits(989, 6.37, 1.3, 0),
    Case("v5e:2x4", "exact", max_rounds=1, by_rule=True): Limits(494, 1.95, 1.07, 0),
    Case("v5e:2x4", "plain", train=True, max_rounds=1, by_rule=True): Limits(979, 7.16, 1.3, 0),
    Case("v5e:2x4", "plain", max_rounds=1, by_rule=True): Limits(530, 2.14, 1.07, 0),
    Case("v5e:2x4", "ultraep", train=True, max_rounds=1, by_rule=True): Limits(999, 6.84, 1.3, 0),
    Case("v5e:2x4", "ultraep", max_rounds=1, by_rule=True): Limits(496, 1.95, 1.07, 0),
    Case("v5e:2x4", "hybridep", train=True, max_rounds=1, by_rule=True): Limits(988, 6.35, 1.3, 0),
    Case("v5e:2x4", "hybridep", max_rounds=1, by_rule=True): Limits(495, 1.95, 1.07, 0),
    Case("v6e:2x4", "exact", train=True, by_rule=True): Limits(1203, 7.16, 1.3, 0),
    Case("v6e:2x4", "exact", train=True, max_rounds=1, by_rule=True): Limits(1000, 7.18, 1.3, 0),
    Case("v5p:2x2x2", "exact", train=True, max_rounds=1, by_rule=True): Limits(875, 7.63, 1.29, 0),
    Case("gb200:1x4x1", "exact", train=True, sizes=TILED): Limits(14.3, 0.104, 1.36, 0),
    Case("v6e:2x4", "exact", train=True, sizes=SMALL): Limits(9.4, 0.018, 7.9, 0),
    Case("tpu7x:2x2x1", "exact", train=True, sizes=SMALL): Limits(10.6, 0.021, 7.9, 0),
    Case("v5e:4x8", "exact", train=True, sizes=SMALL): Limits(9.95, 0.0055, 3.93, 0),
    Case("v5e:2x4:2", "exact", train=True, sizes=SMALL, by_rule=True): Limits(24.0, 0.132, 5.37, 0),
}
"""Limits for the reference sizes; on targets that only have to compile, for small ones. On GPUs, the design goal or the
current value plus 5 %, whichever is lower. The goal of `Forward` is the memory of `Direct` plus 10 %.
"""

TPU_LIMITS = {case for case in LIMITS if Target.parse(case.target).platform == "tpu" and case.sizes != SMALL}
"""Cases whose exchanges of rows are ragged ones; a slice of more chips, and `tpu7x`, have others."""

STEP_MARGIN = 1.05

STEP_MS = {
    Case("h100:1x8", "exact", train=True): 6.015,
    Case("h100:1x8", "exact", train=True, fused=True): 5.791,
    Case("h100:1x8", "ultraep", train=True, max_rounds=1, fused=True): 5.358,
    Case("h100:1x8", "feplb", train=True, max_rounds=1): 8.634,
    Case("h100:1x8", "plain", train=True, sizes=SMALL): 0.9138,
    Case("h100:1x8", "plain", sizes=SMALL): 0.3261,
    Case("h100:1x8", "exact", train=True, sizes=SMALL): 0.6433,
    Case("h100:1x8", "exact", sizes=SMALL): 0.2556,
    Case("h100:1x8", "ultraep", train=True, sizes=SMALL): 0.4914,
    Case("h100:1x8", "ultraep", sizes=SMALL): 0.2295,
    Case("h100:1x8", "feplb", train=True, sizes=SMALL): 1.14,
    Case("h100:1x8", "feplb", sizes=SMALL): 0.4192,
    Case("h100:2x8", "plain", train=True, sizes=SMALL): 6.385,
    Case("h100:2x8", "plain", sizes=SMALL): 1.911,
    Case("h100:2x8", "exact", train=True, sizes=SMALL): 3.483,
    Case("h100:2x8", "exact", sizes=SMALL): 1.108,
    Case("h100:2x8", "ultraep", train=True, sizes=SMALL): 3.402,
    Case("h100:2x8", "ultraep", sizes=SMALL): 1.133,
    Case("h100:2x8", "feplb", train=True, sizes=SMALL): 11.06,
    Case("h100:2x8", "feplb", sizes=SMALL): 3.302,
    Case("h100:2x8", "exact", train=True, sizes=SMALL, once_per_node=True): 1.518,
    Case("h100:2x8", "exact", train=True, max_rounds=1, once_per_node=True): 6.986,
    Case("v5e:2x4", "exact", train=True): 24.36,
    Case("v5e:2x4", "exact", train=True, max_rounds=1): 24.32,
    Case("v5e:2x4", "exact", train=True, max_rounds=1, by_rule=True): 16.98,
    Case("v5e:2x4", "exact", max_rounds=1, by_rule=True): 6.645,
    Case("v5e:2x4", "plain", train=True, max_rounds=1, by_rule=True): 13.28,
    Case("v5e:2x4", "plain", max_rounds=1, by_rule=True): 4.797,
    Case("v5e:2x4", "ultraep", train=True, max_rounds=1, by_rule=True): 16.71,
    Case("v5e:2x4", "ultraep", max_rounds=1, by_rule=True): 6.538,
    Case("v5e:2x4", "hybridep", train=True, max_rounds=1, by_rule=True): 12.91,
    Case("v5e:2x4", "hybridep", max_rounds=1, by_rule=True): 4.797,
    Case("v6e:2x4", "exact", train=True, by_rule=True): 8.172,
    Case("v6e:2x4", "exact", train=True, max_rounds=1, by_rule=True): 7.93,
    Case("v5p:2x2x2", "exact", train=True, max_rounds=1, by_rule=True): 6.844,
}
"""Estimated milliseconds of a step at Zipf 1.0, of the program when this table was last set.

Small sizes hold the structure of programs: launches, exchanges and what runs beside them. The reference sizes are cases
of `LIMITS`. On TPUs they are the default of the rule, and `Direct` on v5e with a loop and in one round. One round of a
system that does not balance serves a part of the copies. A new case with 0.0 fails with its estimate.
"""


ON_TPUS = ("plain", "ultraep", "hybridep")
"""Systems with limits on TPUs, beside `exact`."""

NIGHTLY = {
    # The programs with gradients contain these.
    Case("h100:1x8", "plain", max_rounds=1, fused=True),
    Case("h100:1x8", "exact", fused=True),
    Case("h100:1x8", "exact", max_rounds=1, fused=True),
    Case("h100:8x8", "plain", max_rounds=1),
    *(Case(on, name, sizes=SMALL) for on in TARGETS[:2] for name in ("plain", "exact", "ultraep", "feplb")),
    # These differ from other programs in size, the form of products, the number of rounds, the dispatch or the device.
    Case("h100:1x8", "plain", train=True),
    Case("h100:1x8", "exact", train=True),
    Case("h100:1x8", "exact", train=True, max_rounds=1),
    Case("h100:1x8", "exact", train=True, max_rounds=1, fused=True),
    Case("h100:1x8", "exact", train=True, max_rounds=1, saved=Saved(hidden=True)),
    Case("h100:1x8", "feplb", train=True, max_rounds=1),
    Case("h100:8x8", "exact", train=True),
    *(Case("h100:1x8", name, train=True, sizes=SMALL) for name in ("plain", "ultraep")),
    *(Case("h100:2x8", name, train=True, sizes=SMALL) for name in ("plain", "exact", "ultraep", "feplb")),
    Case("h100:2x8", "exact", train=True, max_rounds=1, once_per_node=True),
    Case("b200:1x8", "plain", train=True, max_rounds=1),
    Case("v5e:2x4", "exact", train=True),
    Case("v5e:2x4", "exact", train=True, max_rounds=1),
    Case("v6e:2x4", "exact", train=True, by_rule=True),
    *(Case(on, "exact", train=True, max_rounds=1, by_rule=True) for on in ("v6e:2x4", "v5p:2x2x2")),
    *(Case("v5e:2x4", name, train, max_rounds=1, by_rule=True) for name in ON_TPUS for train in (False, True)),
    Case("v5e:2x4", "exact", max_rounds=1, by_rule=True),
    Case("gb200:1x4x1", "exact", train=True, sizes=TILED),
    Case("v6e:2x4", "exact", train=True, sizes=SMALL),
    Case("tpu7x:2x2x1", "exact", train=True, sizes=SMALL),
    Case("v5e:4x8", "exact", train=True, sizes=SMALL),
    Case("v5e:2x4:2", "exact", train=True, sizes=SMALL, by_rule=True),
}
"""Cases of `LIMITS` and `STEP_MS` compiled with `--nightly` only."""


def cases(system: str | None, target: str | None, nightly: bool) -> list[Case]:
    """Return the programs to compile, the longest first.

    Args:
        system: the only system, or `None` for all.
        target: the only target, or `None` for all.
        nightly: if True, compile all systems at small sizes, and the cases of `NIGHTLY`.
    """
    # A program with gradients takes twice as long, and contains the other.
    small = [
        Case(on, name, nightly, SMALL, by_rule=on == TARGETS[-1])
        for on in TARGETS
        for name in system_names()
        if nightly or name in SMALL_SYSTEMS[on]
    ]
    nodes = ("h100:2x8", "h100:4x8") if nightly else ("h100:2x8",)
    small += [Case(on, "exact", True, SMALL, once_per_node=True) for on in nodes]
    every = dict.fromkeys([*sorted(LIMITS, key=lambda case: not case.train), *small, *STEP_MS])
    chosen = [case for case in every if nightly or case not in NIGHTLY]
    return [case for case in chosen if system in (None, case.system) and target in (None, case.target)]


def faults(case: Case) -> tuple[list[str], str]:
    """Compile a case; return its faults and a line of numbers."""
    target = Target.parse(case.target)
    expected = REFUSED.get((case.system, target.platform))
    try:
        report = case.compile()
    except ValueError as error:
        if expected and expected in str(error):
            return [], "refused, as it should be"
        return [str(error)], ""
    if expected:
        return [f"it compiles; expected {expected!r}"], _numbers(report)
    limits = LIMITS.get(case)
    found = [*_bad_form(report), *(limits.broken(report) if limits else ())]
    found += _not_ragged(report) if case.once_per_node else []
    found += _rows_elsewhere(report, case.sizes) if case.once_per_node or case in TPU_LIMITS else []
    if case not in STEP_MS:
        return found, _numbers(report)
    step_ms, most = case.step_ms(report), STEP_MARGIN * STEP_MS[case]
    if step_ms > most:
        found.append(f"the estimated step is {step_ms:.4g} ms; expected at most {most:.4g} (STEP_MS)")
    return found, f"{_numbers(report)}, step {step_ms:.4g} ms"


def _bad_form(report: ProgramReport) -> Iterator[str]:
    if not report.fits:
        yield f"it takes {report.total_bytes} bytes; expected at most {report.memory_bytes}"
    if not report.flops_over_ideal or report.flops_over_ideal < 1:
        yield f"flops_over_ideal is {report.flops_over_ideal}; expected at least 1: some products are not counted"
    if report.host_waits is None:
        yield "host waits are not known; expected the compiler to say"
    for one in report.collectives:
        if one.axes is None:
            yield f"{one.kind} goes over groups that are no axes of the mesh"


def _not_ragged(report: ProgramReport) -> Iterator[str]:
    """Yield a message if a level lacks its ragged exchange."""
    ragged = {one.axes for one in report.collectives if one.kind == "ragged-all-to-all"}
    if not ragged >= {("node",), ("expert",)}:
        yield f"ragged exchanges are over {sorted(ragged, key=str)}; expected one between and one inside nodes"


def _rows_elsewhere(report: ProgramReport, sizes: LayerSizes) -> Iterator[str]:
    """Yield a message for each exchange of rows made of another collective."""
    for one in report.collectives:
        if one.kind in ("all-gather", "all-to-all") and one.nbytes >= 2 * sizes.tokens * sizes.hidden:
            yield f"{one.kind} over {one.axes} has {one.nbytes} bytes; expected rows in ragged exchanges alone"


def _numbers(report: ProgramReport) -> str:
    count = sum(one.count for one in report.collectives)
    beside = sum(one.asynchronous for one in report.collectives)
    return (
        f"temp {report.temp_bytes / 1e6:7.1f} MB, memory {report.hbm_bytes / 1e9:7.3f} GB, "
        f"FLOPs {report.flops_over_ideal or 0:6.3f} x, waits {report.host_waits:2}, "
        f"collectives {count:3}, asynchronous {beside:2}, {report.compile_s:3.0f} s"
    )


def compiled(case: Case) -> tuple[list[str], str]:
    """Run `faults` in a worker process, with the stderr of compilers silenced, and deprecation warnings as errors."""
    warnings.simplefilter("error", DeprecationWarning)
    # `ci/hopper_kernels.py` compiles the kernels that replace its own.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    with quiet_stderr():
        return faults(case)


def main() -> int:
    """Compile all cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=system_names())
    parser.add_argument("--target", choices=sorted({case.target for case in cases(None, None, nightly=True)}))
    parser.add_argument("--nightly", action="store_true", help="compile all systems and all cases")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    args = parser.parse_args()
    start_s, bad = time.monotonic(), 0
    # Do not fork, as JAX has threads.
    context = multiprocessing.get_context("spawn")
    chosen = cases(args.system, args.target, args.nightly)
    with (
        ProcessPoolExecutor(args.processes, context, use_no_accelerators) as pool,
        # Kernel compilers keep the architecture of the first program in a process and reject others.
        ProcessPoolExecutor(1, context, use_no_accelerators, max_tasks_per_child=1) as alone,
    ):
        waiting = {(pool if case.target in TARGETS else alone).submit(compiled, case): case for case in chosen}
        for done in as_completed(waiting):
            wrong, numbers = done.result()
            print(waiting[done], numbers, flush=True)
            for fault in wrong:
                print(f"  WRONG: {' '.join(fault.split())[:500]}", flush=True)
            bad += bool(wrong)
    print(f"{len(waiting)} programs, {bad} wrong, {time.monotonic() - start_s:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Time and memory of training steps on one GPU, estimated from programs compiled for an absent one.

The cases are those of `benchmarks.gpu.step_cases`, which `make gpu` measures; the estimates precede the measurement.
Requires the compiler of the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
from collections.abc import Mapping

from benchmarks.gpu.step_cases import CASES, StepCase, compile_step, seconds_by_class
from benchmarks.render.results import Table, Value, report
from jax_moe_lb.aot import Target, quiet_stderr, use_no_accelerators

COLUMNS = {"case": "", "what": "", "name": "", "unit": "", "estimated": ".4g"}


def rows_of(name: str, case: StepCase, target: Target) -> list[list[Value]]:
    """Compile a case; return its estimates, named as in the table of the measurement."""
    with quiet_stderr():
        mesh = case.mesh(target.devices()[0])
        lowered = case.lower(case.programs(mesh), mesh, target)
        _, found = compile_step(lowered, mesh, target, case.ideal_flops, {})
    assert found is not None
    assert target.device is not None
    seconds = found.timeline().total_s
    values = [
        ("memory", "arguments", "GB", found.argument_bytes / 1e9),
        ("memory", "temporaries", "GB", (found.temp_bytes + found.output_bytes) / 1e9),
        ("step", "time", "ms", seconds * 1e3),
        ("step", "tokens/s", "", case.num_tokens / seconds),
        ("step", "model FLOPs utilization", "", case.ideal_flops / target.device.flops_per_s / seconds),
        *(("class", kind, "ms", one * 1e3) for kind, one in seconds_by_class(found).items()),
    ]
    return [[name, *value] for value in values]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Target.parse, default="h100:1x1", help="target of one GPU (default h100:1x1)")
    parser.add_argument("case", choices=CASES, help="case to compile")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_no_accelerators()
    case = CASES[given.case]
    report(
        {"steps": Table(COLUMNS, rows_of(given.case, case, given.target), f"{case}, on `{given.target.name}`")},
        given.out,
    )

"""Compile steps of a preset and of published models, and check limits: `python -m tests.models.compile_reference`.

Requires the compilers installed by `ci/accelerators.sh`, but no accelerator. Without `--nightly`, it compiles the step
of Mixtral-8x7B alone.
"""

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass

from jax_moe_lb.aot import ProgramReport, Target, quiet_stderr
from models.config import PRESETS
from models.dry_run.step import dry_run, published_run
from models.settings import Given

SYSTEMS = {"h100:1x8": "exact", "v5e:2x4": "greedy"}
"""Systems by target; on a TPU the planner of `exact` takes longer to compile."""

MOST_TEMP_BYTES = {"h100:1x8": 3.14e9, "v5e:2x4": 4.2e9}
"""Maximum temporaries: the value when it was set, plus 5 %."""

MOST_HBM_BYTES = {"h100:1x8": 48.9e9, "v5e:2x4": 59.2e9}
"""Maximum memory traffic with the dispatch of the rule: the current value plus 3 %.

Transposing weights in loops would add 5 % on the GPU, and transposing rows 13 % on the TPU.
"""

BFLOAT16: Given = {"model": {"param_dtype": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}}
"""Options of a run with parameters and moments in bfloat16."""

STAGES: Given = BFLOAT16 | {"parallel": {"stages": 2, "expert_parallel": 4}}

LORA: Given = {"model": {"param_dtype": "bfloat16"}, "lora": {"rank": 16}}


@dataclass(frozen=True)
class PublishedLimits:
    """A training step of a published model, which has to fit, and its limits."""

    model: str  # name of the model
    target: str  # name of the cluster
    given: Given  # fields of `TrainConfig`
    temp_gb: float = math.inf  # maximum temporaries of a device: the value when it was set, plus 5 %
    # Maximum floating-point operations, with rematerialized products and a partly filled buffer
    flops_over_ideal: float = math.inf
    hbm_gb: float = math.inf  # maximum memory traffic of a device: the value when it was set, plus 3 % at most
    nightly: bool = True  # if True, compile with `--nightly` only


PUBLISHED = (
    PublishedLimits("mixtral-8x7b", "h100:1x8", BFLOAT16, 21.9, 1.31, 959, nightly=False),
    PublishedLimits("qwen3-30b-a3b", "h100:1x8", BFLOAT16, 14.5, 1.36, 582),
    PublishedLimits("gpt-oss-20b", "h100:1x4", BFLOAT16, 17.9, 1.38, 566),
    PublishedLimits("mixtral-8x7b", "h100:1x2", LORA, 9.0, 1.03, 1085),
    # A stack of gradients for each tick of the pipeline would take 23 GB more.
    PublishedLimits("mixtral-8x7b", "h100:1x8", STAGES, 39.2, 1.95, 1912),
    # Attention scores in float32 would take four times the traffic.
    PublishedLimits("deepseek-v3", "h100:32x8", {}, 23.5, 1.31, 2900),
    PublishedLimits("glm-4.5", "h100:16x8", {}, 23.2, 1.3, 3056),
)

MOST_COMPILE_S = 300.0
"""Five times the duration on an idle core."""


def main() -> int:
    """Print a line per program; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true", help="compile the preset, and further models")
    nightly, bad = parser.parse_args().nightly, 0
    for name, system in SYSTEMS.items() if nightly else ():
        config = PRESETS["reference"]
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, system=system))
        with quiet_stderr():
            report = dry_run(config, Target.parse(name))
        bad += _is_broken(f"{name} {system}", report, MOST_TEMP_BYTES[name], most_hbm=MOST_HBM_BYTES[name])
    for case in PUBLISHED:
        if case.nightly and not nightly:
            continue
        target = Target.parse(case.target)
        with quiet_stderr():
            report = dry_run(published_run(case.model, target, case.given), target)
        limits = 1e9 * case.temp_gb, case.flops_over_ideal, 1e9 * case.hbm_gb
        bad += _is_broken(f"{case.target} {case.model}", report, *limits)
    return int(bad > 0)


def _is_broken(
    what: str, report: ProgramReport, most_bytes: float, most_flops: float = math.inf, most_hbm: float = math.inf
) -> bool:
    broken = report.temp_bytes > most_bytes or report.compile_s > MOST_COMPILE_S or not report.fits
    broken |= report.hbm_bytes > most_hbm
    broken |= report.flops_over_ideal is None or report.flops_over_ideal > most_flops
    sizes = f"arguments {report.argument_bytes / 1e9:.2f} GB, temporaries {report.temp_bytes / 1e9:.2f} GB"
    sizes += f" of {(report.memory_bytes or 0) / 1e9:.1f} GB, memory traffic {report.hbm_bytes / 1e9:.1f} GB"
    sizes += f", FLOPs {report.flops_over_ideal or 0:.2f} of the ideal"
    print(f"{what}: {sizes}, compiled in {report.compile_s:.0f} s{' WRONG' * broken}", flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())

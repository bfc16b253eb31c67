"""Compile steps of a preset and of a published model, and check limits: `python -m tests.models.compile_reference`.

Requires the compilers installed by `ci/accelerators.sh`, but no accelerator. `--nightly` also compiles the slow
step for a TPU, and that of DeepSeek-V3.
"""

import argparse
import dataclasses
import math
import sys

from jax_moe_lb.aot import ProgramReport, Target, quiet_stderr
from models.config import preset
from models.dry_run.step import PublishedRun, dry_run

SYSTEMS = {"h100:1x8": "exact", "v5e:2x4": "greedy"}
"""Systems by target; on a TPU the planner of `exact` takes longer to compile."""

MOST_TEMP_BYTES = {"h100:1x8": 6.0e9, "v5e:2x4": 4.2e9}
"""Maximum temporaries; on the TPU, the current value plus 5 %."""

MOST_HBM_BYTES = {"h100:1x8": 56.7e9, "v5e:2x4": 81.5e9}
"""Maximum memory traffic: the current value plus 3 %. Transposing weights in loops would add 5 % on the GPU, and
transposing rows 13 % on the TPU.
"""

PUBLISHED = {("mixtral-8x7b", "h100:2x8"): 23.1e9}
"""Maximum temporaries of a published model on a cluster: the current value plus 5 %."""

MOST_FLOPS_OVER_IDEAL = 1.35
"""Limit for a published model, including rematerialized expert products and a partly filled buffer."""

NIGHTLY = {("deepseek-v3", "h100:32x8"): (21.9e9, 1.43, 3.41e12)}
"""Maximum temporaries, FLOPs over the ideal and memory traffic of models compiled at night, as above. Attention scores
in float32 took four times the traffic.
"""

MOST_COMPILE_S = 300.0
"""Five times the duration on an idle core."""


def main() -> int:
    """Print a line per program; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true", help="compile steps for a TPU and of larger models")
    nightly, bad = parser.parse_args().nightly, 0
    for name, system in SYSTEMS.items():
        if name.startswith("v5e") and not nightly:
            continue
        config = preset("reference")
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, system=system))
        with quiet_stderr():
            report = dry_run(config, Target.parse(name))
        bad += _is_broken(f"{name} {system}", report, MOST_TEMP_BYTES[name], most_hbm=MOST_HBM_BYTES[name])
    for (model, name), most_bytes in PUBLISHED.items():
        target = Target.parse(name)
        with quiet_stderr():
            report = PublishedRun.on(model, target, {}).compile(target)
        bad += _is_broken(f"{name} {model}", report, most_bytes, MOST_FLOPS_OVER_IDEAL)
    for (model, name), limits in NIGHTLY.items() if nightly else ():
        target = Target.parse(name)
        with quiet_stderr():
            report = PublishedRun.on(model, target, {}).compile(target)
        bad += _is_broken(f"{name} {model}", report, *limits)
    return int(bad > 0)


def _is_broken(
    what: str, report: ProgramReport, most_bytes: float, most_flops: float = math.inf, most_hbm: float = math.inf
) -> bool:
    broken = report.temp_bytes > most_bytes or report.compile_s > MOST_COMPILE_S or not report.fits
    broken |= report.hbm_bytes > most_hbm
    broken |= report.flops_over_ideal is None or report.flops_over_ideal > most_flops
    sizes = f"temporaries {report.temp_bytes / 1e9:.2f} GB, memory traffic {report.hbm_bytes / 1e9:.1f} GB"
    sizes += f", FLOPs {report.flops_over_ideal or 0:.2f} of the ideal"
    print(f"{what}: {sizes}, compiled in {report.compile_s:.0f} s{' WRONG' * broken}", flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())

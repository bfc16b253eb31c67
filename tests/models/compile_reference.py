"""`python -m tests.models.compile_reference` compiles a step of the preset `reference`, and holds limits.

It needs the compilers that `ci/accelerators.sh` installs, and no accelerator.
"""

import dataclasses
import sys

from jax_moe_lb.compiled import Target, quiet_stderr
from models.dry_run import dry_run
from models.presets import preset

SYSTEMS = {"h100:1x8": "exact", "v5e:2x4": "greedy"}
"""By target; on a TPU the plans of `exact` are made by a program that takes longer to compile."""

MOST_TEMP_BYTES = {"h100:1x8": 6.0e9, "v5e:2x4": 6.5e9}
"""On the TPU it is what is needed today and 5 % more."""

MOST_COMPILE_S = 180.0
"""Three times what a quiet core takes."""


def main() -> int:
    """Prints a line for each target; the exit code is 1 where a limit is broken."""
    bad = 0
    for name, system in SYSTEMS.items():
        config = preset("reference")
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, system=system))
        with quiet_stderr():
            report = dry_run(config, Target.parse(name))
        broken = report.temp_bytes > MOST_TEMP_BYTES[name] or report.compile_s > MOST_COMPILE_S or not report.fits
        sizes = f"temporaries {report.temp_bytes / 1e9:.2f} GB, memory traffic {report.hbm_bytes / 1e9:.1f} GB"
        print(f"{name} {system}: {sizes}, compiled in {report.compile_s:.0f} s{' WRONG' * broken}", flush=True)
        bad += broken
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

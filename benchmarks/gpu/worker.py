"""Process that checks claims of one part, one after another; `benchmarks.gpu` starts it.

A check that raises ends the process, since later CUDA calls of it might fail, too.
"""

import argparse
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import jax

from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.findings import DRY_RUN_FAILED, FALSE, NOT_REACHED, TRUE, Claim, Finding, Row, Scale, write_row
from benchmarks.gpu.kit import in_words

RUNNING = "the process ended during the check"
DRY_RUN_DEVICES = 4


def outcome_of(finding: Finding, backend: str) -> tuple[str, str]:
    """Return the outcome of a check, and its numbers or reason. On CPUs no claim about GPUs is reached."""
    if backend != "gpu":
        return NOT_REACHED, f"on {backend}: {finding.found}"
    return {True: TRUE, False: FALSE, None: NOT_REACHED}[finding.holds], finding.found


def check(claim: Claim, path: Path, run: str, scale: Scale) -> bool:
    """Check one claim and write its outcome. Return False if the check raised an exception."""
    backend, device = jax.default_backend(), f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    running = Row(claim.name, NOT_REACHED, RUNNING, 0.0, device, "", run)
    write_row(path, running)
    scale = replace(scale, keep=lambda table: write_row(path, running, table))
    begin, table, completed = time.perf_counter(), None, True
    try:
        finding = claim.check(scale) if scale.dry or backend == "gpu" else Finding(None, "JAX has no GPU")
        (outcome, found), table = outcome_of(finding, backend), finding.table
    except Exception as error:  # whatever it is, the claim is false
        traceback.print_exc()
        completed, reason = False, in_words(error, 500)
        outcome, found = (FALSE, reason) if backend == "gpu" else (NOT_REACHED, f"{DRY_RUN_FAILED}{reason}")
    write_row(path, Row(claim.name, outcome, found, time.perf_counter() - begin, device, "", run), table)
    print(f"{claim.name}: {outcome}: {found}", flush=True)
    return completed


def main() -> None:
    """Check the named claims until one raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path, help="file of the part")
    parser.add_argument("claims", nargs="+")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes and CPUs")
    given = parser.parse_args()
    if given.dry_run:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DRY_RUN_DEVICES)
    claims = {claim.name: claim for claim in PARTS[given.part]}
    for name in given.claims:
        if not check(claims[name], given.out, given.run, Scale(given.dry_run)):
            return


if __name__ == "__main__":
    main()
    # An exit would wait for compilations of later checks.
    sys.stdout.flush()
    os._exit(0)

"""Losses of a small model on this machine's accelerator in bfloat16, and on its CPU in float32; `steps.py` starts it.

Prints one line: a JSON list of both lists of losses. `--dry-run` computes both on the CPU.
"""

import argparse
import json
from dataclasses import replace

import jax

from benchmarks.gpu.step_cases import TINY, StepCase

NUM_STEPS = 10


def losses(case: StepCase, device: jax.Device, number: int = NUM_STEPS) -> list[float]:
    """Train on one batch, and return the loss of each step."""
    # Third-party kernels query the default device for its architecture.
    with jax.default_device(device):
        mesh = case.mesh(device)
        programs, tokens = case.programs(mesh), case.tokens(mesh)
        state, found = programs.init(), []
        for _ in range(number):
            state, loss, *_ = programs.step(state, tokens)
            found.append(loss)
        return [float(loss) for loss in found]


def main() -> None:
    """Parse the command line and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=TINY)
    parser.add_argument("--dry-run", action="store_true", help="use the CPU only")
    given = parser.parse_args()
    if given.dry_run:
        jax.config.update("jax_platforms", "cpu")
    case = TINY[given.case]
    here = losses(case, jax.devices()[0])
    print(json.dumps([here, losses(replace(case, compute_dtype="float32"), jax.devices("cpu")[0])]))


if __name__ == "__main__":
    main()

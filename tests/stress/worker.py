"""Run programs of the random layer test in one process.

`python -m tests.stress.worker INPUTS PROGRAM...` prints one JSON object per case: the numbers of program and input, the
kind of the input, and the differences from the reference.
"""

import json
import os
import sys

# Compilation dominates, as in the tests.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}".strip()

import jax  # noqa: E402 (after the flags)

from jax_moe_lb import use_virtual_cpu_devices  # noqa: E402
from tests.stress.programs import draw_programs  # noqa: E402
from tests.stress.run import run_program  # noqa: E402


def main(num_inputs: int, numbers: list[int]) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    use_virtual_cpu_devices(8)
    programs = draw_programs(max(numbers) + 1)
    for number in numbers:
        for case in run_program(programs[number], range(num_inputs)):
            print(json.dumps({"program": number, **case._asdict()}), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])

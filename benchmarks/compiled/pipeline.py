"""A training step of DeepSeek-V3 with and without a pipeline, compiled for 16 nodes of 8 H100 not present.

Requires the compiler: the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`. A step has 128
sequences of 4096 tokens, and parameters and moments in bfloat16. Steps are estimated by `ProgramReport.timeline`, which
counts all collectives but ragged exchanges at the rate of NVLink, also between nodes.
"""

import argparse
from collections.abc import Mapping

from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import Target, quiet_stderr, use_no_accelerators
from models.dry_run.step import dry_run, published_run
from models.settings import Given, layered

MODEL, TARGET = "deepseek-v3", "h100:16x8"
BFLOAT16: Given = {"model": {"param_dtype": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}}
RUNS: dict[str, Given] = {
    "fully sharded alone": {},
    # 4 does not divide the 58 layers with experts.
    "4 stages": {"parallel": {"stages": 4, "repeats": 7, "layers_before": 2}},
}


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_no_accelerators()
    target = Target.parse(TARGET)
    rows: list[list[Value]] = []
    for name, given in RUNS.items():
        run = published_run(MODEL, target, layered(BFLOAT16, given))
        with quiet_stderr():
            found = dry_run(run, target)
            step_s = found.timeline().total_s
        memory = [found.argument_bytes / 1e9, found.temp_bytes / 1e9, (found.memory_bytes or 0) / 1e9]
        rows.append([name, run.parallel.sizes, *memory, found.hbm_bytes / 1e12, found.flops_over_ideal or 0, step_s])
        print(rows[-1], flush=True)
    columns = {"step": "", "devices": "", "arguments GB": ".1f", "temporaries GB": ".1f", "of GB": ".1f"}
    columns |= {"memory traffic TB": ".2f", "FLOPs over ideal": ".2f", "estimated s": ".1f"}
    return {"deepseek_v3": Table(columns, rows)}

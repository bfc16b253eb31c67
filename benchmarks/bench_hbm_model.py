"""Memory traffic of a rank in a layer: the simulator's model against programs compiled for H100s.

Run it with `python -m benchmarks.bench_hbm_model` in an environment with GPU compilers (see `ci/accelerators.sh`); it
takes about 5 minutes. The terms of the model were derived from programs of Qwen3-30B-A3B's sizes, except `arriving`: it
was added when predictions for Mixtral-8x7B were a third too low.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.dispatches import sending_copies
from benchmarks.results import Table, Value, load, out_option, report
from jax_moe_lb.aot import LayerSizes, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.sim import ModelShape
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.hbm import traffic_of

SIZES = {
    "Qwen3-30B-A3B": LayerSizes(),
    "Mixtral-8x7B": LayerSizes(hidden=4096, inner=14336, experts=8, per_token=2),
    "GLM-4.5-Air": LayerSizes(hidden=4096, inner=1408, experts=128),
}
PROGRAMS = [("plain", False, 1), ("exact", False, None), ("plain", True, 1), ("exact", True, 1), ("exact", True, None)]
"""System, gradients (True or False), and rounds of the program; `None` for a loop."""

TARGET = "h100:1x8"


def rows(earlier: dict[Value, Value]) -> Iterator[list[Value]]:
    """Yield a row per program; programs with results of an earlier run are not compiled."""
    node = load_config("preset", "h100_node").cluster
    if node is None:
        raise RuntimeError("h100_node has no cluster; expected one")
    cluster = node.build()
    for name, sizes in SIZES.items():
        shape = ModelShape(1, sizes.hidden, sizes.inner, sizes.experts, sizes.per_token, sizes.tokens)
        for system_name, backward, rounds in PROGRAMS:
            system = sending_copies(system_named(system_name))
            system = system.replace(buffers=replace(system.dispatch.buffers, max_rounds=rounds))
            predicted = traffic_of(system, shape, cluster, backward=backward).total
            passes = "forward and backward" if backward else "forward"
            what = f"{name}, {system_name}, {passes}, {'a loop' if rounds is None else 'one round'}"
            compiled_gb = earlier.get(what)
            if not isinstance(compiled_gb, float):
                with quiet_stderr():
                    program = compile_layer(system, Target.parse(TARGET), sizes, gradients=backward, fused=rounds == 1)
                compiled_gb = program.hbm_bytes / 1e9
            yield [what, predicted / 1e9, compiled_gb, 100 * (predicted / 1e9 / compiled_gb - 1)]


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", type=Path, metavar="FILE", help="Earlier results; their programs are skipped.")
    out_option(parser)
    given = parser.parse_args()
    use_no_accelerators()
    earlier = {row[0]: row[2] for row in load(given.compiled)["traffic"].rows} if given.compiled else {}
    columns = {"layer": "", "GB": ".2f", "compiled GB": ".2f", "deviation %": "+.1f"}
    report(
        {"traffic": Table(columns, list(rows(earlier)), f"Memory traffic of a rank, {TARGET}, compiled")},
        given.out,
    )


if __name__ == "__main__":
    main()

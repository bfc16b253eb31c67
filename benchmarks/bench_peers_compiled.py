"""Layers of other projects against ours, compiled for a node of 8 H100 not present: forward and backward.

    python -m benchmarks.bench_peers_compiled [--out benchmarks/results/bench_peers_compiled.json]

Requires the compiler: the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`. The sizes are
the defaults of `compile_layer`: H 2048, F 768, E 128, T 4096 per rank, K 8, bfloat16. "Ideal" is three times the
forward operations of the token copies and the router. XLA counts products in a loop of unknown length once, such as our
rounds beyond the first; see `compiled.ProgramReport`. The programs are not run.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.bench_peers import DENSE, GSHARD, RAGGED, WORST_CASE, step_of
from benchmarks.peer_layers import OfRank, dense_one_hot, gshard, ours, over_ranks, ragged_dot_ring
from benchmarks.results import Table, Value, out_alone, report
from jax_moe_lb import Buffers, Experts, exact, plain, ultraep
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_for, quiet_stderr, use_no_accelerators

TARGET = "h100:1x8"
BACKWARD = 3
"""Ideal ratio of a forward and backward pass to a forward pass."""


def layers(mesh: Mesh) -> dict[str, OfRank]:
    """Return all layers by name; ours as on GPUs, without host callbacks for checks."""
    systems = {
        "plain": plain(),
        "exact": exact(),
        "ultraep": ultraep(),
        WORST_CASE: plain(Buffers(headroom=float(mesh.size))),
    }
    found = {name: ours(system, mesh) for name, system in systems.items()}
    return found | {GSHARD: gshard, DENSE: dense_one_hot, RAGGED: ragged_dot_ring}


def shapes(mesh: Mesh, sizes: LayerSizes) -> tuple:
    """Return the shapes of tokens, kernel and experts."""

    def array(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    by_rank, whole = PartitionSpec("expert"), PartitionSpec()
    up = array(by_rank, sizes.experts, sizes.hidden, sizes.inner)
    experts = Experts(up, array(by_rank, sizes.experts, sizes.inner, sizes.hidden), up)
    x = array(by_rank, mesh.size * sizes.tokens, sizes.hidden)
    return x, array(whole, sizes.hidden, sizes.experts), experts


def main() -> None:
    """Print the table."""
    out = out_alone(__doc__)
    use_no_accelerators()
    sizes, target = LayerSizes(), Target.parse(TARGET)
    mesh = target.mesh()
    args, ideal_flops = shapes(mesh, sizes), BACKWARD * sizes.ideal_flops
    compile_one = partial(compile_for, target, args=args, mesh=mesh, ideal_flops=ideal_flops)
    rows: list[list[Value]] = []
    for name, of_rank in layers(mesh).items():
        with quiet_stderr():
            found = row_of(partial(compile_one, step_of(over_ranks(mesh, of_rank, sizes.per_token))))
        rows.append([name, *found])
        print(rows[-1], flush=True)
    columns = {"layer": "", "TFLOP": ".2f", "FLOPs over ideal": ".2f", "temporary MB": ".0f"}
    columns |= {"memory traffic GB": ".2f", "host waits": "d"}
    report({"h100": Table(columns, rows)}, out)


def row_of(compiled: Callable[[], ProgramReport]) -> list[Value]:
    """Return the resources of a program, or the reason if the compiler rejects it."""
    try:
        found = compiled()
    except ValueError as error:
        return [f"refused: {str(error).splitlines()[0][:120]}", *[None] * 4]
    return [found.flops / 1e12, found.flops_over_ideal, found.temp_bytes / 1e6, found.hbm_bytes / 1e9, found.host_waits]


if __name__ == "__main__":
    main()

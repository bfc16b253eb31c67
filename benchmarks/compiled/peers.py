"""Layers of other projects against ours, compiled for a node of 8 H100 not present: forward and backward.

With `--maxtext`, MaxText's ring of experts is compiled beside ours for 8 TPU v5e, as its grouped products have no
kernel for GPUs; see `peer_maxtext.py` for its installation. That table has memory, traffic and the buffers of
exchanges, but no time: rows of its kernels depend on the routing.

Requires the compiler: the extra `cuda` or `tpu`, as installed by `ci/accelerators.sh` into `.venv-accelerators`. The
sizes are the defaults of `compile_layer`: H 2048, F 768, E 128, T 4096 per rank, K 8, bfloat16. "Ideal" is three
times the forward operations of the token copies and the router. XLA counts products in a loop of unknown length once,
such as our rounds beyond the first; see `compiled.ProgramReport`. The programs are not run.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.compiled.peer_layers import Layer, dense_one_hot, gshard, ours, over_ranks, ragged_dot_ring
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, Experts, exact, plain, ultraep
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_for, quiet_stderr, use_no_accelerators

WORST_CASE, DENSE, GSHARD, RAGGED = "plain, worst-case buffer", "dense one-hot", "GShard, capacity 1.25", "ragged_dot"

BACKWARD = 3
"""Ideal ratio of a forward and backward pass to a forward pass."""


def layers_on_gpus(mesh: Mesh, sizes: LayerSizes) -> Iterator[tuple[str, Layer]]:
    """Yield all layers and their names; ours as on GPUs, without host callbacks for checks."""
    systems = {
        "plain": plain(),
        "exact": exact(),
        "ultraep": ultraep(),
        WORST_CASE: plain(Buffers(headroom=float(mesh.size))),
    }
    found = {name: ours(system, mesh) for name, system in systems.items()}
    found |= {GSHARD: gshard, DENSE: dense_one_hot, RAGGED: ragged_dot_ring}
    for name, of_rank in found.items():
        yield name, over_ranks(mesh, of_rank, sizes.per_token)


def layers_on_tpus(mesh: Mesh, sizes: LayerSizes) -> Iterator[tuple[str, Layer]]:
    """Yield ours and MaxText's layers, and their names."""
    systems = {
        "exact, one round": exact(buffers=Buffers(max_rounds=1)),
        "exact": exact(),
        "plain": plain(),
        WORST_CASE: plain(Buffers(headroom=float(mesh.size))),
    }
    for name, system in systems.items():
        yield name, over_ranks(mesh, ours(system, mesh), sizes.per_token)
    # MaxText changes global settings of JAX, so ours are compiled before.
    from benchmarks.compiled.peer_maxtext import RING, maxtext_layer

    for name, options in RING.items():
        yield name, maxtext_layer(sizes, mesh, options)


def step_of(layer: Layer) -> Callable:
    """Return `(x, kernel, experts) -> (gradients, y)`."""

    def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
        y = layer(*args)
        return jnp.square(y.astype(jnp.float32)).mean(), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def shapes(mesh: Mesh, sizes: LayerSizes) -> tuple:

    def array(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    by_rank, whole = PartitionSpec("expert"), PartitionSpec()
    up = array(by_rank, sizes.experts, sizes.hidden, sizes.inner)
    experts = Experts(up, array(by_rank, sizes.experts, sizes.inner, sizes.hidden), up)
    x = array(by_rank, mesh.size * sizes.tokens, sizes.hidden)
    return x, array(whole, sizes.hidden, sizes.experts), experts


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--maxtext", action="store_true", help="compile for TPUs, and MaxText's layers, too")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_no_accelerators()
    name, make = ("v5e:2x4", layers_on_tpus) if given.maxtext else ("h100:1x8", layers_on_gpus)
    sizes, target = LayerSizes(), Target.parse(name)
    mesh = target.mesh()
    args, ideal_flops = shapes(mesh, sizes), BACKWARD * sizes.ideal_flops
    compile_one = partial(compile_for, target, args=args, mesh=mesh, ideal_flops=ideal_flops)
    rows: list[list[Value]] = []
    columns, work = (TPU_COLUMNS, exchanged) if given.maxtext else (GPU_COLUMNS, products)
    for layer_name, layer in make(mesh, sizes):
        with quiet_stderr():
            rows.append([layer_name, *row_of(partial(compile_one, step_of(layer)), work)])
        print(rows[-1], flush=True)
    return {name.partition(":")[0]: Table(columns, rows)}


GPU_COLUMNS = {"layer": "", "temporary MB": ".0f", "TFLOP": ".2f", "FLOPs over ideal": ".2f"}
GPU_COLUMNS |= {"memory traffic GB": ".2f", "host waits": "d"}
TPU_COLUMNS = {
    "layer": "",
    "temporary MB": ".0f",
    "memory traffic GB": ".2f",
    "exchanges": "d",
    "their buffers MB": ".0f",
}

LARGE_BYTES = 1e6
"""Bytes of an exchange of rows or weights, more than those of lists."""


def row_of(compiled: Callable[[], ProgramReport], work: Callable[[ProgramReport], list[Value]]) -> list[Value]:
    """Return the resources of a program, or the reason if the compiler rejects it."""
    try:
        found = compiled()
    except ValueError as error:
        return [f"refused: {str(error).splitlines()[0][:120]}", *[None] * 4]
    return [found.temp_bytes / 1e6, *work(found)]


def products(found: ProgramReport) -> list[Value]:
    return [found.flops / 1e12, found.flops_over_ideal, found.hbm_bytes / 1e9, found.host_waits]


def exchanged(found: ProgramReport) -> list[Value]:
    large = [one for one in found.collectives if one.nbytes > LARGE_BYTES * one.count]
    return [found.hbm_bytes / 1e9, sum(one.count for one in large), sum(one.nbytes for one in large) / 1e6]

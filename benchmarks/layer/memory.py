"""Memory of a layer with one-hot routing: 1.05 x the mean in rounds, against a worst-case buffer.

Lists the buffers at peak memory, too.
"""

import argparse
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.stages import Compiled, Wrapped

from benchmarks.render.results import Table, spread
from benchmarks.render.timing import interleaved_s
from jax_moe_lb import Buffers, Experts, MoEParams, System, TopK, Topology, greedy, moe, plain, use_virtual_cpu_devices
from jax_moe_lb.aot.hlo import parse_module
from jax_moe_lb.aot.memory import Buffer, peak_buffers

RANKS, TOKENS, WIDTH, INNER, EXPERTS, PER_TOK = 8, 4096, 256, 512, 16, 2

MEAN_LOAD_BYTES = TOKENS * PER_TOK * WIDTH * 4
"""Bytes of the rows of a rank at equal load, the unit of all results."""

PLACE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", re.MULTILINE
)
LIVE = re.compile(r"^    (\S+):(\d+)-(\d+)$", re.MULTILINE)
"""Patterns of XLA's dumps: the location of a buffer, and its live range."""

SMALL = 0.05
"""Size in mean loads below which buffers are summed in one row."""


def layer(mesh: jax.sharding.Mesh, system: System):
    """Return the jitted gradients of one layer."""
    topology = Topology.from_mesh(mesh)
    tokens, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
        y, stats, _ = moe(x, MoEParams(kernel, experts), TopK(PER_TOK), system, topology)
        return y, stats.rounds

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=(tokens, whole, tokens), out_specs=(tokens, whole))

    def loss(x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
        y, rounds = run(x, kernel, experts)
        return jnp.square(y).mean(), rounds

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def arguments(mesh: jax.sharding.Mesh) -> tuple[jax.Array, jax.Array, Experts]:
    """Return tokens that all prefer experts 0 and 1, both on rank 0, and the weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RANKS * TOKENS, WIDTH))
    x[:, 0] = 1
    kernel = np.zeros((WIDTH, EXPERTS))
    kernel[0, :2] = 10
    up, gate = 0.05 * rng.normal(size=(2, EXPERTS, WIDTH, INNER))
    experts = Experts(up, 0.05 * rng.normal(size=(EXPERTS, INNER, WIDTH)), gate)
    specs = (PartitionSpec("expert"), PartitionSpec(), PartitionSpec("expert"))
    place = [NamedSharding(mesh, spec) for spec in specs]
    args = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, kernel, experts))
    return tuple(jax.device_put(arg, sharding) for arg, sharding in zip(args, place, strict=True))


def compiled(program: Wrapped, args: tuple) -> tuple[Compiled, list[Buffer]]:
    """Return a compiled program, and its buffers at peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        run = program.lower(*args).compile(compiler_options=options)
        dumps = ("after_optimizations", "after_optimizations-live-range", "after_optimizations-buffer-assignment")
        text, ranges, assignment = (next(Path(folder).glob(f"*{name}.txt")).read_text() for name in dumps)
    return run, peak_buffers(parse_module(text), at_the_peak(ranges, assignment), assignment, frozenset())


def at_the_peak(ranges: str, assignment: str) -> str:
    """Return the live buffers at the peak, in XLA's format of its own peak list.

    XLA's list is for another time, as it does not count loop states.
    """
    _, _, temporaries = assignment.partition("preallocated-temp:\n")
    found = PLACE.findall(temporaries.partition("\nallocation")[0])
    place = {name + (index or "{}"): (int(size), int(offset)) for name, index, size, offset in found}
    live = [(name, int(first), int(last)) for name, first, last in LIVE.findall(ranges) if name in place]

    def there(moment: int) -> dict[tuple[int, int], str]:
        # Index by location: a buffer reusing the memory of another begins when that one ends.
        return {place[name]: name for name, first, last in live if first <= moment <= last}

    most = max((there(first) for _, first, _ in live), key=lambda one: sum(size for size, _ in one))
    return "(peak):\n" + "\n".join(f"    {name}: {size} bytes" for (size, _), name in most.items())


def buffer_list(buffers: list[Buffer]) -> Table:
    """Return the buffers as a table, largest first, with equal ones combined."""
    loads: dict[tuple[str, str], float] = {}
    for one in buffers:
        small = one.nbytes < SMALL * MEAN_LOAD_BYTES
        # Remove the common prefix of the names.
        what = one.holds.partition("shard_map/")[2] or ("state of a loop" if one.holds == "tuple" else one.holds)
        key = ("", "all smaller ones") if small else (one.shape, what)
        loads[key] = loads.get(key, 0) + one.nbytes / MEAN_LOAD_BYTES
    rows = [[of, shape, what.replace("branch_0_fun/", "")] for (shape, what), of in loads.items()]
    return Table({"times the mean load": ".2f", "shape": "", "operation": ""}, rows=rows)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(RANKS)
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    systems = {
        "plain, worst-case buffer (headroom 8)": plain(Buffers(headroom=float(RANKS))),
        "plain, headroom 1.05": plain(Buffers(headroom=1.05)),
        "greedy, headroom 1.05": greedy(buffers=Buffers(headroom=1.05)),
    }
    args = arguments(mesh)
    runs = {name: compiled(layer(mesh, system), args) for name, system in systems.items()}
    times_s = interleaved_s({name: lambda run=run: run(*args) for name, (run, _) in runs.items()}, repeats=5)
    columns = {"system": "", "rounds": "d", "temporary MB per rank": ".1f"}
    columns |= {"times the mean load": ".1f", "step ms": ".0f"}
    steps = []
    for name, (run, _) in runs.items():
        temporary_bytes = run.memory_analysis().temp_size_in_bytes
        sizes = [temporary_bytes / 1e6, temporary_bytes / MEAN_LOAD_BYTES]
        steps.append([name, int(run(*args)[1]), *sizes, spread(times_s[name] * 1e3)])
    peak = buffer_list(runs["greedy, headroom 1.05"][1])
    return {"memory": Table(columns, rows=steps), "peak_greedy": peak}

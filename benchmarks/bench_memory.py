"""Memory of a layer with one-hot routing: 1.05 times the mean in rounds, against a worst-case buffer.

Run it with `python -m benchmarks.bench_memory`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.options import no_options
from benchmarks.timing import interleaved_s, summary
from jax_moe_lb import Experts, System, TopK, Topology, greedy, moe, plain, use_virtual_cpu_devices

RANKS, TOKENS, WIDTH, INNER, EXPERTS, PER_TOK = 8, 4096, 256, 512, 16, 2


def layer(mesh: jax.sharding.Mesh, system: System):
    """Gradients of one layer, jitted."""
    topology = Topology.from_mesh(mesh)
    tokens, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
        y, stats, _ = moe(x, kernel, experts, TopK(PER_TOK), system, topology)
        return y, stats.rounds

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=(tokens, whole, tokens), out_specs=(tokens, whole))

    def loss(x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
        y, rounds = run(x, kernel, experts)
        return jnp.square(y).mean(), rounds

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def arguments(mesh: jax.sharding.Mesh) -> tuple[jax.Array, jax.Array, Experts]:
    """Tokens that all prefer experts 0 and 1, both of rank 0."""
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


def main() -> None:
    """Prints the table."""
    no_options(__doc__)
    use_virtual_cpu_devices(RANKS)
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    systems = {
        "plain, worst-case buffer": plain(headroom=float(RANKS)),
        "plain, headroom 1.05": plain(headroom=1.05),
        "greedy, headroom 1.05": greedy(headroom=1.05),
    }
    args = arguments(mesh)
    compiled = {name: layer(mesh, system).lower(*args).compile() for name, system in systems.items()}
    times_s = interleaved_s({name: lambda run=run: run(*args) for name, run in compiled.items()}, repeats=5)
    print("| system | rounds | temporary MB per rank | step ms |")
    print("|---|---|---|---|")
    for name, run in compiled.items():
        rounds = int(run(*args)[1])
        megabytes = run.memory_analysis().temp_size_in_bytes / 1e6
        print(f"| {name} | {rounds} | {megabytes:.1f} | {summary(times_s[name], 1e3, 0)} |")
    rows_mb, expert_mb = TOKENS * PER_TOK * WIDTH * 4 / 1e6, 3 * WIDTH * INNER * 4 / 1e6
    print(f"\nThe mean load of a rank is {rows_mb:.1f} MB of rows; an expert is {expert_mb:.1f} MB.")


if __name__ == "__main__":
    main()

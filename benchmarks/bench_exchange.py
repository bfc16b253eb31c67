"""Exchange of rows between 8 ranks of one process: 4096 rows of 1024 float32 per rank.

Run it with `python -m benchmarks.bench_exchange`.

The lower bounds are NumPy copies of the exchanged rows, with one thread per core. One copies into a new, cleared buffer
as `jnp.zeros` does, including its page faults. The other copies into existing memory, and is compared with an exchange
with a donated output.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.results import Table, Value, out_alone, report, spread
from benchmarks.timing import interleaved_s
from jax_moe_lb import use_virtual_cpu_devices
from jax_moe_lb.collectives.ragged_all_to_all import padded_all_to_all, ragged_all_to_all

RANKS, ROWS, WIDTH = 8, 4096, 1024
REPEATS = 5


def uniform() -> np.ndarray:
    """Return equal sizes between all pairs of ranks."""
    return np.full((RANKS, RANKS), ROWS // RANKS, np.int32)


def zipf() -> np.ndarray:
    """Return sizes proportional to `1 / (r + 1)` for destination `r`, from every rank."""
    share = 1 / np.arange(1, RANKS + 1)
    sizes = np.floor(ROWS * share / share.sum()).astype(np.int32)
    sizes[0] += ROWS - sizes.sum()
    return np.broadcast_to(sizes, (RANKS, RANKS)).copy()


def starts(sizes: np.ndarray) -> np.ndarray:
    """Return the start offsets of slices of the given sizes, along the last axis."""
    return np.cumsum(sizes, -1, dtype=np.int32) - sizes


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))


def sharded(one_rank, num_args: int = 5, **options):
    """Return `one_rank` mapped over the ranks of a mesh, with arrays concatenated so that XLA copies none of them."""
    spec = PartitionSpec("expert")
    mapped = jax.shard_map(one_rank, mesh=mesh(), in_specs=(spec,) * num_args, out_specs=spec)
    return jax.jit(mapped, **options)


def place(array: np.ndarray) -> jax.Array:
    """Place `[R, N, ...]` as `[R * N, ...]`, entry `r` on rank `r`."""
    flat = array.reshape(-1, *array.shape[2:])
    return jax.device_put(flat, NamedSharding(mesh(), PartitionSpec("expert")))


def by_form(form, capacity: int):
    """Return a jitted ragged exchange into a new buffer of `capacity` rows."""

    def one_rank(operand, *where):
        output = jnp.zeros_like(operand, shape=(capacity, WIDTH))
        return form(operand, output, *where, axis_name=("expert",))

    return sharded(one_rank)


def by_padding(largest: int):
    """Return the alternative without a ragged exchange: every pair padded to the largest."""

    def one_rank(operand, first, *where):
        rows = first[:, None] + jnp.arange(largest, dtype=jnp.int32)
        return jax.lax.all_to_all(operand.at[rows].get(mode="clip"), "expert", 0, 0)

    return sharded(one_rank)


class Floor:
    """Copies of the received rows of each rank, with one rank per thread at a time."""

    def __init__(self, operand: np.ndarray, sizes: np.ndarray, capacity: int):
        self.operand, self.sizes, self.capacity = operand, sizes, capacity
        self.first, self.landings = starts(sizes), starts(sizes.T)
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.there = [self.new(rank) for rank in range(RANKS)]

    def new(self, rank: int) -> np.ndarray:
        """Return a cleared buffer."""
        rows = np.empty((self.capacity, WIDTH), np.float32)
        rows.fill(0)
        return rows

    def receive(self, rank: int, rows: np.ndarray) -> np.ndarray:
        """Fill the buffer with the received rows of a rank."""
        for source, size in enumerate(self.sizes[:, rank]):
            landing, start = self.landings[rank, source], self.first[source, rank]
            rows[landing : landing + size] = self.operand[source, start : start + size]
        return rows

    def into_new(self) -> list[np.ndarray]:
        """Copy into new buffers."""
        return list(self.pool.map(lambda rank: self.receive(rank, self.new(rank)), range(RANKS)))

    def into_old(self) -> None:
        """Copy into existing buffers."""
        list(self.pool.map(lambda rank: self.receive(rank, self.there[rank]), range(RANKS)))


class InPlace:
    """The exchange into its own last result."""

    def __init__(self, args: list[jax.Array], capacity: int):
        def one_rank(output, operand, *where):
            return ragged_all_to_all(operand, output, *where, axis_name=("expert",))

        self.args, self.run = args, sharded(one_rank, 6, donate_argnums=0)
        self.rows = place(np.zeros((RANKS, capacity, WIDTH), np.float32))

    def __call__(self) -> jax.Array:
        self.rows = self.run(self.rows, *self.args)
        return self.rows


def measure(name: str, sizes: np.ndarray) -> list[Value]:
    """Return one row of the table."""
    operand = np.random.default_rng(0).normal(size=(RANKS, ROWS, WIDTH)).astype(np.float32)
    capacity, received = int(sizes.sum(0).max()), sizes.T.copy()
    args = [place(a) for a in (operand, starts(sizes), sizes, starts(received).T.copy(), received)]
    exact = by_form(ragged_all_to_all, capacity)
    padded, steps = by_padding(int(sizes.max())), by_form(padded_all_to_all, capacity)
    np.testing.assert_array_equal(exact(*args), steps(*args))
    floor = Floor(operand, sizes, capacity)
    times_s = interleaved_s(
        {
            "exact": lambda: exact(*args),
            "padded": lambda: padded(*args),
            "steps": lambda: steps(*args),
            "floor": floor.into_new,
            "in place": InPlace(args, capacity),
            "copy": floor.into_old,
        },
        REPEATS,
    )
    ratios = (("padded", "exact"), ("exact", "floor"), ("in place", "copy"))
    return [
        name,
        *(spread(times * 1e3) for times in times_s.values()),
        float(operand.nbytes / 1e9 / np.median(times_s["copy"])),
        *(spread(times_s[a] / times_s[b]) for a, b in ratios),
    ]


def main() -> None:
    """Report the table."""
    out = out_alone(__doc__)
    use_virtual_cpu_devices(RANKS)
    times = ("exact", "padded all_to_all", "padded steps", "floor", "in place", "copy")
    columns = {"sizes": ""} | {f"{name} ms": ".0f" for name in times}
    columns |= {"copy GB/s": ".1f", "padded / exact": ".1f", "exact / floor": ".2f", "in place / copy": ".2f"}
    rows = [measure(name, sizes) for name, sizes in (("uniform", uniform()), ("Zipf(1)", zipf()))]
    report({"exchange": Table(columns, rows)}, out)


if __name__ == "__main__":
    main()

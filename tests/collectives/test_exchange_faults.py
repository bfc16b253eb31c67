"""The exchange inside one process with absent, inconsistent or reordered ranks."""

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
from jax_moe_lb.core.custom_calls import is_built
from tests.layer_cases import make_mesh

R = 8
MESH = make_mesh((R,), ("expert",))
SPEC = PartitionSpec("expert")
ROWS = 16

# Every rank sends row `r` to rank `r`.
OFFSETS = jnp.broadcast_to(jnp.arange(R, dtype=jnp.int32), (R, R))
LANDINGS = OFFSETS.T
ONES = jnp.ones((R, R), jnp.int32)
X = jnp.arange(R * ROWS * 3, dtype=jnp.float32).reshape(R, ROWS, 3)


def transposed(x):
    """Return the result of the exchange of `OFFSETS` and `LANDINGS`."""
    out = np.zeros((R, ROWS, 3), np.float32)
    out[:, :R] = np.asarray(x)[:, :R].swapaxes(0, 1)
    return out


def sharded(one_rank, mesh=MESH, num_args=6, **options):
    def batched(*args):
        return one_rank(*(arg[0] for arg in args))[None]

    return jax.jit(jax.shard_map(batched, mesh=mesh, in_specs=(SPEC,) * num_args, out_specs=SPEC, **options))


def exchange(rows, output, *slices, timeout_s=20.0):
    return ragged_all_to_all(rows, output, Slices(*slices), Group(("expert",)), site="dispatch", timeout_s=timeout_s)


EXCHANGE = sharded(exchange)
GOOD = (X, jnp.zeros_like(X), OFFSETS, ONES, LANDINGS, ONES)


def next_program_works():
    np.testing.assert_array_equal(EXCHANGE(*GOOD), transposed(X))


def error_of(function, *args):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(function(*args))
    return str(error.value)


def test_the_custom_call_is_here():
    """Without the custom call, all tests here would pass without testing it."""
    assert is_built("cpu")
    assert "moe_lb_ragged_exchange" in EXCHANGE.lower(*GOOD).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("absent", [[3], [2, 5]])
def test_ranks_that_never_come_are_named(absent):
    def one_rank(*args):
        away = jnp.isin(jax.lax.axis_index("expert"), jnp.asarray(absent, jnp.int32))
        return jax.lax.cond(away, lambda *args: args[1], lambda *args: exchange(*args, timeout_s=0.5), *args)

    start_s = time.perf_counter()
    message = error_of(sharded(one_rank), *GOOD)
    assert time.perf_counter() - start_s < 10
    names = " ".join(str(rank) for rank in absent)
    assert "DEADLINE_EXCEEDED" in message
    assert (
        f"ragged_exchange at dispatch: rank {absent[0]} of 8 did not arrive within 0.5 s; missing ranks: {names}"
        in message
    )
    next_program_works()


@pytest.mark.slow
def test_an_exception_in_one_shard_stops_the_others():
    def fail(x, rank):
        if rank == 6:
            raise RuntimeError("shard 6 fails")
        return x

    def one_rank(x, *args):
        x = jax.pure_callback(fail, jax.typeof(x), x, jax.lax.axis_index("expert"))
        return exchange(x, *args, timeout_s=1.0)

    start_s = time.perf_counter()
    message = error_of(sharded(one_rank), *GOOD)
    assert time.perf_counter() - start_s < 15
    assert "shard 6 fails" in message or "missing ranks: 6" in message
    # Otherwise JAX reports it again at process exit.
    with pytest.raises(jax.errors.JaxRuntimeError, match="shard 6 fails"):
        jax.effects_barrier()
    next_program_works()


BAD = {
    "input_offsets": (2, 3, 7, 16, "rank 3: input_offsets of slice 7 is 16; expected its 1 rows within the 16 rows"),
    "send_sizes": (3, 1, 2, -4, "rank 1: send_sizes of slice 2 is -4; expected 0 or more"),
    "output_offsets": (4, 5, 0, -1, "rank 5: output_offsets of slice 0 is -1; expected its 1 rows within the 16 rows"),
    "recv_sizes": (5, 4, 2, 3, "rank 2: send_sizes of slice 4 is 1; rank 4 expects 3 (recv_sizes of its slice 2)"),
    "overlap": (4, 5, 0, 1, "rank 5: output_offsets of slice 0 is 1; expected at least 2 at rank 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_offsets_and_sizes_stop_all_ranks(name):
    which, rank, slice_, value, message = BAD[name]
    args = list(GOOD)
    args[which] = args[which].at[rank, slice_].set(value)
    output = EXCHANGE(*args)
    for shard in output.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(shard.data)
        assert f"INVALID_ARGUMENT: ragged_exchange at dispatch: {message}" in str(error.value)
    next_program_works()


def test_a_number_of_slices_that_no_rank_can_share_is_refused():
    with pytest.raises(ValueError, match="sent has 7 entries; expected a multiple of the 8 ranks"):
        EXCHANGE(X, X, *(a[:, :7] for a in GOOD[2:]))


def test_a_timeout_that_is_none_is_refused():
    message = error_of(sharded(lambda *args: exchange(*args, timeout_s=0.0)), *GOOD)
    assert "timeout_s is 0; expected above 0" in message


def test_twelve_independent_exchanges_beside_collectives():
    """XLA starts independent calls in a different order on every device, and its own collectives block threads."""

    def one_rank(x, *args):
        results = [exchange(x * (i + 1), *args) for i in range(12)]
        sums = [jax.lax.psum(x * (i + 1), "expert") for i in range(3)]
        return sum(results) + 0 * sum(sums)

    run = sharded(one_rank)
    for _ in range(20):
        np.testing.assert_array_equal(jax.block_until_ready(run(*GOOD)), 78 * transposed(X))


def test_loops_that_mix_exchanges_and_collectives():
    def one_rank(x, output, *where):
        def step(_, carry):
            y = exchange(carry, output, *where)
            return exchange(y, output, *where) + 0 * jax.lax.pmax(y, "expert")

        return jax.lax.fori_loop(0, 50, step, exchange(x, output, *where))

    np.testing.assert_array_equal(sharded(one_rank)(*GOOD), transposed(X))


@pytest.mark.slow
def test_several_meshes_and_programs_at_once():
    """Each program has its own ranks: 8 of one mesh, 8 in another order, 4 and 2."""
    failures = []

    def program(scale, mesh):
        num_ranks = mesh.size
        offsets = jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32), (num_ranks, num_ranks))
        ones, x = jnp.ones_like(offsets), scale * X[:num_ranks]
        run = sharded(lambda *args: exchange(*args) + 0 * jax.lax.psum(args[0], "expert"), mesh)
        want = np.zeros(x.shape, np.float32)
        want[:, :num_ranks] = np.asarray(x)[:, :num_ranks].swapaxes(0, 1)
        try:
            for _ in range(20):
                got = jax.block_until_ready(run(x, jnp.zeros_like(x), offsets, ones, offsets.T, ones))
                np.testing.assert_array_equal(got, want)
        except Exception as failure:
            failures.append(failure)

    backwards = jax.sharding.Mesh(np.asarray(jax.devices())[::-1], ("expert",))
    meshes = [MESH, backwards, make_mesh((4,), ("expert",)), make_mesh((2,), ("expert",))]
    threads = [threading.Thread(target=program, args=(float(i + 1), mesh)) for i, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


SIXTY_FOUR = """
import jax, jax.numpy as jnp, numpy as np
from jax_moe_lb import use_virtual_cpu_devices
use_virtual_cpu_devices(64)
from jax.sharding import AxisType, PartitionSpec
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
mesh = jax.make_mesh((64,), ("expert",), axis_types=(AxisType.Auto,))
spec = PartitionSpec("expert")
offsets = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (64, 64))
ones = jnp.ones_like(offsets)
x = jnp.arange(64.0 * 64 * 32, dtype=jnp.float32).reshape(64, 64, 32)

def one_rank(*args):
    args = [arg[0] for arg in args]
    def step(_, x):
        return ragged_all_to_all(x, args[1], Slices(*args[2:]), Group(("expert",))) + 0 * jax.lax.psum(x, "expert")
    return jax.lax.fori_loop(0, 11, step, args[0])[None]

run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))
for _ in range(3):
    got = jax.block_until_ready(run(x, jnp.zeros_like(x), offsets, ones, offsets.T, ones))
    np.testing.assert_array_equal(got, np.asarray(x).swapaxes(0, 1))
print("done")
"""


@pytest.mark.slow
def test_64_devices():
    done = subprocess.run([sys.executable, "-c", SIXTY_FOUR], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().endswith("done"), done.stderr[-2000:]


@pytest.mark.slow
def test_ten_thousand_exchanges_leave_memory_flat():
    def one_rank(x, output, *where):
        return jax.lax.fori_loop(0, 500, lambda _, x: exchange(x, output, *where), x)

    run = sharded(one_rank)

    def resident_kb():
        for _ in range(5):
            jax.block_until_ready(run(*GOOD))
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    resident_kb()
    before_kb = resident_kb()
    for _ in range(3):
        after_kb = resident_kb()
    assert after_kb - before_kb < 20_000

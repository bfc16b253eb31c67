"""The exchange between two processes of this machine, with two devices each, over TCP."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_moe_lb.transport import Gather
from tests.collectives.test_ragged_all_to_all import draw_case, reference
from tests.kernels.layer_of_groups import domains_step, layer_step
from tests.layer_cases import assert_close, make_mesh

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]

RANK = textwrap.dedent(
    """
    import faulthandler, os, sys
    import jax
    import jax.numpy as jnp
    import numpy as np

    case_file, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    faulthandler.dump_traceback_later(60, exit=True)
    from benchmarks.training.local_gloo import bind_gloo
    from jax_moe_lb import use_virtual_cpu_devices

    jax.config.update("jax_platforms", "cpu")
    use_virtual_cpu_devices(2)
    bind_gloo()
    jax.distributed.initialize(
        address, 2, process, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5, initialization_timeout=30
    )
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jax_moe_lb.collectives.permutes import gather_tiles
    from jax_moe_lb.collectives.permutes import agreed
    from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
    from tests.kernels.layer_of_groups import domains_step, layer_step

    def place(mesh, spec, array):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def run(axes, mesh_shape, names, case):
        mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
        spec = PartitionSpec(names)

        def one_rank(*args):
            args = [arg[0] for arg in args]
            # Groups side by side want to loop differently often.
            own = jnp.int32(1) if names == axes else 1 + 2 * jax.lax.axis_index("data")
            body = lambda _, output: ragged_all_to_all(args[0], output, Slices(*args[2:]), Group(axes))
            return jax.lax.fori_loop(0, agreed(own, axes), body, args[1])[None]

        step = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))
        out = step(*(place(mesh, spec, array) for array in case))
        for shard in out.addressable_shards:
            yield shard.index[0].start or 0, np.asarray(shard.data)[0]

    def gathered(gather, dtype):
        mesh = jax.make_mesh((2, 2), ("dc", "gpu"), axis_types=(AxisType.Auto,) * 2)
        spec = PartitionSpec(("dc", "gpu"))

        def one_rank(block, upstream):
            tiles, pull_back = jax.vjp(lambda block: gather(block, "dc"), block)
            return tiles[None], pull_back(upstream[0].astype(tiles.dtype))[0]

        step = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))
        rng = np.random.default_rng(0)
        block = (rng.normal(size=(12, 5)) * 9).astype(jnp.dtype(dtype))
        upstream = (rng.normal(size=(4, 6, 5)) * 9).astype(np.float32)
        args = place(mesh, spec, block), place(mesh, spec, upstream)
        lowered = step.lower(*args)
        return lowered.compile()(*args), lowered.as_text().count("collective_permute")

    def whole(mesh, layer):
        everywhere = NamedSharding(mesh, PartitionSpec())
        arrays = jax.jit(lambda *arrays: arrays, out_shardings=everywhere)(*jax.tree.leaves(layer))
        names = ("y", "rounds", *("gradient %d" % i for i in range(4)))
        return [(name, np.asarray(array.addressable_data(0))) for name, array in zip(names, arrays)]

    def same(ours, theirs):
        pairs = zip(ours.addressable_shards, theirs.addressable_shards)
        return all((np.asarray(a.data) == np.asarray(b.data)).all() for a, b in pairs)

    try:
        cases = np.load(case_file)
        results = {}
        for dtype in ("float32", "bfloat16"):
            flat = [cases[f"flat {i}"] for i in range(6)]
            flat[:2] = [array.astype(jnp.dtype(dtype)) for array in flat[:2]]
            for rank, rows in run(("expert",), (4,), ("expert",), flat):
                results[f"flat {dtype} {rank}"] = rows.astype(np.float32)
            pairs = [cases[f"pairs {i}"] for i in range(6)]
            pairs[:2] = [array.astype(jnp.dtype(dtype)) for array in pairs[:2]]
            for rank, rows in run(("expert",), (2, 2), ("expert", "data"), pairs):
                results[f"pairs {dtype} {rank}"] = rows.astype(np.float32)
            ours, num_permutes = gathered(gather_tiles, dtype)
            theirs, _ = gathered(lambda block, axis: jax.lax.all_gather(block, axis, tiled=True), dtype)
            results[f"gather {dtype} {process}"] = [same(*pair) for pair in zip(ours, theirs)] + [num_permutes]
        mesh = jax.make_mesh((2, 2), ("expert", "data"), axis_types=(AxisType.Auto,) * 2)
        layer = layer_step(mesh, lambda spec, array: place(mesh, spec, np.asarray(array)))
        for name, array in whole(mesh, layer):
            results[f"layer {name} {process}"] = array
        mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
        layer, text = domains_step(mesh, lambda spec, array: place(mesh, spec, np.asarray(array)))
        results[f"domains copies {process}"] = "moe_lb_copy_start" in text and "moe_lb_copy_sum" in text
        for name, array in whole(mesh, layer):
            results[f"domains {name} {process}"] = array
        np.savez(case_file.replace("cases", f"results{process}"), **results)
        jax.distributed.shutdown()
    except BaseException:
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    """
)
"""Program of each process."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return `(cases, received)` with the rows received by the ranks of both processes."""
    folder = tmp_path_factory.mktemp("exchange")
    rng = np.random.default_rng(0)
    cases = {f"flat {i}": array for i, array in enumerate(one_case(rng, 4))}
    groups = [one_case(rng, 2) for _ in range(2)]
    cases |= {
        f"pairs {i}": np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])
        for i, arrays in enumerate(zip(*groups, strict=True))
    }
    np.savez(folder / "cases.npz", **cases)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder / "cases.npz"), address, str(i)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        )
        for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(error[-3000:] for error in errors)
    received = {}
    for i in range(2):
        received |= dict(np.load(folder / f"results{i}.npz"))
    return cases, received


def one_case(rng, num_ranks):
    """Return a case of small integers, which are exact in bfloat16."""
    operand, starts, sizes, landings, arriving = draw_case(rng, num_ranks, 2, 60, 4.0)
    operand = np.round(operand * 20)
    output = np.full((num_ranks, 300, 3), -1, np.float32)
    assert arriving.sum(1).max() <= 300
    return operand, output, *(array.astype(np.int32) for array in (starts, sizes, landings, arriving))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_ranks_of_two_processes(results, dtype):
    cases, received = results
    operand, output, *where, _ = (cases[f"flat {i}"] for i in range(6))
    got = np.stack([received[f"flat {dtype} {rank}"] for rank in range(4)])
    np.testing.assert_array_equal(got, reference(operand, output, *where))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_across_processes_side_by_side(results, dtype):
    """The devices of a process belong to two groups with different numbers of iterations."""
    cases, received = results
    for group in range(2):
        ranks = slice(group, None, 2)
        operand, output, *where, _ = (cases[f"pairs {i}"][ranks] for i in range(6))
        got = np.stack([received[f"pairs {dtype} {rank}"] for rank in range(4)][ranks])
        np.testing.assert_array_equal(got, reference(operand, output, *where))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gather_between_two_processes_equals_that_of_xla(results, dtype):
    """Values are bitwise equal; two gradients have one sum."""
    for process in range(2):
        values, gradients, num_permutes = results[1][f"gather {dtype} {process}"]
        assert values
        assert gradients
        assert num_permutes == 4  # a cycle and a hop, forward and backward


def test_a_layer_across_processes_whose_groups_need_different_rounds(results):
    mesh = make_mesh((2, 2), ("expert", "data"))
    want = layer_step(mesh, lambda spec, array: jax.device_put(array, NamedSharding(mesh, spec)))
    assert want[0][1].tolist() == [2, 1]
    names = ("y", "rounds", *(f"gradient {i}" for i in range(4)))
    for process in range(2):
        got = [results[1][f"layer {name} {process}"] for name in names]
        assert got[1].tolist() == [2, 2]
        for ours, theirs in zip(got[:1] + got[2:], [want[0][0], *jax.tree.leaves(want[1])], strict=True):
            assert_close(ours, np.asarray(theirs), 1e-6)


def test_a_process_copies_weights_between_its_own_ranks(results):
    """Each process has one of two domains, and peer copies stay within a process."""
    mesh = make_mesh((4,), ("expert",))
    want, _ = domains_step(mesh, lambda spec, array: jax.device_put(array, NamedSharding(mesh, spec)), Gather())
    names = ("y", "rounds", *(f"gradient {i}" for i in range(4)))
    for process in range(2):
        assert results[1][f"domains copies {process}"]
        got = [results[1][f"domains {name} {process}"] for name in names]
        for ours, theirs in zip(got, jax.tree.leaves(want), strict=True):
            assert_close(ours, np.asarray(theirs), 1e-6)

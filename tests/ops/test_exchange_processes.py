"""The exchange between processes: two of them on this machine, with two devices each, over TCP."""

import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.ops.test_ragged_all_to_all import draw_case, reference

RANK = textwrap.dedent(
    """
    import faulthandler, os, socket, sys
    import jax
    import jax.numpy as jnp
    import numpy as np

    case_file, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    faulthandler.dump_traceback_later(60, exit=True)
    from jax_moe_lb import use_virtual_cpu_devices

    jax.config.update("jax_platforms", "cpu")
    use_virtual_cpu_devices(2)
    # gloo takes the address that the host name stands for; on a bare machine that may be none.
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        from jax._src.lib import _jax
        make = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = lambda *args, **kwargs: make(*args, **{**kwargs, "hostname": "127.0.0.1"})
    jax.distributed.initialize(
        address, 2, process, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5, initialization_timeout=30
    )
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all

    def place(mesh, spec, array):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def run(axes, mesh_shape, names, case):
        mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
        spec = PartitionSpec(names)

        def one_rank(*args):
            args = [arg[0] for arg in args]
            # Groups side by side may loop differently often.
            own = 1 if names == axes else 1 + 2 * jax.lax.axis_index("data")
            body = lambda _, output: ragged_all_to_all(args[0], output, *args[2:], axis_name=axes)
            return jax.lax.fori_loop(0, own, body, args[1])[None]

        step = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))
        out = step(*(place(mesh, spec, array) for array in case))
        for shard in out.addressable_shards:
            yield shard.index[0].start or 0, np.asarray(shard.data)[0]

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
        np.savez(case_file.replace("cases", f"results{process}"), **results)
        jax.distributed.shutdown()
    except BaseException:
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    """
)
"""What each process runs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """`(cases, what the ranks of both processes received)`."""
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
    """Small integers, which bfloat16 holds exactly."""
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
def test_groups_across_processes_that_loop_differently_often(results, dtype):
    """The devices of a process belong to two groups."""
    cases, received = results
    for group in range(2):
        ranks = slice(group, None, 2)
        operand, output, *where, _ = (cases[f"pairs {i}"][ranks] for i in range(6))
        got = np.stack([received[f"pairs {dtype} {rank}"] for rank in range(4)][ranks])
        np.testing.assert_array_equal(got, reference(operand, output, *where))

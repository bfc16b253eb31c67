"""One of several processes that copy expert weights from each other; `processes.py` starts them.

No collective of XLA takes part on GPUs, as NCCL refuses two processes on one GPU: each process reads the memory of the
others, and compares its own slots with the weights, which all of them know.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_moe_lb.collectives.local_processes import can_copy
from jax_moe_lb.collectives.peer_copy import Route, after_start, join, start

HOME, SLOTS = 3, 2


def place(mesh: Mesh, spec: PartitionSpec, array: np.ndarray) -> jax.Array:
    """Return an array on all processes, of which this one makes its own part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def weights_of(number: int, width: int) -> np.ndarray:
    """Return the weights of all ranks, equal on all processes."""
    return np.random.default_rng(0).normal(size=(number * HOME, width, width)).astype(np.float32)


def wanted_of(rng: np.random.Generator, number: int) -> np.ndarray:
    """Return experts of other ranks for all slots, as in a legal plan, and some empty slots."""
    others = rng.integers(HOME, number * HOME, (number, SLOTS))
    wanted = (others + HOME * np.arange(number)[:, None]) % (number * HOME)
    return np.where(rng.random(wanted.shape) < 0.2, -1, wanted).astype(np.int32)


def run(number: int, process: int, width: int, calls: int, timeout_s: float, copied: Path | None) -> str:
    """Copy in all processes, and compare; return the numbers. Write a file of this process after the first copy."""
    mesh = Mesh(np.array(jax.devices()), ("expert",), axis_types=(AxisType.Auto,))
    processes, on_gpus = tuple(range(number)), jax.default_backend() == "gpu"
    if on_gpus and not can_copy(processes, number):
        raise SystemExit("the processes cannot copy from each other; the warning has the reason")
    route = Route(("expert",), timeout_s=timeout_s, processes=processes if on_gpus else ())
    spec, everywhere = PartitionSpec("expert"), PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, everywhere, spec), out_specs=(spec, spec))
    def copies(home: jax.Array, wanted: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, pending = after_start(start(home, wanted, route=route), x)
        y = x @ x
        return y, join(pending, after=y)

    weights = weights_of(number, width)
    home, x = place(mesh, spec, weights), place(mesh, spec, np.tile(np.eye(256, dtype=np.float32), (number, 1)))
    rng, program, seconds = np.random.default_rng(1), jax.jit(copies), []
    for _ in range(calls):
        wanted = wanted_of(rng, number)
        begin = time.perf_counter()
        slots = program(home, place(mesh, everywhere, wanted), x)[1].addressable_shards[0].data
        mine = np.asarray(slots)
        seconds.append(time.perf_counter() - begin)
        flat = wanted[process]
        np.testing.assert_array_equal(mine, np.where((flat >= 0)[:, None, None], weights[np.maximum(flat, 0)], 0))
        if copied is not None:
            copied.joinpath(str(process)).touch()
    text = str(program.lower(home, place(mesh, everywhere, wanted), x).as_text())
    how = "copy engines" if "moe_lb_copy_start" in text else "collectives of XLA"
    return f"{calls} calls by {how}, median {np.median(seconds) * 1e3:.2f} ms"


def main() -> None:
    """Join the other processes, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("number", "process", "port", "width", "calls", "timeout-s"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--copied", type=Path, metavar="FOLDER", help="folder for files of processes that copied")
    parser.add_argument("--platform", choices=("cpu", "cuda"), required=True)
    given = parser.parse_args()
    jax.config.update("jax_platforms", given.platform)
    if given.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
    address = f"127.0.0.1:{given.port}"
    # All processes share the first GPU.
    jax.distributed.initialize(address, given.number, given.process, local_device_ids=[0])
    try:
        print(run(given.number, given.process, given.width, given.calls, given.timeout_s, given.copied), flush=True)
    except jax.errors.JaxRuntimeError as error:
        print(error, flush=True)
        # An exit would wait minutes for the other processes, of which one may have ended.
        os._exit(1)


if __name__ == "__main__":
    main()

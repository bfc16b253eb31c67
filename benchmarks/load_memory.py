"""Load a checkpoint in one of several processes, and print its host memory: `python -m benchmarks.load_memory FOLDER`.

Further arguments are a port of this machine, the number of processes, the index of this one, and the number of
loadings, of which the last is measured. Prints a line of JSON: `peak`, bytes of host memory above those before loading;
`parameters`, bytes of this process's shards, which the host also holds, as its devices are CPUs; `seconds`.
"""

import json
import os
import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jax
from flax import nnx

from jax_moe_lb import System
from models.architectures.config_json import read_fields
from models.architectures.registry import configured
from models.config import OptimizerConfig, ParallelConfig, TrainConfig
from models.mesh import make_mesh, offer_cpu_devices
from models.pretrained.loading import load_state
from models.training.step import make_programs

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_DEVICES = 4


def resident_bytes() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def watched(load: Any) -> tuple[Any, int, float]:
    """Call a function; return its result, the peak of added host memory in bytes, and seconds."""
    before, peak, done = resident_bytes(), 0, Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(0.001)

    thread, start_s = Thread(target=watch), time.monotonic()
    thread.start()
    result = jax.block_until_ready(load())
    done.set()
    thread.join()
    return result, peak - before, time.monotonic() - start_s


def main(folder: Path, port: int = 0, num_processes: int = 1, index: int = 0, loads: int = 1) -> None:
    """Load the checkpoint and print the measurement."""
    offer_cpu_devices(NUM_DEVICES // num_processes)
    if num_processes > 1:
        # Loading has no collective.
        jax.config.update("jax_cpu_collectives_implementation", None)
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, index)
    config = configured(read_fields(folder), param_dtype="bfloat16")
    train = TrainConfig(parallel=ParallelConfig(1, NUM_DEVICES), optimizer=OptimizerConfig(name="sgd"))
    mesh = make_mesh(train.parallel)
    programs = make_programs(train, mesh, System(), config)
    shapes = nnx.state(programs.model(programs.state_shapes))
    places = programs.model(programs.state_shapes).places

    def load() -> Any:
        return load_state(folder, config, lambda: programs.init()[0], shapes, mesh, stacks=places)

    # All but the last compile in advance.
    for _ in range(loads - 1):
        jax.block_until_ready(load())
    state, peak, seconds = watched(load)
    shards = [shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    print(json.dumps({"peak": peak, "parameters": sum(shards), "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

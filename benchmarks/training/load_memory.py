"""Load a checkpoint in one of several processes and save it: `python -m benchmarks.training.load_memory FOLDER`.

Further arguments are a port of this machine, the number of processes, the index of this one, and the number of
repetitions, of which the last is measured. The copy is written to `saved` in the folder. Prints a line of JSON:
`load_bytes` and `save_bytes`, peaks of host memory above that before; `parameters`, bytes of this process's shards,
which the host also holds, as its devices are CPUs.
"""

import ctypes
import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.training.local_gloo import bind_gloo
from jax_moe_lb import System
from models.architectures.config_json import read_fields
from models.architectures.registry import configured
from models.config import OptimizerConfig, ParallelConfig, TrainConfig
from models.mesh import make_mesh, offer_cpu_devices
from models.pretrained.loading import load_state
from models.pretrained.saving import save_pretrained
from models.training.step import make_programs

NUM_DEVICES = 4


def status_bytes(name: str) -> int:
    """Return a number of bytes of this process, such as `VmRSS`, those in memory, or `VmHWM`, their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def watched(call: Any) -> tuple[Any, int]:
    """Call a function; return its result, and the peak of added host memory in bytes."""
    gc.collect()
    # Memory freed before the call would hide as much of its peak if the allocator still held it.
    ctypes.CDLL(None).malloc_trim(0)
    # This resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    result = jax.block_until_ready(call())
    return result, status_bytes("VmHWM") - before


def main(folder: Path, port: int = 0, num_processes: int = 1, index: int = 0, repetitions: int = 1) -> None:
    offer_cpu_devices(NUM_DEVICES // num_processes)
    if num_processes > 1:
        bind_gloo()
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, index)
    config = configured(read_fields(folder), param_dtype="bfloat16")
    train = TrainConfig(parallel=ParallelConfig(1, NUM_DEVICES), optimizer=OptimizerConfig(name="sgd"))
    mesh = make_mesh(train.parallel)
    programs = make_programs(train, mesh, System(), config)
    model = programs.model(programs.state_shapes)
    graph, shapes = nnx.split(model)

    def load() -> Any:
        return load_state(folder, config, lambda: programs.init()[0], shapes, mesh, stacks=model.places)

    def save() -> None:
        save_pretrained(nnx.merge(graph, state), folder / "saved")

    # All but the last compile in advance.
    for _ in range(repetitions):
        state = None
        state, load_bytes = watched(load)
        if index == 0:
            shutil.rmtree(folder / "saved", ignore_errors=True)
        _, save_bytes = watched(save)
    shards = [shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    print(json.dumps({"load_bytes": load_bytes, "save_bytes": save_bytes, "parameters": sum(shards)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

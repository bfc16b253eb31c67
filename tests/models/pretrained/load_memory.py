"""Load a checkpoint and print host memory in bytes: `python -m tests.models.pretrained.load_memory FOLDER`.

On CPU devices host memory also contains the parameters, whose bytes are printed, too.
"""

import json
import os
import sys
import time
from pathlib import Path
from threading import Event, Thread

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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main(folder: Path) -> None:
    offer_cpu_devices(4)
    config = configured(read_fields(folder))
    train = TrainConfig(parallel=ParallelConfig(1, 4), optimizer=OptimizerConfig(name="sgd"))
    mesh = make_mesh(train.parallel)
    programs = make_programs(train, mesh, System(), config)
    shapes = nnx.state(programs.model(programs.state_shapes))

    def load():
        places = programs.model(programs.state_shapes).places
        return load_state(folder, config, lambda: programs.init()[0], shapes, mesh, stacks=places)

    # Compile in advance.
    jax.block_until_ready(load())
    before, peak, done = resident_bytes(), 0, Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(0.001)

    thread = Thread(target=watch)
    thread.start()
    state = jax.block_until_ready(load())
    done.set()
    thread.join()
    leaves = jax.tree.leaves(state)
    print(json.dumps({"peak": peak - before, "parameters": sum(leaf.nbytes for leaf in leaves)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

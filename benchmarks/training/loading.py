"""Host memory of loading and saving a generated checkpoint, in one process and in several.

The checkpoint has layers of Mixtral-8x7B in bfloat16, 2.9 GB each, and its embeddings. It is written to a temporary
folder and read from there, from the page cache as far as it fits. Four CPU devices are divided among the processes.
Their memory is host memory, so a process holds its shards, too. Peaks are above these shards. They include the memory
of JAX and its compiler.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.render.results import Table, Value
from benchmarks.training.local_gloo import free_port
from models.architectures.config_json import Fields
from models.architectures.published import PUBLISHED
from models.architectures.registry import configured, pieces_of
from models.pretrained.saving import write_tensors

PROCESSES = (1, 2)


def write_checkpoint(folder: Path, text: str) -> dict[str, int]:
    """Write a checkpoint for a `config.json`, of periodic values; return the bytes of its tensors."""
    pieces = pieces_of(configured(Fields(text)))
    shapes = {piece.name: jax.ShapeDtypeStruct(piece.shape, jnp.bfloat16) for piece in pieces}
    (folder / "config.json").write_text(text)
    # The period divides no width, so neighboring rows differ.
    periods = (np.arange(i, i + 251).astype(jnp.bfloat16) for i in range(len(shapes)))
    write_tensors(folder, shapes, (np.resize(next(periods), shape.shape) for shape in shapes.values()))
    return {name: 2 * math.prod(shape.shape) for name, shape in shapes.items()}


def load_in(folder: Path, num_processes: int, repetitions: int = 1) -> list[dict[str, float]]:
    """Return the measurements of all processes, see `benchmarks.training.load_memory`."""
    # gRPC would use proxies for 127.0.0.1.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    module, numbers = "benchmarks.training.load_memory", [free_port(), num_processes]
    command = [sys.executable, "-m", module, str(folder), *map(str, numbers)]
    options: dict[str, Any] = {"env": environment | {"JAX_PLATFORMS": "cpu"}, "stdout": subprocess.PIPE, "text": True}
    commands = [[*command, str(i), str(repetitions)] for i in range(num_processes)]
    processes: list[Any] = [subprocess.Popen(one, **options) for one in commands]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=2)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    rows: list[list[Value]] = []
    with tempfile.TemporaryDirectory() as temporary:
        fields = PUBLISHED["Mixtral-8x7B"] | {"num_hidden_layers": given.layers}
        sizes = write_checkpoint(Path(temporary), json.dumps(fields))
        for num_processes in PROCESSES:
            found = load_in(Path(temporary), num_processes)
            shards = max(one["parameters"] for one in found)
            load_bytes = max(one["load_bytes"] - one["parameters"] for one in found)
            save_bytes = max(one["save_bytes"] for one in found)
            in_bytes = (sum(sizes.values()), max(sizes.values()), shards, load_bytes, save_bytes)
            rows.append([num_processes, *(1e-9 * number for number in in_bytes)])
            print(rows[-1], flush=True)
    names = ("checkpoint", "largest tensor", "shards", "load", "save")
    columns = {"processes": ""} | {f"{name} GB": ".2f" for name in names}
    return {"mixtral": Table(columns, rows)}

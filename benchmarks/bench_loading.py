"""Host memory and duration of loading a generated checkpoint in one process and in several.

    python -m benchmarks.bench_loading [--layers 2] [--out benchmarks/results/bench_loading.json]

The checkpoint has layers of Mixtral-8x7B in bfloat16, 2.9 GB each, and its embeddings. It is written to a temporary
folder and read from there, from the page cache as far as it fits. Four CPU devices are divided among the processes.
Their memory is host memory, so a process holds its shards, too. Its bound is these and two of the largest tensor,
beside the memory of JAX and its compiler.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.results import Table, Value, out_option, report
from models.architectures.config_json import Fields
from models.architectures.published import MIXTRAL_8X7B
from models.architectures.registry import configured, pieces_of
from models.pretrained.saving import write_tensors

PROCESSES = (1, 2)


def write_checkpoint(folder: Path, text: str) -> dict[str, int]:
    """Write a checkpoint for a `config.json`, each tensor of one value; return the bytes of its tensors."""
    shapes = {piece.name: piece.shape for piece in pieces_of(configured(Fields(text)))}
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    (folder / "config.json").write_text(text)
    write_tensors(folder, sizes, (np.full(shape, i, ml_dtypes.bfloat16) for i, shape in enumerate(shapes.values())))
    return sizes


def load_in(folder: Path, num_processes: int, loads: int = 1) -> list[dict[str, float]]:
    """Return the measurements of all processes, see `benchmarks.load_memory`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # gRPC would use proxies for 127.0.0.1.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [sys.executable, "-m", "benchmarks.load_memory", str(folder), str(port), str(num_processes)]
    options: dict[str, Any] = {"env": environment | {"JAX_PLATFORMS": "cpu"}, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = [subprocess.Popen([*command, str(i), str(loads)], **options) for i in range(num_processes)]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    out_option(parser)
    given = parser.parse_args()
    rows: list[list[Value]] = []
    with tempfile.TemporaryDirectory() as temporary:
        fields = MIXTRAL_8X7B | {"num_hidden_layers": given.layers}
        sizes = write_checkpoint(Path(temporary), json.dumps(fields))
        for num_processes in PROCESSES:
            found = load_in(Path(temporary), num_processes)
            most = max(found, key=lambda one: one["peak"])
            bound = most["parameters"] + 2 * max(sizes.values())
            gigabytes = [1e-9 * n for n in (sum(sizes.values()), most["parameters"], most["peak"], bound)]
            rows.append([num_processes, *gigabytes, max(one["seconds"] for one in found)])
            print(rows[-1], flush=True)
    columns = {"processes": "", "checkpoint GB": ".2f", "shards GB": ".2f", "peak GB": ".2f", "bound GB": ".2f"}
    report({"mixtral": Table(columns | {"seconds": ".0f"}, rows)}, given.out)


if __name__ == "__main__":
    main()

"""Time of calls of one `Generator`: the first compiles, the following ones decode.

A random tiny Qwen3-MoE on four CPU devices continues prompts in one process. The decoding time is the number of new
tokens x the mean time of the decoding steps after the first two tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb import exact, use_virtual_cpu_devices
from models.config import ParallelConfig
from models.mesh import make_mesh
from models.pretrained.generation import Generator
from models.pretrained.loading import from_pretrained
from models.tiny_checkpoint import write_tiny

CALLS = (("first", [9, 12]), ("second", [9, 12]), ("other lengths", [16, 10, 11]))
"""Lengths of the prompts of each call, all in one bucket."""


def call(generate: Generator, lengths: list[int], tokens: int) -> list[Value]:
    """Return the seconds of a call and of its decoding, and their ratio."""
    prompts, at = [list(range(length)) for length in lengths], [time.perf_counter()]
    generate(prompts, tokens, show=lambda lines: at.append(time.perf_counter()))
    whole, decoding = at[-1] - at[0], tokens * float(np.mean(np.diff(at)[2:]))
    return [whole, decoding, whole / decoding]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=64)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(4)
    with tempfile.TemporaryDirectory() as temporary:
        write_tiny("qwen3_moe", Path(temporary) / "tiny")
        model = from_pretrained(Path(temporary) / "tiny", make_mesh(ParallelConfig(expert_parallel=4)), exact())
    generate = Generator(model)
    rows: list[list[Value]] = [[name, *call(generate, lengths, given.tokens)] for name, lengths in CALLS]
    columns = {"call": "", "call s": ".2f", "decoding s": ".2f", "call / decoding": ".2f"}
    return {"calls": Table(columns, rows)}

"""Programs compiled for the CPU, with the dumps used by reports."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.stages import Compiled

from jax_moe_lb.aot.hlo import Module, parse_module

SIZES = {"node": 2, "expert": 4}


@dataclass(frozen=True)
class Program:
    compiled: Compiled
    folder: Path

    @property
    def module(self) -> Module:
        return parse_module(self.compiled.as_text())

    def dump(self, name: str) -> str:
        (path,) = self.folder.glob(f"*{name}.txt")
        return path.read_text()


def compiled_here(folder: Path, function: Any, *args: Any) -> Program:
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    return Program(jax.jit(function).lower(*args).compile(options), folder)


def make_mesh() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(tuple(SIZES.values()))
    return Mesh(devices, tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def exchange_in_all_ways(x):
    """Sum, gather, exchange, shift, and multiply five times in a loop, on `[16, 16]` per device."""
    x = jax.lax.psum(x @ x, "expert")
    x = jax.lax.all_gather(x, "node")
    x = jax.lax.all_to_all(x, ("node", "expert"), 1, 1, tiled=True)
    x = jax.lax.ppermute(x, "expert", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry) @ carry, None), x, None, length=5)[0]


def exchanging_program(folder: Path) -> Program:
    mesh = make_mesh()
    spec = PartitionSpec(mesh.axis_names)
    run = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return compiled_here(folder, run(exchange_in_all_ways), jnp.zeros((128, 16)))

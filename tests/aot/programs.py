"""Programs compiled for the CPU, with the dumps used by reports."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.stages import Compiled

from jax_moe_lb.aot.hlo import Module, parse_module
from tests.layer_cases import make_mesh

SIZES = {"node": 2, "expert": 4}


HEADER = re.compile(r"^(?:ENTRY )?%[\w.]+ \((.*)\) -> .*\{$", re.M)
PARAMETER = re.compile(r"([\w.]+): (\([^()]*\)|\w+\[[\d,]*\])")


def module_of(text: str) -> Module:
    """Return the module of a text without the parameters of its computations, which their headers have."""

    def with_parameters(header: re.Match[str]) -> str:
        found = enumerate(PARAMETER.findall(header[1]))
        return "\n".join([header[0], *(f"  %{name} = {shape} parameter({at})" for at, (name, shape) in found)])

    return parse_module(HEADER.sub(with_parameters, text))


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


def thunk_names(names: dict[int, str]) -> str:
    """Return the metadata of thunks with these instructions, by number."""
    return "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
        for number, name in names.items()
    )


def exchange_in_all_ways(x):
    """Sum, gather, exchange, shift, and multiply five times in a loop, on `[16, 16]` per device."""
    x = jax.lax.psum(x @ x, "expert")
    x = jax.lax.all_gather(x, "node")
    x = jax.lax.all_to_all(x, ("node", "expert"), 1, 1, tiled=True)
    x = jax.lax.ppermute(x, "expert", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry) @ carry, None), x, None, length=5)[0]


def exchanging_program(folder: Path) -> Program:
    mesh = make_mesh(tuple(SIZES.values()), tuple(SIZES))
    spec = PartitionSpec(mesh.axis_names)
    run = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return compiled_here(folder, run(exchange_in_all_ways), jnp.zeros((128, 16)))

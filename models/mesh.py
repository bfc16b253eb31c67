"""Devices, mesh and load-balancing system of a run."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import System, Topology, use_virtual_cpu_devices
from jax_moe_lb.layer import systems
from jax_moe_lb.layer.system import OPTIONS, parse_system
from jax_moe_lb.nn.variables import BalancerState
from models.config import ParallelConfig

MESH_AXES = ("data", "expert")
STAGE = "stage"  # mesh axis of pipeline stages, outside the other axes; a mesh without a pipeline lacks it


def offer_cpu_devices(num_devices: int) -> None:
    """Make the CPU backend, if it is in use, provide `num_devices` devices; call this before any computation."""
    # An initialized backend cannot change its devices; `make_mesh` raises if there are too few.
    with contextlib.suppress(RuntimeError):
        use_virtual_cpu_devices(num_devices)


def make_mesh(parallel: ParallelConfig) -> Mesh:
    """Return the mesh `(data, expert)` of the first devices, or `(stage, data, expert)` with several stages."""
    devices = jax.devices()
    enough = len(devices) == parallel.num_shards if jax.process_count() > 1 else len(devices) >= parallel.num_shards
    if not enough:
        product = f"a product of {'at most ' * (jax.process_count() == 1)}{len(devices)}"
        raise ValueError(
            f"{parallel.axes} is {parallel.sizes}; expected {product}, the {devices[0].platform} devices here"
        )
    if jax.process_count() > 1 and devices[0].platform == "cpu":
        # XLA stores a program for CPUs without the order of collectives inside of a loop to those outside. Processes
        # that read it from the persistent cache run them in different orders, and wait for each other.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
    return mesh_from(devices[: parallel.num_shards], parallel)


def memory_bytes(mesh: Mesh) -> int:
    """Return the memory of all devices, of the host for CPUs, in bytes."""
    devices = mesh.local_devices
    if limit := (devices[0].memory_stats() or {}).get("bytes_limit"):
        return int(limit) * mesh.size
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * mesh.size // len(devices)


def mesh_from(devices: Sequence[Any], parallel: ParallelConfig) -> Mesh:
    """Return the mesh of all given devices, see `make_mesh`."""
    stages = {STAGE: parallel.stages} if parallel.stages > 1 else {}
    shape = stages | dict(zip(MESH_AXES, (parallel.data_parallel, parallel.expert_parallel), strict=True))
    grid = np.array(devices).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def all_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes that split a dimension over all devices, outermost first."""
    # `stage` is the innermost of them, so that an exchange along it alone removes it from the dimension.
    return tuple(sorted(mesh.axis_names, key=lambda axis: axis == STAGE))


def topology_of(mesh: Mesh, ranks_per_domain: int | None = None) -> Topology:
    """Return the topology of the expert layers on a mesh; each stage of a pipeline has ranks of its own."""
    data_axes = tuple(axis for axis in mesh.axis_names if axis not in ("expert", STAGE))
    return Topology.from_mesh(mesh, data_axes=data_axes, ranks_per_domain=ranks_per_domain)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: sequences split over all devices."""
    return NamedSharding(mesh, PartitionSpec(all_axes(mesh)))


def place_batch(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """Shard a batch held by every process by sequence over all devices."""
    return jax.make_array_from_callback(batch.shape, batch_sharding(mesh), lambda index: batch[index])


def state_shardings(state: nnx.State, mesh: Mesh) -> Any:
    """Return the shardings of the arrays, or shapes, of a state."""
    return jax.tree.map(
        lambda variable: _shardings(variable, mesh), state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def placed_shapes(shapes: nnx.State, shardings: Any) -> Any:
    """Return the shapes of a state with shardings, for lowering and restoring."""
    return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)


def _shardings(variable: nnx.Variable, mesh: Mesh) -> nnx.Variable:
    if isinstance(variable, BalancerState):
        # A balancer state may be any pytree, without Flax sharding metadata, so it is replicated.
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), variable)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(variable))


def make_system(parallel: ParallelConfig) -> System:
    """Return the system with the options of the run."""
    name, options = parse_system(parallel.system)
    given = {option: getattr(parallel, option) for option in OPTIONS}
    return systems.make_system(name, options | {option: value for option, value in given.items() if value is not None})

"""Checks of layers: outputs and gradients of every system equal those of a dense layer."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.stages import Compiled

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import TopK, Topology
from jax_moe_lb.aot import compiler_options
from jax_moe_lb.layer.systems import system_named, system_names
from tests.layer_cases import Case, assert_close, dense_with_gradients, sharded_moe, with_gradients

THREADS = 6
"""Systems whose layers compile at once, beginning with the one that is checked."""

DRY = {("exact", 1), ("feplb", None)}
"""Cases of a dry run: `Direct` on one device, and `TwoPhase` on several."""


def mesh_of(num_devices: int) -> tuple[Mesh, Topology]:
    """Return a mesh of the first devices as one expert-parallel group, and its topology."""
    devices = np.array(jax.devices()[:num_devices])
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    return mesh, Topology.from_mesh(mesh, rails_per_node=num_devices)


def layer_equals_dense(name: str, devices: int | None, scale: Scale) -> Finding:
    """Check one system on a number of devices, or on all of them if `None`."""
    if scale.dry and (name, devices) not in DRY:
        return Finding(None, "not in a dry run")
    number = devices or jax.device_count()
    if number < 2 and (devices is None or name == "rails"):
        return Finding(None, "one GPU; expected several")
    cases = [(Case(), "float32", 1e-4)]
    # Widths of the kernels for bfloat16.
    if not scale.dry:
        cases.append((Case(num_tokens=1024, features=240, mlp_dim=256), "bfloat16", 4e-2))
    names = list(system_names())
    for other in [name] if scale.dry else names[names.index(name) :][:THREADS]:
        for case, dtype, _ in cases:
            _compiling(other, number, case, dtype)
    for case, dtype, relative in cases:
        layer = _compiling(name, number, case, dtype).result()
        _compare(layer, number, case, dtype, relative, workloads=scale.of(len(WORKLOADS), 2))
    return Finding(True, f"{number} devices, {', '.join(dtype for _, dtype, _ in cases)}")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


@cache
def _compiling(name: str, num_devices: int, case: Case, dtype: str) -> Future[Compiled]:
    """Start to compile a layer with its gradients, once."""

    def compiled() -> Compiled:
        mesh, topology = mesh_of(num_devices)
        run = with_gradients(sharded_moe(mesh, topology, system_named(name)), checked=False)
        options = compiler_options(mesh) if jax.default_backend() == "gpu" else None
        # Products of float32 would have the precision of TF32.
        with jax.default_matmul_precision("highest"):
            return run.lower(*case.arguments(WORKLOADS[0], num_devices, dtype)).compile(options)

    return _threads().submit(compiled)


def _compare(layer: Compiled, num_devices: int, case: Case, dtype: str, relative: float, workloads: int) -> None:
    for workload in WORKLOADS[:workloads]:
        arguments = case.arguments(workload, num_devices, dtype)
        (y, stats), gradients = layer(*arguments)
        with jax.default_matmul_precision("highest"):
            (want, _), want_gradients = dense_with_gradients(TopK(2))(*arguments)
        assert_close((y, gradients), (want, want_gradients), relative)
        served: Any = int(stats.load_after.sum())
        assert served == 2 * int(arguments[1].sum()), f"{workload.name}: {served} copies served"

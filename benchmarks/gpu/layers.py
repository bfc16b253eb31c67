"""Checks of layers: outputs and gradients of every system equal those of a dense layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import TopK, Topology
from jax_moe_lb.aot import compiler_options
from jax_moe_lb.layer.systems import system_named
from tests.layer_cases import Case, assert_close, dense_with_gradients, sharded_moe, with_gradients

DRY = {("exact", 1), ("feplb", None)}
"""Cases of a dry run: `Direct` on one device, and `TwoPhase` on several."""


def mesh_of(num_devices: int) -> tuple[Mesh, Topology]:
    """Return a mesh of the first devices as one expert-parallel group, and its topology."""
    devices = np.array(jax.devices()[:num_devices])
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    return mesh, Topology.from_mesh(mesh, rails_per_node=num_devices)


def layer_equals_dense(name: str, devices: int | None) -> Check:
    """Return the check of one system on a number of devices, or on all of them if `None`."""

    def check(scale: Scale) -> Finding:
        if scale.dry and (name, devices) not in DRY:
            return Finding(None, "not in a dry run")
        number = devices or jax.device_count()
        if number < 2 and (devices is None or name == "rails"):
            return Finding(None, "one GPU; expected several")
        cases = [(Case(), "float32", 1e-4)]
        # Widths of the kernels for bfloat16.
        if not scale.dry:
            cases.append((Case(num_tokens=1024, features=240, mlp_dim=256), "bfloat16", 4e-2))
        for case, dtype, relative in cases:
            # Products of float32 would have the precision of TF32.
            with jax.default_matmul_precision("highest"):
                _compare(name, number, case, dtype, relative, workloads=scale.of(len(WORKLOADS), 2))
        return Finding(True, f"{number} devices, {', '.join(dtype for _, dtype, _ in cases)}")

    return check


def _compare(name: str, num_devices: int, case: Case, dtype: str, relative: float, workloads: int) -> None:
    mesh, topology = mesh_of(num_devices)
    kernel, experts = case.params(dtype)
    run = with_gradients(sharded_moe(mesh, topology, system_named(name)), checked=False)
    layer = jax.jit(run, compiler_options=compiler_options(mesh)) if jax.default_backend() == "gpu" else run
    for workload in WORKLOADS[:workloads]:
        x, mask = case.tokens(workload, num_devices, dtype)
        target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), "float32")
        (y, stats), gradients = layer(x, mask, kernel, experts, target)
        (want, _), want_gradients = dense_with_gradients(TopK(2))(x, mask, kernel, experts, target)
        assert_close((y, gradients), (want, want_gradients), relative)
        served: Any = int(stats.load_after.sum())
        assert served == 2 * int(mask.sum()), f"{workload.name}: {served} copies served"

"""Checks of the build: extension modules, driver and kernels load on this machine."""

import importlib
import os
import subprocess

import jax
import jax.numpy as jnp

from benchmarks.gpu.findings import Finding, Scale
from jax_moe_lb.cli.doctor import DRIVER_CHECKS, build_states, diagnosis
from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights
from jax_moe_lb.core.custom_calls import MODULES, is_built
from jax_moe_lb.planners.base import kernel_check


def custom_calls_load(scale: Scale) -> Finding:
    """Check that the CUDA module was built for this jaxlib and loads."""
    return Finding(is_built("cuda"), build_states()[MODULES["cuda"]])


def doctor_reports(scale: Scale) -> Finding:
    """Check that `jax-moe-lb doctor` runs and finds GPUs."""
    found = diagnosis()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return Finding(found["backend"] == "gpu", f"{', '.join(found['devices'])}; {versions}")


def driver_has_all(scale: Scale) -> Finding:
    """Check that the driver has batched copies, copies between processes, and peer access of all pairs."""
    if not is_built("cuda"):
        return Finding(None, "the CUDA module is not built")
    module = importlib.import_module(MODULES["cuda"])
    lacks = [reason for name in DRIVER_CHECKS if (reason := getattr(module, name)()) is not None]
    return Finding(not lacks, "; ".join(lacks) or "nothing is off")


def memory_is_shareable(scale: Scale) -> Finding:
    """Check that memory of XLA's default allocator can be mapped by other processes."""
    if not is_built("cuda"):
        return Finding(None, "the CUDA module is not built")
    array = jax.block_until_ready(jnp.zeros(1, jnp.int32))
    device = jax.local_devices()[0].local_hardware_id
    reason = importlib.import_module(MODULES["cuda"]).why_not_shareable(array.unsafe_buffer_pointer(), device)
    return Finding(reason is None, reason or "yes")


def kernels_are_built(scale: Scale) -> Finding:
    """Check that the module has kernels of planners, for 64 ranks and 256 experts."""
    fits = kernel_check("exact_kernel_fits")
    if fits is None:
        return Finding(is_built("cuda") and False, "built without nvcc, or not for CUDA")
    return Finding(fits(64, 256, 6, 64, 0.01, True), "64 ranks x 256 experts, 6 slots")


def one_context(scale: Scale) -> Finding:
    """Check that copies make no context on GPUs other than those of the process."""
    home = jnp.ones((4, 64, 64))
    wanted = jnp.asarray([[1], [2], [3], [0]], jnp.int32)
    jax.block_until_ready(jax.jit(lambda home: copy_expert_weights(home, wanted, route=Route(())))(home))
    used = {device.local_hardware_id for device in jax.local_devices()}
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        return Finding(None, f"nvidia-smi does not run: {error}")
    if len(gpus) == len(used):
        return Finding(None, f"{len(gpus)} GPUs, all of this process; expected others")
    own = [line for line in listed if line.endswith(f" {os.getpid()}")]
    if not own:
        return Finding(None, "nvidia-smi lists no processes; containers hide them")
    return Finding(len(own) == len(used), f"contexts on {len(own)} GPUs; expected {len(used)}")

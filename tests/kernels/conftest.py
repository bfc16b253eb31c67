"""Kernels of GPUs in interpreters; tests of kernels for Hopper need one of JAX 0.11 or later."""

from functools import partial
from types import SimpleNamespace

import pytest
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

from jax_moe_lb.kernels import backends

INTERPRETED = ["test_fused_ffn.py", "test_hopper_kernels.py"]

collect_ignore = [] if hasattr(mosaic_gpu, "force_gpu_interpret_mode") else INTERPRETED


@pytest.fixture
def triton_interpreted(monkeypatch):
    """Run Triton kernels in the Pallas interpreter, as on a GPU."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(backends, "get_default_device", lambda: SimpleNamespace(platform="gpu"))

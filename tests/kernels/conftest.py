"""Kernels in interpreters; tests of kernels for Hopper need JAX 0.11 or later, those for TPUs JAX 0.12."""

from functools import partial
from types import SimpleNamespace

import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.tpu_vectors import OLDEST_JAX
from jax_moe_lb.kernels import backends

HOPPER, TPU = ["test_fused_ffn.py", "test_hopper_kernels.py"], ["test_tpu_rows.py", "test_tpu_products.py"]

collect_ignore = [] if hasattr(mosaic_gpu, "force_gpu_interpret_mode") else HOPPER
collect_ignore += TPU if why_older_jax(OLDEST_JAX) else []


@pytest.fixture(autouse=True)
def packed_by_jax(monkeypatch):
    """Round and pack words without an operation that interpreters lack."""

    def packed(low, high):
        low, high = (lax.bitcast_convert_type(half.astype("bfloat16"), "uint16") for half in (low, high))
        return low.astype("uint32") | high.astype("uint32") << 16

    if not why_older_jax(OLDEST_JAX):
        for module in ("tpu_rows", "tpu_products"):
            monkeypatch.setattr(f"jax_moe_lb.kernels.{module}.packed", packed)


@pytest.fixture
def triton_interpreted(monkeypatch):
    """Run Triton kernels in the Pallas interpreter, as on a GPU."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(backends, "get_default_device", lambda: SimpleNamespace(platform="gpu"))

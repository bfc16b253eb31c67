"""Splash attention equals plain attention, in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.config import ParallelConfig
from models.decoder import fused_attention as splash
from models.decoder.attention import attend, has_splash_kernel
from models.decoder.config import Scores
from models.mesh import make_mesh

LENGTH = 256
DOCUMENTS = np.repeat([[0, 1, 2, 3], [0, 0, 0, 1]], LENGTH // 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "window", "has_sinks", "has_documents"),
    [
        ((64, 64), 100, True, True),
        pytest.param((192, 128), None, False, True, marks=pytest.mark.thorough),
        pytest.param((128, 128), None, False, False, marks=pytest.mark.thorough),
    ],
)
def test_splash_attention_equals_plain_attention(widths, window, has_sinks, has_documents, monkeypatch):
    """Values and gradients of two sequences on two devices, in blocks of 128."""
    monkeypatch.setattr(splash, "BLOCKS", (128,))
    mesh = make_mesh(ParallelConfig(1, 2))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, upstream = (
        jax.random.normal(key, (2, LENGTH, heads, width))
        for key, heads, width in zip(keys, (4, 2, 2, 4), (widths[0], *widths, widths[1]), strict=True)
    )
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    segments = jnp.asarray(DOCUMENTS, jnp.int32) if has_documents else None
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], (2, LENGTH))
    scores = Scores(0.1, window)

    def ours(q, k, v, sinks):
        return splash.splash_attention(q, k, v, mesh, scores, sinks, segments, interpret=True)

    def plain(q, k, v, sinks):
        return attend(q, k, v, positions, scores, sinks, segments, whole=True)

    def with_gradients(function, *arrays):
        out, transposed = jax.vjp(function, *arrays)
        return out, transposed(upstream)

    split = jax.device_put((q, k, v), NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    got = jax.jit(partial(with_gradients, ours))(*split, sinks)
    want = jax.jit(partial(with_gradients, plain))(q, k, v, sinks)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), got, want)


@pytest.mark.parametrize(
    ("kind", "shape", "width", "dtype", "has_kernel"),
    [
        ("TPU v5 lite", (4, 256), 128, jnp.bfloat16, True),
        ("TPU v5 lite", (3, 256), 128, jnp.bfloat16, False),
        ("TPU v5 lite", (4, 200), 128, jnp.bfloat16, False),
        ("TPU v5 lite", (4, 256), 80, jnp.bfloat16, False),
        ("TPU v5 lite", (4, 256), 128, jnp.float32, False),
        ("NVIDIA H100 80GB HBM3", (4, 256), 128, jnp.bfloat16, False),
    ],
)
def test_whole_sequences_on_tpus_have_the_kernel(kind, shape, width, dtype, has_kernel):
    device = type("Device", (), {"device_kind": kind})()
    mesh = type("Mesh", (), {"devices": np.array([[device]] * 2), "size": 2})()
    q = jax.ShapeDtypeStruct((*shape, 2, width), dtype)
    assert has_splash_kernel(mesh, q, q) == has_kernel

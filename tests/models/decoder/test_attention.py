"""Blockwise attention equals full attention."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import preset
from models.decoder import attention as scores
from models.decoder.attention import attention_in_blocks, has_cudnn_kernel
from models.decoder.tiny import rope
from models.mesh import batch_sharding, make_mesh, make_system
from models.training.step import make_programs


def inputs(length, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, length, 2, 8), dtype) for key in keys]


def whole(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.slow
# Shorter than a block, whole blocks, a last block of one query.
@pytest.mark.parametrize("length", [3, 8, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
def test_blocks_equal_the_whole(length, dtype, tolerance):
    def with_gradients(attention, arrays):
        out, transposed = jax.vjp(attention, *arrays[:3])
        return out, *transposed(arrays[3])

    narrow = inputs(length, dtype)
    got = jax.jit(partial(with_gradients, partial(attention_in_blocks, block=4)))(narrow)
    # The reference is float32, from which bfloat16 differs by rounding.
    want = jax.jit(partial(with_gradients, whole))([part.astype(jnp.float32) for part in narrow])
    for ours, expected in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), expected, atol=tolerance, rtol=tolerance)


def test_blocks_keep_no_scores():
    """The residuals are queries, keys and values, which are inputs."""
    q, k, v, _ = inputs(64, jnp.float32)
    transposed = jax.eval_shape(lambda *qkv: jax.vjp(partial(attention_in_blocks, block=16), *qkv)[1], q, k, v)
    assert {leaf.shape for leaf in jax.tree.leaves(transposed) if leaf.ndim > 1} == {q.shape}


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.thorough), 3])
def test_blocks_with_sinks_equal_the_whole(window, monkeypatch):
    """A block of queries reads the keys up to its end; query and key positions coincide."""
    q, k, v, upstream = inputs(9, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(9)[None], q.shape[:2])
    sinks, width = jnp.asarray([0.5, -1.0]), None if window is None else jnp.int32(window)

    def with_gradients(whole):
        def call(q, k, v, sinks):
            return scores.attend(q, k, v, positions, scale=0.3, window=width, sinks=sinks, whole=whole)

        out, transposed = jax.vjp(call, q, k, v, sinks)
        return out, *transposed(upstream)

    want = jax.jit(partial(with_gradients, False))()
    monkeypatch.setattr(scores, "QUERY_BLOCK", 4)
    for whole in (False, True):
        for ours, expected in zip(jax.jit(partial(with_gradients, whole))(), want, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_positions_are_exact_in_narrow_arithmetic():
    x = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    got, want = rope(x), rope(x.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "has_kernel"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 128, True),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 128, False),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 256, False),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 4, False),
        ("AMD Instinct MI300X", jnp.bfloat16, 128, False),
        ("TPU v5 lite", jnp.bfloat16, 128, False),
    ],
)
def test_the_devices_of_the_mesh_choose_the_kernel(kind, dtype, head_dim, has_kernel):
    device = type("Device", (), {"device_kind": kind})()
    mesh = type("Mesh", (), {"devices": np.array([[device]])})()
    assert has_cudnn_kernel(mesh, jax.ShapeDtypeStruct((1, 16, 2, head_dim), dtype)) == has_kernel


@pytest.mark.slow
@pytest.mark.thorough
def test_no_array_of_the_reference_has_all_pairs_of_tokens():
    config = preset("reference")
    mesh = make_mesh(config.parallel)
    programs = make_programs(config, mesh, make_system(dataclasses.replace(config.parallel, system="plain")))
    shape = (config.batch.size, config.batch.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    program = str(programs.step.trace(programs.state_shapes, tokens).jaxpr)
    length = config.batch.sequence_length
    assert re.search(rf"bf16\[8,{length},2048\]", program)
    assert re.search(rf"f32\[8,16,512,{length}\]", program)
    assert not re.search(rf"\[[0-9,]*\b{length},{length}\]", program)

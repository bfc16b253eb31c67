"""Blockwise attention and kernels equal full attention; splash attention runs in interpret mode."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models.config import PRESETS, ParallelConfig
from models.decoder import attention as scores
from models.decoder import fused_attention as fused
from models.decoder.attention import Index, _on_each_device, attend, has_cudnn_kernel, has_splash_kernel
from models.decoder.config import Scores
from models.decoder.layers import period_of
from models.decoder.rope import Rope
from models.mesh import batch_sharding, make_mesh
from tests.models.small import programs_of


def inputs(length, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, length, 2, 8), dtype) for key in keys]


def with_gradients(attention, arrays, upstream):
    """Return the outputs, and the gradients of all arrays, compiled."""

    @jax.jit
    def run(arrays, upstream):
        out, transposed = jax.vjp(attention, *arrays)
        return out, *transposed(upstream)

    return run(arrays, upstream)


def assert_close(got, want, tolerance=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance), got, want)


def in_blocks(q, k, v):
    return attend(q, k, v, jnp.arange(q.shape[1])[None], Scores(q.shape[-1] ** -0.5), whole=True)


@pytest.mark.slow
# Shorter than a block, whole blocks, a last block of one query.
@pytest.mark.parametrize(
    ("length", "dtype", "tolerance"),
    [
        (3, jnp.bfloat16, 2e-2),
        *((length, jnp.float32, 1e-6) for length in (3, 8, 9)),
        *(pytest.param(length, jnp.bfloat16, 2e-2, marks=pytest.mark.thorough) for length in (8, 9)),
    ],
)
def test_blocks_equal_the_whole(length, dtype, tolerance, monkeypatch):
    *narrow, upstream = inputs(length, dtype)
    monkeypatch.setattr(scores, "QUERY_BLOCK", 4)
    got = with_gradients(in_blocks, narrow, upstream)
    assert {ours.dtype for ours in got} == {jnp.dtype(dtype)}
    # The reference is float32, from which bfloat16 differs by rounding.
    got, wide, upstream = jax.tree.map(lambda part: part.astype(jnp.float32), (got, narrow, upstream))
    whole = partial(jax.nn.dot_product_attention, is_causal=True)
    assert_close(got, with_gradients(whole, wide, upstream), tolerance)


def test_blocks_keep_no_scores(monkeypatch):
    """The residuals are queries, keys and values, which are inputs."""
    q, k, v, _ = inputs(64, jnp.float32)
    monkeypatch.setattr(scores, "QUERY_BLOCK", 16)
    transposed = jax.eval_shape(lambda *qkv: jax.vjp(in_blocks, *qkv)[1], q, k, v)
    assert {leaf.shape for leaf in jax.tree.leaves(transposed) if leaf.ndim > 2} == {q.shape}


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.thorough), 3])
def test_blocks_with_sinks_equal_the_whole(window, monkeypatch):
    """A block of queries reads the keys up to its end; query and key positions coincide."""
    q, k, v, upstream = inputs(9, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(9)[None], q.shape[:2])
    arrays = q, k, v, jnp.asarray([0.5, -1.0])

    def call(q, k, v, sinks, whole=False):
        return attend(q, k, v, positions, Scores(0.3, window), sinks, whole=whole)

    want = with_gradients(call, arrays, upstream)
    monkeypatch.setattr(scores, "QUERY_BLOCK", 4)
    for whole in (False, True):
        assert_close(with_gradients(partial(call, whole=whole), arrays, upstream), want)


@pytest.mark.slow
def test_an_indexer_chooses_the_keys_of_each_query(monkeypatch):
    """In blocks of whole sequences and with a cache, against a loop over queries."""
    q, k, v, _ = inputs(9, jnp.float32)
    rng, positions = np.random.default_rng(0), jnp.broadcast_to(jnp.arange(9)[None], (2, 9))
    index = Index(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 9, 6, 5), (2, 9, 5), (2, 9, 6))))
    segments = np.array([[0] * 4 + [1] * 5, [0] * 9])
    sums = np.einsum("btns,btn->bts", np.maximum(np.einsum("btnc,bsc->btns", index.q, index.k), 0), index.weights)
    for given in (None, jnp.asarray(segments)):
        want = np.zeros(q.shape, np.float32)
        for line, query in np.ndindex(2, 9):
            keys = [s for s in range(query + 1) if given is None or segments[line, s] == segments[line, query]]
            keys = sorted(keys, key=lambda s: -sums[line, query, s])[:3]
            logits = np.einsum("nc,snc->ns", q[line, query], k[line, keys]) * 0.3
            want[line, query] = np.einsum("ns,snc->nc", jax.nn.softmax(logits), v[line, keys])
        for block, whole in ((16, False), (4, False), (4, True)):
            monkeypatch.setattr(scores, "QUERY_BLOCK", block)
            got = attend(q, k, v, positions, Scores(0.3, num_keys=3), None, given, index=index, whole=whole)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_positions_are_exact_in_narrow_arithmetic():
    x = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    positions = jnp.arange(1024)[None]
    got, want = (Rope(8)(array, positions) for array in (x, x.astype(jnp.float32)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def mesh_of(kind, size):
    """Return a mesh of absent devices."""
    capability = "9.0" if "H100" in kind else "8.0"
    device = SimpleNamespace(device_kind=kind, compute_capability=capability)
    return SimpleNamespace(devices=np.array([[device]] * size), size=size)


@pytest.mark.parametrize(
    ("kind", "dtype", "widths", "has_kernel"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, (128, 128), True),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, (192, 128), True),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, (128, 128), True),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, (192, 128), False),
        ("NVIDIA H100 80GB HBM3", jnp.float32, (128, 128), False),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, (256, 256), False),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, (4, 4), False),
        ("AMD Instinct MI300X", jnp.bfloat16, (128, 128), False),
        ("TPU v5 lite", jnp.bfloat16, (128, 128), False),
    ],
)
def test_the_devices_of_the_mesh_choose_the_kernel(kind, dtype, widths, has_kernel):
    q, v = (jax.ShapeDtypeStruct((1, 16, 2, width), dtype) for width in widths)
    assert has_cudnn_kernel(mesh_of(kind, 1), q, v) == has_kernel


def scores_of(q, k, segments, how):
    """Return masked scores `[B, N, T, S]`, as cuDNN's kernel computes them."""
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    query, key = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = ((key <= query) & (key > query - (how.window or q.shape[1])))[None, None]
    if segments is not None:
        # The kernel adds the bias to the scores.
        outside = fused._other_operands(q.astype(jnp.bfloat16), segments)[0] < -1e9
        seen = seen & ~outside
    return jnp.where(seen, jnp.einsum("btnc,bsnc->bnts", q, keys) * how.scale, -jnp.inf)


def cudnn_forward(q, k, v, segments, how):
    """Write out cuDNN's forward primitive."""
    scores = scores_of(q, k, segments, how)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, -1), values), jax.nn.logsumexp(scores, -1)


def cudnn_backward(q, k, v, segments, total, out, upstream, how):
    """Write out cuDNN's backward primitive, which takes the statistics and outputs as given."""
    groups = q.shape[2] // k.shape[2]
    keys, values = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    shares = jnp.exp(scores_of(q, k, segments, how) - total[..., None])
    product = jnp.einsum("btnv,btnv->bnt", upstream, out)
    inner = shares * (jnp.einsum("btnv,bsnv->bnts", upstream, values) - product[..., None]) * how.scale
    summed = [jnp.einsum("bnts,btnc->bsnc", *pair) for pair in ((inner, q), (shares, upstream))]
    dk, dv = (part.reshape(*part.shape[:2], k.shape[2], groups, -1).sum(3) for part in summed)
    return jnp.einsum("bnts,bsnc->btnc", inner, keys), dk, dv


@pytest.mark.slow
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("window", "segments"), [(None, None), (3, None), (4, [[0, 0, 0, 1, 1, 1, 1, 1, 2], [0] * 9])])
def test_cudnn_attention_equals_plain_attention(has_sinks, window, segments, monkeypatch):
    """Values and gradients of latent widths, groups, windows, sinks and documents, with the primitives written out."""
    monkeypatch.setattr(fused, "forward", cudnn_forward)
    monkeypatch.setattr(fused, "backward", cudnn_backward)
    shapes = ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6), (2, 9, 4, 6))
    q, k, v, upstream = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    positions = jnp.broadcast_to(jnp.arange(9)[None], (2, 9))
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)

    def by_kernel(q, k, v, sinks):
        return fused.cudnn_attention(Scores(0.3, window), q, k, v, sinks, segments)

    def plain(q, k, v, sinks):
        return attend(q, k, v, positions, Scores(0.3, window), sinks, segments, whole=True)

    arrays = q, k, v, sinks
    assert_close(*(with_gradients(function, arrays, upstream) for function in (by_kernel, plain)))


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
    monkeypatch.setattr(fused, "BLOCKS", (128,))
    mesh, keys = make_mesh(ParallelConfig(1, 2)), jax.random.split(jax.random.key(0), 4)
    sizes = ((4, widths[0]), (2, widths[0]), (2, widths[1]), (4, widths[1]))
    *arrays, upstream = (jax.random.normal(key, (2, LENGTH, *size)) for key, size in zip(keys, sizes, strict=True))
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    segments = jnp.asarray(DOCUMENTS, jnp.int32) if has_documents else None
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], (2, LENGTH))

    def ours(q, k, v, sinks):
        return fused.splash_attention(q, k, v, mesh, Scores(0.1, window), sinks, segments, interpret=True)

    def plain(q, k, v, sinks):
        return attend(q, k, v, positions, Scores(0.1, window), sinks, segments, whole=True)

    split = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    want = with_gradients(plain, (*arrays, sinks), upstream)
    assert_close(with_gradients(ours, (*split, sinks), upstream), want, 2e-5)


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
    q = jax.ShapeDtypeStruct((*shape, 2, width), dtype)
    assert has_splash_kernel(mesh_of(kind, 2), q, q) == has_kernel


@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("widths", [(192, 128), (64, 64)])
def test_cudnn_attention_lowers_to_two_kernels(widths, in_documents):
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, widths[0]), jnp.bfloat16) for heads in (4, 2))
    v = jax.ShapeDtypeStruct((1, 64, 2, widths[1]), jnp.bfloat16)
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 64), jnp.int32) if in_documents else None

    def loss(q, k, v, sinks, segments):
        return fused.cudnn_attention(Scores(0.3, 16), q, k, v, sinks, segments).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(q, k, v, sinks, segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    name = "__cudnn$fmhaScaleBiasSoftmax" if in_documents else "__cudnn$fmhaSoftmax"
    assert text.count(f"{name}(") + text.count(f"{name}Backward(") == 2
    assert "64x64xf32" not in text


def test_chunks_begin_with_their_document():
    positions = jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2]])
    assert scores.chunks_in(positions, 2).tolist() == [[1, 1, 2, 2, 3, 4, 4, 5]]


@pytest.mark.slow
def test_chunks_of_cached_keys_equal_those_of_whole_sequences():
    q, k, v, _ = inputs(7, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(7)[None], q.shape[:2])
    whole = attend(q, k, v, positions, Scores(1.0), segments=scores.chunks_in(positions, 3), whole=True)
    cached = attend(q, k, v, positions, Scores(1.0, chunk=3))
    np.testing.assert_allclose(cached, whole, rtol=1e-6)
    np.testing.assert_allclose(whole[:, 3], v[:, 3], rtol=1e-6)  # the first of a chunk sees itself alone


def test_layers_repeat_with_the_period_of_their_windows():
    assert period_of("ababab") == 2
    assert period_of("aaaa") == 1
    assert period_of("abc") == 3
    assert period_of("aab") == 3


@pytest.mark.thorough
def test_no_array_of_the_reference_has_all_pairs_of_tokens():
    config = PRESETS["reference"]
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, system="plain"))
    programs, shape = programs_of(config), (config.batch.size, config.batch.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(make_mesh(config.parallel)))
    program = str(programs.step.trace(programs.state_shapes, tokens).jaxpr)
    length = config.batch.sequence_length
    assert re.search(rf"bf16\[8,{length},2048\]", program)
    assert re.search(rf"f32\[8,16,1,512,{length}\]", program)
    assert not re.search(rf"\[[0-9,]*\b{length},{length}\]", program)


@pytest.mark.slow
def test_kernels_of_a_stage_run_on_each_device():
    """Inside a `shard_map` over one axis, with gradients of sinks, which all sequences share."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "expert"), axis_types=(AxisType.Auto,) * 3)
    arrays = [*(jax.random.normal(jax.random.key(i), (8, 12, 2, 8)) for i in range(3)), jnp.arange(2.0)]
    segments = jnp.arange(96).reshape(8, 12) // 5

    def kernel(q, k, v, sinks, segments):
        positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], q.shape[:2])
        return attend(q, k, v, positions, Scores(0.3), sinks, segments, whole=True)

    def staged(*arrays):
        by_stage = PartitionSpec("stage")
        specs = (by_stage, by_stage, by_stage, PartitionSpec(), by_stage)
        options = {"axis_names": {"stage"}, "check_vma": False}
        run = partial(_on_each_device, kernel)
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_stage, **options)(*arrays)

    def gradients(function):
        return jax.jit(jax.grad(lambda *arrays: jnp.square(function(*arrays, segments)).sum(), range(4)))(*arrays)

    for got, want in zip(gradients(staged), gradients(kernel), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

"""The router's product on tensor cores has the order of logits of the float32 product, emulated on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.routing.logits import bfloat16_terms, router_logits
from tests.layer_cases import make_mesh

TILE, STEP = 64, 16
"""Depth of a tile of XLA's Triton kernel, and of one instruction of a tensor core."""

NUM_EXPERTS = 32

ULP = 2.0**-23
"""Unit in the last place of logits near 1, their standard deviation here."""

ORDER = {3: ((1, 0), (0, 1), (0, 0)), 6: ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))}
"""Products of terms of XLA's `dot_algorithms.cc`, in order, by their number."""


def terms(array):
    found = []
    for _ in range(3):
        term = np.asarray(jnp.asarray(array).astype(jnp.bfloat16).astype(jnp.float32))
        found.append(term)
        array = array - term
    return found


def truncated(array):
    """Round to float32 towards zero, as tensor cores do after each instruction."""
    rounded = array.astype(np.float32)
    return np.where(np.abs(rounded) > np.abs(array), np.nextafter(rounded, np.float32(0)), rounded)


def on_tensor_cores(x, kernel, algorithm):
    """Emulate XLA's kernel of an algorithm."""
    left, right = terms(x), terms(kernel)
    total = np.zeros((x.shape[0], kernel.shape[1]), np.float32)
    for start in range(0, x.shape[1], TILE):
        of_tile = np.zeros_like(total)
        for i, j in ORDER[int(algorithm.name[-1])]:
            if left[i].any() and right[j].any():
                for at in range(start, start + TILE, STEP):
                    part = left[i][:, at : at + STEP].astype(np.float64) @ right[j][at : at + STEP]
                    of_tile = truncated(of_tile + part)
        total = total + of_tile
    return total


def near_ties(num_tokens, width, token_dtype, kernel_dtype):
    """Return tokens, kernel, and for each pair of experts a token with two logits 1 to 4,096 units apart."""
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.normal(size=(num_tokens, width)), token_dtype).astype(jnp.float32))
    kernel = rng.normal(size=(width, NUM_EXPERTS)) / np.sqrt(width)
    token = rng.choice(num_tokens, NUM_EXPERTS // 2, replace=False)
    gap = rng.choice([-1, 1], token.size) * np.exp2(rng.uniform(0, 12, token.size)) * ULP
    tied = x[token].astype(np.float64)
    away = (tied * kernel[:, ::2].T).sum(1) - (tied * kernel[:, 1::2].T).sum(1) - gap
    kernel[:, 1::2] += (tied * (away / (tied**2).sum(1))[:, None]).T
    return x, np.asarray(jnp.asarray(kernel, kernel_dtype).astype(jnp.float32)), token


def gaps(logits, token):
    of_tied = logits[token].reshape(token.size, -1, 2).astype(np.float64)
    each = np.arange(token.size)
    return of_tied[each, each, 0] - of_tied[each, each, 1]


CASES = [
    (2048, "bfloat16", "float32"),
    pytest.param(7168, "bfloat16", "float32", marks=pytest.mark.thorough),
    pytest.param(7168, "bfloat16", "bfloat16", marks=pytest.mark.thorough),
    pytest.param(2048, "float32", "float32", marks=pytest.mark.thorough),
    pytest.param(7168, "float32", "float32", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("width", "token_dtype", "kernel_dtype"), CASES)
@pytest.mark.slow
def test_near_ties_keep_their_order(width, token_dtype, kernel_dtype):
    x, kernel, token = near_ties(2048, width, token_dtype, kernel_dtype)
    exact = x.astype(np.float64) @ kernel
    highest = np.asarray(jnp.matmul(x, kernel, precision="highest"))
    algorithm = bfloat16_terms(jnp.dtype(token_dtype), jnp.dtype(kernel_dtype), jnp.dtype("float32"))
    logits = on_tensor_cores(x, kernel, algorithm)
    assert np.abs(logits - exact).max() <= 2 * np.abs(highest - exact).max()
    want, as_usual, got = (gaps(array, token) for array in (exact, highest, logits))
    # Below 8 units even the float32 product may order two logits by its rounding errors.
    clear = np.abs(want) >= 8 * ULP
    assert clear.any()
    assert (np.sign(got) == np.sign(want))[clear & (np.sign(as_usual) == np.sign(want))].all()
    # Natural ties: the eight experts of every token.
    top = [np.asarray(jax.lax.top_k(array, 8)[1]) for array in (jnp.asarray(highest), jnp.asarray(logits))]
    want_top = np.argsort(-exact, axis=1, kind="stable")[:, :8]
    is_equal = [(one == want_top).all(1) for one in top]
    is_clear = -np.diff(-np.sort(-exact, 1)[:, :9]).min(1) >= 8 * ULP
    assert (is_equal[1] | ~is_equal[0] | ~is_clear).all()
    assert is_equal[1].mean() > 0.99


def test_two_terms_of_float32_kernels_would_not_suffice():
    x, kernel, _ = near_ties(128, 2048, "bfloat16", "float32")
    exact = x.astype(np.float64) @ kernel
    chosen = bfloat16_terms(jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("float32"))
    # Both are emulated: errors of a CPU's own product depend on its library, 2.4e-6 to 5.2e-6 here.
    errors = [
        np.abs(on_tensor_cores(x, kernel, algorithm) - exact).max()
        for algorithm in (chosen, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    ]
    assert errors[1] > 8 * errors[0]


def operands(token_dtype, kernel_dtype):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(24, 16)), token_dtype), jnp.asarray(rng.normal(size=(16, 8)), kernel_dtype)


def loss(x, kernel, logits=router_logits):
    return jnp.sin(logits(x, kernel)).sum()


@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float32")],
)
def test_gradients_are_those_of_the_product_in_float32_or_wider(dtypes, x64):
    wide = "float64" if "float64" in dtypes else "float32"

    def product(x, kernel):
        return jnp.matmul(x.astype(wide), kernel.astype(wide), precision="highest")

    got = jax.jit(jax.grad(loss, (0, 1)))(*operands(*dtypes))
    want = jax.jit(jax.grad(lambda *both: loss(*both, product), (0, 1)))(*operands(*dtypes))
    for one, other, dtype in zip(got, want, dtypes, strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)


def lowered(platform, *dtypes):
    gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return gradients.trace(*operands(*dtypes)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("dtypes", "products"),
    [
        # One product of two bfloat16 numbers has three terms, three of float32 numbers six: logits, tokens, kernel.
        (("bfloat16", "float32"), [6, 3, 6]),
        (("bfloat16", "bfloat16"), [3, 3, 3]),
        (("float32", "float32"), [6, 6, 6]),
    ],
)
def test_gpus_of_nvidia_use_tensor_cores_and_others_do_not(dtypes, products):
    text = lowered("cuda", *dtypes)
    assert text.count("num_primitive_operations = 6") == products.count(6)
    assert text.count("num_primitive_operations = 3") == products.count(3)
    for platform in ("cpu", "tpu", "rocm"):
        assert "num_primitive_operations" not in lowered(platform, *dtypes)


def test_the_gradient_of_the_kernel_is_summed_over_ranks():
    mesh = make_mesh((4,), ("expert",))
    spec, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(x, kernel):
        return jax.grad(loss, 1)(x, kernel)

    x, kernel = operands("float32", "float32")
    got = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, whole), out_specs=whole))(x, kernel)
    np.testing.assert_allclose(got, jax.grad(loss, 1)(x, kernel), rtol=1e-5, atol=1e-6)

"""Grouped products with a given backend, on any platform."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb.kernels.backends import BACKENDS, choose_backend
from jax_moe_lb.kernels.grouped_matmul import grouped_matmul, matmul_product, outer_product
from jax_moe_lb.kernels.operands import RowGroups


def matmul_of(name, platform=None):
    """Return `grouped_matmul` with the given backend; if a platform is given, it must be its default."""

    def matmul(rows, weights, group_sizes, transposed=False):
        product = matmul_product(rows, weights, transposed)
        return _backend(name, product, platform)(product, rows, weights, RowGroups(group_sizes), None)

    return matmul


def outer_of(name, platform=None):
    """Return `grouped_outer` with the given backend; if a platform is given, it must be its default."""

    def outer(rows, others, groups, dtype=jnp.float32, sums=None, parts=None):
        product = outer_product(rows, others, groups.sizes.shape[0] if parts is None else parts, dtype)
        return _backend(name, product, platform)(product, rows, others, groups, sums)

    return outer


def on_platform(name, platform="cuda"):
    """Return the products of a platform by a backend, which must be its default."""

    def by_backend(product, *operands, sums=None):
        return _backend(name, product, platform)(product, *operands, sums)

    return by_backend


def _backend(name, product, platform):
    if platform is not None:
        choice = choose_backend(product, platform)
        assert choice.backend.name == name, choice.why
        return choice.backend
    return named(name)


def named(name):
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    return backend


def rejected(name, product, platform="cuda"):
    """Return the reason for rejecting a backend; fail if it is accepted."""
    choice = choose_backend(product, platform)
    assert choice.backend.name != name
    return choice.rejected[name]


def make_operands(sizes, widths=(128, 128), num_rows=320):
    """Return rows, NaN beyond the last group, and matrices."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(num_rows, widths[0])), jnp.bfloat16).at[sum(sizes) :].set(jnp.nan)
    return rows, jnp.asarray(rng.normal(size=(len(sizes), *widths)) / 8, jnp.bfloat16)


def assert_products(got, rows, matrices, sizes):
    used, group = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    rows, matrices = (np.asarray(array, np.float64) for array in (rows[:used], matrices))
    want = np.einsum("ai,aio->ao", rows, matrices[group])
    # Rounded once: to half a unit in the last place of bfloat16.
    np.testing.assert_allclose(np.asarray(got[:used], np.float64), want, rtol=2**-8, atol=1e-4)


def sums_by_group(left, right, sizes):
    ends = np.cumsum(sizes)
    left, right = (np.asarray(array, np.float64) for array in (left, right))
    return np.stack([left[end - n : end].T @ right[end - n : end] for n, end in zip(sizes, ends, strict=True)])


def check_gradients(sizes, num_rows, run, widths=(128, 128)):
    """Compare gradients of rows and matrices by the kernels, with NaN rows of no group; `run` calls a function."""
    rows, matrices = make_operands(sizes, widths, num_rows)
    upstream = make_operands(sizes, widths[::-1], num_rows)[0]

    def gradients(rows, matrices, upstream):
        def multiply(rows, matrices):
            return grouped_matmul(rows, matrices, jnp.array(sizes, jnp.int32))

        return jax.vjp(multiply, rows, matrices)[1](upstream)

    of_rows, of_matrices = run(gradients, rows, matrices, upstream)
    assert_products(of_rows, upstream, matrices.mT, sizes)
    want = sums_by_group(rows, upstream, sizes)
    np.testing.assert_allclose(np.asarray(of_matrices, np.float64), want, rtol=2**-8, atol=1e-3)


def draw(*shape, seed, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def split_experts(experts, parts):
    """Return experts in two parts, by slices."""
    return tuple(jax.tree.map(lambda leaf, at=at: leaf[at], experts) for at in parts)

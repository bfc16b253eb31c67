"""Grouped products with a given backend, on any platform."""

import jax.numpy as jnp

from jax_moe_lb.kernels.backends import BACKENDS, choose_backend
from jax_moe_lb.kernels.grouped_matmul import matmul_product, outer_product


def matmul_of(name, platform=None):
    """Return `grouped_matmul` with the given backend; if a platform is given, it must be its default."""

    def matmul(rows, weights, group_sizes, transposed=False):
        product = matmul_product(rows, weights, transposed)
        return _backend(name, product, platform)(product, rows, weights, group_sizes, None)

    return matmul


def outer_of(name, platform=None):
    """Return `grouped_outer` with the given backend; if a platform is given, it must be its default."""

    def outer(rows, others, group_sizes, dtype=jnp.float32, sums=None, parts=None):
        product = outer_product(rows, others, group_sizes.shape[0] if parts is None else parts, dtype)
        return _backend(name, product, platform)(product, rows, others, group_sizes, sums)

    return outer


def _backend(name, product, platform):
    if platform is not None:
        choice = choose_backend(product, platform)
        assert choice.backend.name == name, choice.why
        return choice.backend
    return named(name)


def named(name):
    """Return the backend of a name."""
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    return backend


def rejected(name, product, platform="cuda"):
    """Return the reason for rejecting a backend; fail if it is accepted."""
    choice = choose_backend(product, platform)
    assert choice.backend.name != name
    return choice.rejected[name]

"""Hopper kernels against row blocks. Not run on a GPU yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.kernels.blocks import matmul_by_blocks, outer_by_blocks
from tests.kernels.backend_cases import matmul_of, outer_of

pytestmark = pytest.mark.gpu

hopper_matmul, hopper_outer = matmul_of("Hopper kernel", "cuda"), outer_of("Hopper kernel", "cuda")

REPETITIONS = 100
NUM_ROWS, NUM_HOME, NUM_GROUPS = 34432, 16, 18


@pytest.fixture(autouse=True)
def needs_hopper():
    if jax.default_backend() != "gpu" or jax.devices()[0].compute_capability != "9.0":
        pytest.skip("JAX has no Hopper here")


def sizes(seed):
    shares = np.random.default_rng(seed).dirichlet(np.full(NUM_GROUPS, 0.3))
    return jnp.asarray(np.floor(shares * NUM_ROWS), jnp.int32)


def draw(key, *shape):
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16) / 8


def assert_alike(run, args, want):
    """Check the values, and bitwise equality of repeated runs, to detect races."""
    first = run(*args)
    np.testing.assert_allclose(np.float32(first), np.float32(want), rtol=2e-2, atol=2e-2)
    for _ in range(REPETITIONS):
        assert (run(*args) == first).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("widths", [(2048, 1536), (768, 2048)])
def test_products(widths, transposed, seed):
    group_sizes, used = sizes(seed), int(sizes(seed).sum())
    rows = draw(0, NUM_ROWS, widths[0]).at[used:].set(jnp.nan)
    matrices = draw(1, NUM_GROUPS, *(widths[::-1] if transposed else widths))

    @jax.jit
    def run(rows, matrices, group_sizes):
        parts = matrices[:NUM_HOME], matrices[NUM_HOME:]
        return hopper_matmul(rows, parts, group_sizes, transposed=transposed)[:used]

    want = jax.jit(lambda *args: matmul_by_blocks(*args, transposed=transposed))(rows, matrices, group_sizes)
    assert_alike(run, (rows, matrices, group_sizes), want[:used])


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_groups(seed):
    group_sizes, used = sizes(seed), int(sizes(seed).sum())
    rows, others = (draw(key, NUM_ROWS, width).at[used:].set(jnp.nan) for key, width in ((0, 2048), (1, 768)))

    @jax.jit
    def run(*args):
        parts = NUM_HOME, NUM_GROUPS - NUM_HOME
        return jnp.concatenate(hopper_outer(*args, parts=parts, dtype=jnp.float32))

    assert_alike(run, (rows, others, group_sizes), jax.jit(outer_by_blocks)(rows, others, group_sizes))

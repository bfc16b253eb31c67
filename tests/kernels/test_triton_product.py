"""Kernel of grouped products in the Pallas interpreter; compiled, it runs on GPUs only."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels import grouped_matmul as op
from jax_moe_lb.kernels.triton_product import NEIGHBORS, PRODUCT
from tests.kernels.backend_cases import matmul_of, outer_of, rejected

TRITON = "Triton kernel"
WIDTHS = (128, 256)

triton_matmul = matmul_of(TRITON, "cuda")

SIZES = {
    "uneven": (100, 0, 3, 129, 40),
    "no rows": (0, 0),
    "one hot": (0, 300, 0),
    "ends beside tiles": (7, 128, 127, 1),
    "one": (257,),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: SimpleNamespace(platform="gpu"))


def make_operands(group_sizes, widths=WIDTHS, num_rows=320, dtype=jnp.bfloat16):
    """Return rows, NaN beyond the last group, and matrices."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(num_rows, widths[0])), dtype).at[sum(group_sizes) :].set(jnp.nan)
    return rows, jnp.asarray(rng.normal(size=(len(group_sizes), *widths)) / 8, dtype)


def assert_products(got, rows, matrices, group_sizes):
    used, group = sum(group_sizes), np.repeat(np.arange(len(group_sizes)), group_sizes)
    rows, matrices = (np.asarray(array, np.float64) for array in (rows[:used], matrices))
    want = np.einsum("ai,aio->ao", rows, matrices[group])
    # Rounded once: to half a unit in the last place of bfloat16.
    np.testing.assert_allclose(np.asarray(got[:used], np.float64), want, rtol=2**-8, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "sizes", [pytest.param(name, marks=() if name == "uneven" else pytest.mark.thorough) for name in SIZES]
)
def test_products(sizes, transposed):
    rows, matrices = make_operands(SIZES[sizes])
    weights = matrices.mT if transposed else matrices
    got = triton_matmul(rows, weights, jnp.array(SIZES[sizes], jnp.int32), transposed)
    assert_products(got, rows, matrices, SIZES[sizes])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "widths",
    [
        pytest.param((200, 384), id="narrow"),
        pytest.param((16, 384), id="from rank"),
        pytest.param((200, 16), id="to rank"),
        *(pytest.param(one, id=f"{one}", marks=pytest.mark.thorough) for one in ((136, 2880), (2880, 384))),
    ],
)
def test_tiles_need_not_divide_the_widths(widths, transposed):
    assert widths[0] % PRODUCT.depth or widths[1] % PRODUCT.columns
    sizes = (10, 0, 60)
    rows, matrices = make_operands(sizes, widths, num_rows=77)
    weights = matrices.mT if transposed else matrices
    got = triton_matmul(rows, weights, jnp.array(sizes, jnp.int32), transposed)
    assert_products(got, rows, matrices, sizes)


@pytest.mark.slow
def test_more_tiles_than_neighbors():
    sizes = (1,) * (NEIGHBORS + 3)
    rows, matrices = make_operands(sizes, num_rows=150)
    assert_products(triton_matmul(rows, matrices, jnp.array(sizes, jnp.int32)), rows, matrices, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_parts_are_read_in_place(transposed):
    sizes = SIZES["uneven"]
    rows, matrices = make_operands(sizes)
    weights = matrices.mT if transposed else matrices
    run = partial(triton_matmul, transposed=transposed)
    operands = rows, (weights[:3], weights[3:]), jnp.array(sizes, jnp.int32)
    assert_products(run(*operands), rows, matrices, sizes)
    assert "concatenate" not in str(jax.make_jaxpr(run)(*operands))


@pytest.mark.slow
def test_gradients(monkeypatch):
    """Gradients of rows and matrices by the kernels, with NaN rows of no group."""
    sizes = SIZES["uneven"]
    rows, matrices = make_operands(sizes)
    upstream = make_operands(sizes, WIDTHS[::-1])[0]
    group_sizes = jnp.array(sizes, jnp.int32)

    def on_cuda(product, *operands, sums=None):
        run = (outer_of if product.kind == "outer" else matmul_of)(TRITON, "cuda")
        options = {"dtype": product.dtype} if product.kind == "outer" else {"transposed": product.is_transposed}
        return run(*operands, **options)

    monkeypatch.setattr(op, "_by_platform", on_cuda)
    _, pull_back = jax.vjp(lambda rows, matrices: op.grouped_matmul(rows, matrices, group_sizes), rows, matrices)
    of_rows, of_matrices = pull_back(upstream)
    assert_products(of_rows, upstream, matrices.mT, sizes)
    ends = np.cumsum(sizes)
    both = (np.asarray(array, np.float64) for array in (rows, upstream))
    left, right = both
    want = np.stack([left[end - n : end].T @ right[end - n : end] for n, end in zip(sizes, ends, strict=True)])
    np.testing.assert_allclose(np.asarray(of_matrices, np.float64), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("num_groups", "widths", "dtype", "why"),
    [
        (2, (128, 128), jnp.float32, "operands are float32 and float32; expected bfloat16 or float16"),
        ((2, 0), (128, 128), jnp.bfloat16, "an operand is empty"),
        ((2**17, 2), (128, 128), jnp.bfloat16, "an operand has 2**31 entries or more; the kernel indexes in int32"),
    ],
)
def test_what_does_not_fit_is_left_to_others(num_groups, widths, dtype, why):
    product = grouped_kernels.Product("product", 128, widths, num_groups, (dtype, dtype), dtype)
    assert rejected(TRITON, product) == why

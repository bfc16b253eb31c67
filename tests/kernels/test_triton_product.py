"""Kernel of grouped products in the Pallas interpreter; compiled, it runs on GPUs only."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels import grouped_matmul as op
from jax_moe_lb.kernels.triton_product import NEIGHBORS, PRODUCT
from tests.kernels.backend_cases import (
    assert_products,
    check_gradients,
    make_operands,
    matmul_of,
    on_platform,
    rejected,
)
from tests.marks import parametrize

pytestmark = pytest.mark.usefixtures("triton_interpreted")

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


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@parametrize("sizes", ["uneven"], SIZES)
def test_products(sizes, transposed):
    """Matrices in parts are read in place, with equal bits."""
    rows, matrices = make_operands(SIZES[sizes], WIDTHS)
    weights, group_sizes = matrices.mT if transposed else matrices, jnp.array(SIZES[sizes], jnp.int32)
    run = partial(triton_matmul, transposed=transposed)
    parts = tuple(part for part in (weights[:1], weights[1:]) if part.shape[0])
    in_parts = rows, parts, group_sizes
    got = run(*in_parts)
    assert_products(got, rows, matrices, SIZES[sizes])
    assert got.tobytes() == run(rows, weights, group_sizes).tobytes()
    assert "concatenate" not in str(jax.make_jaxpr(run)(*in_parts))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@parametrize("widths", [(200, 384), (16, 384), (200, 16)], [(136, 2880), (2880, 384)], ids=str)
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
    rows, matrices = make_operands(sizes, WIDTHS, 150)
    assert_products(triton_matmul(rows, matrices, jnp.array(sizes, jnp.int32)), rows, matrices, sizes)


@pytest.mark.slow
def test_gradients(monkeypatch):
    monkeypatch.setattr(op, "_by_platform", on_platform(TRITON))
    check_gradients(SIZES["uneven"], 320, lambda function, *operands: function(*operands), WIDTHS)


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

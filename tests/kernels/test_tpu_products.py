"""Kernels of products for TPUs, interpreted on the CPU; compiled, they run on TPUs only."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu

from jax_moe_lb import Buffers, TopK, Topology, exact
from jax_moe_lb.kernels import backends, fused_ffn, grouped_ffn, tpu_products
from jax_moe_lb.kernels import grouped_matmul as op
from jax_moe_lb.kernels.backends import Product, choose_backend
from jax_moe_lb.kernels.operands import RowGroups
from jax_moe_lb.kernels.tpu_products import visits_of
from jax_moe_lb.transport import slot_weights
from tests.kernels.backend_cases import (
    assert_products,
    check_gradients,
    make_operands,
    matmul_of,
    on_platform,
    outer_of,
    sums_by_group,
)
from tests.layer_cases import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

KERNEL = "Pallas kernel"
NUM_ROWS, PARTS = 300, (3, 2)
SIZES = {
    "uneven": (100, 0, 83, 3, 61),
    "no rows": (0, 0, 0, 0, 0),
    "one hot": (0, 0, NUM_ROWS, 0, 0),
    "replicas alone": (0, 0, 0, 200, 0),
    "ends beside tiles": (127, 1, 128, 0, 8),
}
V5E, V5P, V6E = pltpu.ChipVersion.TPU_V5E, pltpu.ChipVersion.TPU_V5P, pltpu.ChipVersion.TPU_V6E


def on_tpu(monkeypatch, chip, vector_bytes=None):
    """Pretend that a TPU is the default device."""
    for module in (backends, fused_ffn):
        monkeypatch.setattr(module, "get_default_device", lambda: SimpleNamespace(platform="tpu"))
    info = pltpu.get_tpu_info_for_chip(chip, 2 if chip == V5P else 1)
    if vector_bytes is not None:
        info = replace(info, vmem_capacity_bytes=vector_bytes)
    monkeypatch.setattr(tpu_products, "_chip", lambda: info)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    on_tpu(monkeypatch, V5E)


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_steps_visit_each_row_of_each_group_once(sizes, rows, monkeypatch):
    on_tpu(monkeypatch, V5E if rows == 128 else V6E)
    visits, total = visits_of(jnp.array(sizes, jnp.int32), NUM_ROWS)
    cleared, num_cleared = visits_of(jnp.array(sizes, jnp.int32), NUM_ROWS, jnp.ones(5, bool))
    group, tile = (np.asarray(array[:total]) for array in (visits.group, visits.tile))
    found = [
        (g, row)
        for g, t in zip(group, tile, strict=True)
        for row in range(max(t * rows, visits.starts[g]), min((t + 1) * rows, visits.ends[g]))
    ]
    assert found == list(zip(np.repeat(np.arange(5), sizes), range(sum(sizes)), strict=True))
    # Groups without rows have one step if they are cleared.
    assert int(num_cleared) == int(total) + sizes.count(0)
    assert set(np.asarray(cleared.group[:num_cleared]).tolist()) == set(range(5))
    assert int(cleared.tile.max()) <= (NUM_ROWS - 1) // rows


DEVICES = {"one tile": (V5E,), "small tiles": (V6E, 2**19), "two cores": (V5P, 2**21)}


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@parametrize("sizes, device", [("uneven", "small tiles")], [(sizes, device) for sizes in SIZES for device in DEVICES])
def test_products_of_parts(sizes, device, transposed, monkeypatch):
    on_tpu(monkeypatch, *DEVICES[device])
    rows, matrices = make_operands(SIZES[sizes], (384, 200), NUM_ROWS)
    weights = matrices.mT if transposed else matrices
    multiply = partial(tpu_products.product, group_sizes=jnp.array(SIZES[sizes], jnp.int32), transposed=transposed)
    assert_products(jax.jit(multiply)(rows, weights[:3], weights[3:]), rows, matrices, SIZES[sizes])


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@parametrize(
    "sizes, width, device",
    [("uneven", 2048, "one tile"), ("uneven", 512, "two cores")],
    [("ends beside tiles", 2304, "one tile"), ("one hot", 2048, "two cores"), ("uneven", 384, "two cores")],
)
def test_products_that_travel_have_equal_rows(sizes, width, device, transposed, monkeypatch):
    """In words of whole rows or of a part of each, by tiles that groups share; of other widths as all products."""
    on_tpu(monkeypatch, *DEVICES[device])
    rows, matrices = make_operands(SIZES[sizes], (128, width), NUM_ROWS)
    matrices = matrices.mT if transposed else matrices
    term = tpu_products.Term(rows, (tpu_products.Factor((matrices[:3], matrices[3:])),))
    run = partial(tpu_products.products, [term], width, jnp.array(SIZES[sizes], jnp.int32), transposed=transposed)
    used = sum(SIZES[sizes])
    got, want = (jax.jit(partial(run, travels=travels))().arrays[0][:used] for travels in (True, False))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def in_words(rows):
    return rows.reshape(len(rows), 2, -1)


@pytest.mark.slow
@parametrize(
    "sizes, width, device",
    [("uneven", 512, "two cores")],
    [("uneven", 2304, "one tile"), ("one hot", 768, "small tiles"), ("ends beside tiles", 384, "two cores")],
)
def test_rows_as_an_exchange_wrote_them_have_equal_products(sizes, width, device, monkeypatch):
    """Rows of several terms and, of sums, both operands; rows of no group are NaN."""
    on_tpu(monkeypatch, *DEVICES[device])
    groups = RowGroups(jnp.array(SIZES[sizes], jnp.int32))
    rows, matrices = make_operands(SIZES[sizes], (width, 128), NUM_ROWS)
    factor, used = tpu_products.Factor((matrices[:3], matrices[3:])), sum(SIZES[sizes])

    def compute(*given):
        terms = [tpu_products.Term(one, (factor,)) for one in given]
        of_rows = tpu_products.products(terms, 128, groups.sizes, transposed=False).arrays[0][:used]
        return of_rows, tpu_products.outer(*given, groups, parts=PARTS, dtype=jnp.float32)

    want = jax.tree.leaves(jax.jit(compute)(rows, 2 * rows))
    for given in ((in_words(rows), 2 * rows), (in_words(rows), in_words(2 * rows))):
        for got, of_matrices in zip(jax.tree.leaves(jax.jit(compute)(*given)), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(of_matrices, np.float32))


@pytest.mark.slow
def test_products_of_a_tpu_take_parts():
    sizes = SIZES["uneven"]
    rows, matrices = make_operands(sizes, (384, 200), NUM_ROWS)
    operands = rows, (matrices[:3], matrices[3:]), jnp.array(sizes, jnp.int32)
    multiply = matmul_of(KERNEL, "tpu")
    assert_products(jax.jit(multiply)(*operands), rows, matrices, sizes)
    assert "concatenate" not in str(jax.make_jaxpr(multiply)(*operands))


@pytest.mark.slow
def test_vmap_multiplies_one_after_the_other():
    sizes = SIZES["uneven"]
    rows, matrices = make_operands(sizes, (128, 256), NUM_ROWS)
    multiply, both = matmul_of(KERNEL, "tpu"), jnp.stack([rows, 2 * rows])
    got = jax.jit(jax.vmap(multiply, (0, None, None)))(both, matrices, jnp.array(sizes, jnp.int32))
    assert_products(got[0], rows, matrices, sizes)
    assert_products(got[1], 2 * rows, matrices, sizes)


@pytest.mark.slow
@parametrize("dtype", [jnp.bfloat16], [jnp.float32])
@parametrize("sizes, device", [("uneven", "small tiles")], [(sizes, device) for sizes in SIZES for device in DEVICES])
def test_sums_of_parts(sizes, device, dtype, monkeypatch):
    """Rows of no group are NaN and read by no sum."""
    on_tpu(monkeypatch, *DEVICES[device])
    rows, others = (make_operands(SIZES[sizes], widths, NUM_ROWS)[0] for widths in ((384, 200), (200, 384)))
    groups = RowGroups(jnp.array(SIZES[sizes], jnp.int32))
    got = jax.jit(partial(outer_of(KERNEL, "tpu"), dtype=dtype, parts=PARTS))(rows, others, groups)
    assert tuple(len(part) for part in got) == PARTS
    rtol = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    want = sums_by_group(rows, others, SIZES[sizes])
    np.testing.assert_allclose(np.concatenate(got).astype(np.float64), want, rtol=rtol, atol=1e-4)


@pytest.mark.slow
def test_a_nan_stays_in_its_group():
    rows = jnp.ones((NUM_ROWS, 128), jnp.bfloat16).at[5].set(jnp.nan)
    groups = RowGroups(jnp.array([10, 20, 0, 3], jnp.int32))
    (got,) = tpu_products.outer(rows, rows, groups, parts=(4,), dtype=jnp.float32)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1:, 0, 0], [20, 0, 3])


@pytest.mark.slow
@pytest.mark.parametrize("width", [200, 256, 384])
def test_sums_of_neighboring_columns(width, monkeypatch):
    """Tiles that do not divide the width of an array would cross the border to the next one."""
    on_tpu(monkeypatch, V5E, 2**20)
    sizes = SIZES["uneven"]
    rows, *others = (make_operands(sizes, (one, 128), NUM_ROWS)[0] for one in (128, width, width))
    others[1] = 2 * others[1]
    groups = RowGroups(jnp.array(sizes, jnp.int32))
    got = jnp.concatenate(tpu_products.outer(rows, tuple(others), groups, parts=PARTS, dtype=jnp.float32))
    want = sums_by_group(rows, np.concatenate(others, 1), sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@parametrize("dtype", [jnp.bfloat16], [jnp.float32])
def test_products_are_added_to_given_sums(dtype):
    """Also to those of groups without rows, which the sums of the group before must not replace."""
    sizes = (0, 100, 0, 144, 0)
    rows, others = (make_operands(sizes, widths, NUM_ROWS)[0] for widths in ((128, 256), (256, 128)))
    add = partial(tpu_products.outer, rows, others, RowGroups(jnp.array(sizes, jnp.int32), jnp.ones(5, bool)))
    products = np.concatenate(add(parts=PARTS, dtype=jnp.float32))
    before = np.random.default_rng(0).normal(size=products.shape) * 10
    given = tuple(jnp.asarray(part, dtype) for part in np.split(before, np.cumsum(PARTS)[:-1]))
    got = np.concatenate(add(parts=PARTS, dtype=dtype, before=given)).astype(np.float64)
    rtol = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(got, np.concatenate(given).astype(np.float64) + products, rtol=rtol, atol=1e-4)
    np.testing.assert_array_equal(got[0], given[0][0])


@pytest.mark.slow
def test_sums_that_nobody_reads_take_no_step():
    is_read = jnp.array([True, True, True, False, False])
    sizes = jnp.array((100, 0, 83, 0, 61), jnp.int32)
    _, total = visits_of(sizes, NUM_ROWS, RowGroups(sizes, is_read).has_sums)
    # The second and the third group share their tile with others.
    assert int(total) == 1 + 1 + 2 + 1


@pytest.mark.slow
def test_gradients(monkeypatch):
    monkeypatch.setattr(op, "_by_platform", on_platform(KERNEL, "tpu"))
    check_gradients(SIZES["uneven"], NUM_ROWS, lambda function, *args: jax.jit(function)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["direct", "once"])
def test_a_layer_equals_the_dense_one(dispatch, monkeypatch):
    """It reads parts and activates inside the kernels; gradients of chunks are added, and of replicas come home."""
    monkeypatch.setattr(op, "_by_platform", on_platform(KERNEL, "tpu"))
    monkeypatch.setattr(grouped_ffn, "_on_device", lambda fused, other, *operands: fused(*operands))
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: "tpu")
    mesh, case = make_mesh((2,), ("expert",)), Case(num_tokens=24, features=252, mlp_dim=128, num_experts=4)
    args = case.arguments("zipf", 2, "bfloat16")
    system = exact(1, Buffers(1.5, 1, 2), dispatch=dispatch)
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system, TopK(2)))
    text = str(layer.run.trace(*args).jaxpr)
    assert all(name in text for name in ("grouped_hidden", "grouped_row_gradients", "grouped_outer"))
    assert f"bf16[3,{case.width},{case.mlp_dim}]" not in text
    (y, stats), gradients = layer(*args)
    assert int(stats.weight_bytes_moved.sum()) > 0
    x, mask, kernel, experts, target = args
    x, kernel, experts = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, kernel, experts))
    (dense, _), of_dense = dense_with_gradients(TopK(2))(x, mask, kernel, experts, target)
    assert_close((y, *gradients), (dense, *of_dense), 5e-2)


def make_product(widths=(128, 256), num_rows=NUM_ROWS, dtype=jnp.bfloat16):
    return Product("product", num_rows, widths, PARTS, (jnp.dtype(dtype),) * 2, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (make_product(dtype=jnp.float32), "operands are float32 and float32; expected bfloat16"),
        (make_product(num_rows=0), "an operand is empty"),
    ],
)
def test_what_does_not_fit_is_left_to_others(product, why):
    choice = choose_backend(product, "tpu")
    assert choice.backend.name == "lax.ragged_dot"
    assert choice.rejected[KERNEL] == why


@pytest.mark.parametrize(
    ("chip", "widths", "kind", "why"),
    [
        # Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B, with parts.
        (V5E, (768, 2048), "product", None),
        (V5E, (7168, 2048), "product", None),
        (V5P, (2048, 7168), "transposed", None),
        (V5E, (14336, 4096), "product", None),
        (V5P, (32768, 4096), "product", "128 of 4096 columns fit in a tile; expected 256"),
        # Two cores share the columns.
        (V5P, (128, 256), "product", None),
        (V5P, (32768, 4096), "outer", None),
    ],
)
def test_tiles_are_wide_enough_for_the_matrix_units(chip, widths, kind, why, monkeypatch):
    on_tpu(monkeypatch, chip)
    found = tpu_products.why_not(replace(make_product(widths), kind=kind))
    assert found is None if why is None else found.startswith(why)


@pytest.mark.parametrize(("chip", "fuses_wide"), [(V5E, True), (V5P, False), (V6E, False)])
def test_kernels_of_whole_networks_have_narrower_tiles(chip, fuses_wide, monkeypatch):
    on_tpu(monkeypatch, chip)
    assert tpu_products.can_fuse(768, 2048, 2)
    assert tpu_products.can_fuse(2048, 7168, 2)
    assert tpu_products.can_fuse(14336, 4096, 2) == fuses_wide


def test_programs_traced_for_other_devices_have_no_kernel(monkeypatch):
    monkeypatch.setattr(backends, "get_default_device", lambda: SimpleNamespace(platform="cpu"))
    choice = choose_backend(make_product(), "tpu")
    assert choice.rejected[KERNEL] == "the default device is cpu; expected a TPU"

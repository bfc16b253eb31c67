"""Kernel of weight gradients in the Pallas interpreter; compiled, it runs on GPUs only."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels.grouped_matmul import matmul_product, outer_product
from jax_moe_lb.kernels.operands import RowGroups
from jax_moe_lb.kernels.triton_outer import OUTER as TILE_OF_OUTER
from tests.kernels.backend_cases import outer_of, rejected, sums_by_group
from tests.layer_cases import make_mesh

NUM_ROWS, INNER, OUTER = 320, 256, 128
TRITON = "Triton kernel"

triton_outer = outer_of(TRITON, "cuda")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: SimpleNamespace(platform="gpu"))


def make_operands(dtype=jnp.bfloat16, columns=INNER):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(NUM_ROWS, n)), dtype) for n in (columns, OUTER))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "group_sizes",
    [(64, 128, 128), (0, 1, 0, 63, 65, 0), (0, 0), (NUM_ROWS,), (0, NUM_ROWS, 0)],
    ids=["whole tiles", "uneven", "no rows", "one group", "one of three"],
)
def test_sums_of_groups(dtype, group_sizes):
    rows, others = make_operands(dtype)
    used = sum(group_sizes)
    # Uninitialized rows may be NaN, and are not read.
    unwritten = (array.at[used:].set(jnp.nan) for array in (rows, others))
    sums = triton_outer(*unwritten, RowGroups(jnp.array(group_sizes, jnp.int32)), dtype=jnp.float32)
    np.testing.assert_allclose(sums, sums_by_group(rows, others, group_sizes), rtol=1e-5, atol=1e-4)


def test_sums_that_nobody_reads_are_not_written():
    """The interpreter fills results with NaN."""
    rows, others = make_operands()
    sizes, is_read = (64, 0, 0, 100), jnp.array([True, True, False, False])
    sums = triton_outer(rows, others, RowGroups(jnp.array(sizes, jnp.int32), is_read), parts=(2, 2))
    want = sums_by_group(rows, others, sizes)
    want[2] = np.nan
    np.testing.assert_allclose(np.concatenate(sums), want, rtol=1e-5, atol=1e-4)


def test_tiles_of_both_widths():
    rows, others = make_operands()
    group_sizes = (0, 100, 33, 0, 187)
    sums = triton_outer(others, rows, RowGroups(jnp.array(group_sizes, jnp.int32)), dtype=jnp.float32)
    assert rows.shape[1] % TILE_OF_OUTER.columns == 0 < others.shape[1] % TILE_OF_OUTER.columns
    np.testing.assert_allclose(sums, sums_by_group(others, rows, group_sizes), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("widths", [pytest.param((2880, 136), marks=pytest.mark.thorough), (130, 384), (130, 16)])
def test_the_last_tiles_overlap_the_previous_ones(widths):
    group_sizes, used = (45, 0, 35), 80
    rng = np.random.default_rng(1)
    rows, others = (jnp.asarray(rng.normal(size=(96, n)), jnp.bfloat16).at[used:].set(jnp.nan) for n in widths)
    sums = triton_outer(rows, others, RowGroups(jnp.array(group_sizes, jnp.int32)), dtype=jnp.float32)
    np.testing.assert_allclose(sums, sums_by_group(rows, others, group_sizes), rtol=1e-5, atol=1e-4)


def test_sums_in_parts():
    rows, others = make_operands()
    group_sizes = (100, 0, 33, 100)
    before = tuple(jnp.full((n, INNER, OUTER), 3.0) for n in (3, 1))
    sums = triton_outer(rows, others, RowGroups(jnp.array(group_sizes, jnp.int32)), sums=before, parts=(3, 1))
    assert tuple(len(part) for part in sums) == (3, 1)
    np.testing.assert_allclose(np.concatenate(sums), sums_by_group(rows, others, group_sizes) + 3, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_a_narrow_result_is_rounded_once():
    rows, others = make_operands()
    group_sizes = jnp.array([100, 200], jnp.int32)
    wide, narrow = (
        triton_outer(rows, others, RowGroups(group_sizes), dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)
    )
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.slow
def test_on_a_mesh():
    mesh = make_mesh((4,), ("expert",))
    rows, others = make_operands()
    group_sizes = jnp.tile(jnp.array([30, 0, 40], jnp.int32), 4)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("expert"), out_specs=PartitionSpec("expert"))
    def sums(rows, others, group_sizes):
        return triton_outer(rows, others, RowGroups(group_sizes), dtype=jnp.float32)

    each = [
        sums_by_group(rows[at : at + 80], others[at : at + 80], (30, 0, 40)) for at in range(0, NUM_ROWS, NUM_ROWS // 4)
    ]
    np.testing.assert_allclose(sums(rows, others, group_sizes), np.concatenate(each), rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_left_to_others():
    assert "; expected " in rejected(TRITON, outer_product(*make_operands(jnp.float32), 1, jnp.float32))


@pytest.mark.parametrize(
    ("compute_capability", "backend", "why"),
    [
        ("9.0", TRITON, "recorded at 584 TFLOP/s; not tokamax.ragged_dot (recorded at 282 TFLOP/s)"),
        ("10.0", "tokamax.ragged_dot", "recorded at 879 TFLOP/s"),
        # Without records, the first row of the table.
        ("10.3", "tokamax.ragged_dot", "tokamax is installed"),
    ],
)
def test_the_kernel_recorded_at_the_higher_rate_is_taken(compute_capability, backend, why, monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability=compute_capability)
    monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: device)
    monkeypatch.setattr(grouped_kernels, "has_tokamax", lambda: True)
    monkeypatch.setattr(grouped_kernels, "_tokamax", lambda product, left, *others: left)
    rows = jnp.zeros((128, 128), jnp.bfloat16)
    choice = grouped_kernels.choose_backend(matmul_product(rows, jnp.zeros((2, 128, 128), rows.dtype), False), "cuda")
    assert choice.backend.name == backend
    assert why in choice.why


@pytest.mark.parametrize("device", [("cpu", ""), ("gpu", "8.9")])
def test_it_is_for_gpus_with_enough_shared_memory(device, monkeypatch):
    on = SimpleNamespace(platform=device[0], compute_capability=device[1])
    monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: on)
    why = rejected(TRITON, outer_product(*make_operands(), 1, jnp.float32))
    assert why.startswith(f"the default device is {' '.join(device).rstrip()}; expected a GPU")


def test_a_jax_without_its_deprecated_backend_multiplies_by_blocks(monkeypatch):
    monkeypatch.setattr(grouped_kernels.importlib.util, "find_spec", lambda name: None)
    product = outer_product(*make_operands(), 1, jnp.float32)
    assert rejected(TRITON, product) == "this JAX has no Triton backend"
    assert grouped_kernels.choose_backend(product, "cuda").backend.name == "blocks of rows"

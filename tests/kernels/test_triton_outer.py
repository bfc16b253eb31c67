"""Kernel of weight gradients in the Pallas interpreter; compiled, it runs on GPUs only."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels.grouped_matmul import matmul_product, outer_product
from jax_moe_lb.kernels.operands import RowGroups
from jax_moe_lb.kernels.triton_outer import OUTER as TILE_OF_OUTER
from tests.kernels.backend_cases import outer_of, rejected, sums_by_group
from tests.layer_cases import make_mesh
from tests.marks import parametrize

NUM_ROWS, INNER, OUTER = 320, 256, 128
TRITON = "Triton kernel"
pytestmark = pytest.mark.usefixtures("triton_interpreted")

triton_outer = outer_of(TRITON, "cuda")


def make_operands(dtype=jnp.bfloat16, widths=(INNER, OUTER), num_rows=NUM_ROWS):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(num_rows, n)), dtype) for n in widths)


def groups_of(sizes, *is_read):
    return RowGroups(jnp.array(sizes, jnp.int32), *is_read)


def assert_sums(sums, rows, others, sizes, before=0):
    np.testing.assert_allclose(sums, sums_by_group(rows, others, sizes) + before, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@parametrize(
    "sizes, options",
    [
        *((sizes, {}) for sizes in [(64, 128, 128), (0, 1, 0, 63, 65, 0), (0, 0), (NUM_ROWS,), (0, NUM_ROWS, 0)]),
        # Tiles of the other width.
        ((0, 100, 33, 0, 187), {"widths": (OUTER, INNER)}),
        # The last tiles overlap the previous ones.
        *(((45, 0, 35), {"widths": widths, "num_rows": 96}) for widths in [(130, 384), (130, 16)]),
    ],
    [((0, 1, 0, 63, 65, 0), {"dtype": jnp.float16}), ((45, 0, 35), {"widths": (2880, 136), "num_rows": 96})],
)
def test_sums_of_groups(sizes, options):
    """Uninitialized rows may be NaN, and are not read."""
    rows, others = make_operands(**options)
    unwritten = (array.at[sum(sizes) :].set(jnp.nan) for array in (rows, others))
    assert_sums(triton_outer(*unwritten, groups_of(sizes), dtype=jnp.float32), rows, others, sizes)


def test_tiles_of_both_widths_are_chosen():
    assert INNER % TILE_OF_OUTER.columns == 0 < OUTER % TILE_OF_OUTER.columns


def test_sums_that_nobody_reads_are_not_written():
    """The interpreter fills results with NaN."""
    rows, others = make_operands()
    sizes, is_read = (64, 0, 0, 100), jnp.array([True, True, False, False])
    sums = triton_outer(rows, others, groups_of(sizes, is_read), parts=(2, 2))
    want = sums_by_group(rows, others, sizes)
    want[2] = np.nan
    np.testing.assert_allclose(np.concatenate(sums), want, rtol=1e-5, atol=1e-4)


def test_sums_in_parts():
    rows, others = make_operands()
    sizes, before = (100, 0, 33, 100), tuple(jnp.full((n, INNER, OUTER), 3.0) for n in (3, 1))
    sums = triton_outer(rows, others, groups_of(sizes), sums=before, parts=(3, 1))
    assert tuple(len(part) for part in sums) == (3, 1)
    assert_sums(np.concatenate(sums), rows, others, sizes, before=3)


@pytest.mark.slow
def test_a_narrow_result_is_rounded_once():
    rows, others = make_operands()
    wide, narrow = (triton_outer(rows, others, groups_of((100, 200)), dtype=one) for one in ("float32", "bfloat16"))
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

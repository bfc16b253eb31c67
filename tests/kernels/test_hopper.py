"""Hopper kernels in the Pallas interpreter with race detection; compiled, they run on GPUs only."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels import grouped_ffn
from jax_moe_lb.kernels.grouped_matmul import matmul_product, outer_product
from jax_moe_lb.kernels.hopper import ALIGNED_ROWS, TILE, RowTiles
from tests.kernels.backend_cases import matmul_of, named, outer_of

NUM_ROWS, INNER, OUTER = 384, 256, 128
HOPPER = "Hopper kernel"

hopper_matmul, hopper_outer = matmul_of(HOPPER), outer_of(HOPPER)
why_not = named(HOPPER).why_not_for

SIZES = {
    "uneven": (100, 0, 3, 129),
    "no rows": (0, 0),
    "all rows in one": (NUM_ROWS,),
    "one, and one of three": (0, 1, 0, 382, 1),
    "ends beside tiles": (7, 122, 123, 121, 11),
    "a last tile beyond the rows": (5, 250, 129),
}


def test_kernels_start_after_their_predecessor():
    """With programmatic dependent launch, a kernel could read group sizes that are not written yet."""
    rows, weights = jnp.zeros((NUM_ROWS, INNER), jnp.bfloat16), (jnp.zeros((2, INNER, OUTER), jnp.bfloat16),)
    sizes = jnp.asarray([100, 28], jnp.int32)
    for run, right in ((hopper_matmul, weights), (lambda *args: hopper_outer(*args, parts=(2,)), rows)):
        text = str(jax.make_jaxpr(run)(rows, right, sizes)).lower()
        assert "wgmma" in text
        assert "griddepcontrol" not in text


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    on_hopper(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    interpreter.reset_gpu_interpret_mode_state()


def on_hopper(monkeypatch, platform="gpu", compute_capability="9.0"):
    device = SimpleNamespace(platform=platform, compute_capability=compute_capability)
    monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: device)


def draw(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 4, dtype)


def unwritten_beyond(array, used):
    return array.at[used:].set(jnp.nan)


def in_parts(array, num_parts):
    return tuple(part for part in np.array_split(array, num_parts) if part.size)


def no_races():
    return not interpreter.get_races().races_found


def by_group(rows, others, group_sizes):
    ends = np.cumsum(group_sizes)
    rows, others = (np.asarray(array, np.float64) for array in (rows, others))
    return np.stack([rows[e - n : e].T @ others[e - n : e] for n, e in zip(group_sizes, ends, strict=True)])


def with_all_sizes(names, *every):
    """Parametrize with options and sizes; by default sizes are uneven."""
    return pytest.mark.parametrize(
        (*names, "sizes"),
        [
            pytest.param(
                *options,
                sizes,
                id=f"{name}-{'-'.join(getattr(option, '__name__', str(option)) for option in options)}",
                marks=() if name == "uneven" else pytest.mark.thorough,
            )
            for options in every
            for name, sizes in SIZES.items()
        ],
    )


@pytest.mark.slow
@with_all_sizes(
    ("num_parts", "transposed", "dtype"),
    (2, False, jnp.bfloat16),
    (1, True, jnp.float16),
    (2, True, jnp.bfloat16),
)
def test_products(sizes, num_parts, transposed, dtype):
    used, group_sizes = sum(sizes), jnp.array(sizes, jnp.int32)
    rows = unwritten_beyond(draw(NUM_ROWS, INNER, dtype=dtype), used)
    matrices = draw(len(sizes), INNER, OUTER, dtype=dtype, seed=1)
    parts = in_parts(matrices.mT if transposed else matrices, num_parts)
    got = hopper_matmul(rows, parts, group_sizes, transposed=transposed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    rows, matrices = (np.asarray(array, np.float64) for array in (rows[:used], matrices))
    want = np.einsum("ai,aio->ao", rows, matrices[group])
    np.testing.assert_allclose(np.asarray(got[:used], np.float64), want, rtol=1e-2, atol=1e-2)
    assert no_races()


@pytest.mark.slow
@with_all_sizes(("num_parts", "dtype"), (2, jnp.bfloat16), (1, jnp.float16))
def test_sums_of_groups(sizes, num_parts, dtype):
    rows, others = draw(NUM_ROWS, INNER, dtype=dtype), draw(NUM_ROWS, OUTER, dtype=dtype, seed=1)
    want, used = by_group(rows, others, sizes), sum(sizes)
    parts = tuple(map(len, in_parts(np.arange(len(sizes)), num_parts)))
    rows, others = (unwritten_beyond(array, used) for array in (rows, others))
    got = hopper_outer(rows, others, jnp.array(sizes, jnp.int32), parts=parts, dtype=jnp.float32)
    assert tuple(len(part) for part in got) == parts
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-5, atol=1e-4)
    assert no_races()


@pytest.mark.slow
def test_nothing_of_a_group_reaches_its_neighbours():
    """This includes NaN, as groups share blocks of rows."""
    sizes = jnp.array([70, 30, 90], jnp.int32)
    rows, others = draw(NUM_ROWS, INNER), draw(NUM_ROWS, OUTER, seed=1)
    bad = [array.at[70:100].set(jnp.inf) for array in (rows, others)]
    got = hopper_outer(*bad, sizes, parts=(3,), dtype=jnp.float32)[0]
    want = by_group(rows, others, (70, 30, 90))
    np.testing.assert_allclose(got[::2], want[::2], rtol=1e-5, atol=1e-4)
    products = hopper_matmul(bad[0], (draw(3, INNER, OUTER),), sizes, transposed=False)
    assert np.isfinite(np.asarray(products[:70], np.float32)).all()
    assert np.isfinite(np.asarray(products[100:190], np.float32)).all()


@pytest.mark.slow
def test_a_narrow_sum_is_rounded_once():
    rows, others = draw(NUM_ROWS, INNER), draw(NUM_ROWS, OUTER, seed=1)
    sizes = jnp.array([100, 200], jnp.int32)
    (wide,), (narrow,) = (
        hopper_outer(rows, others, sizes, parts=(2,), dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)
    )
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


tiles_of = jax.jit(RowTiles.of, static_argnums=1)


def cuts(num_groups, num_tiles):
    num_rows = num_tiles * TILE
    near = st.builds(lambda tile, rows: tile * TILE + rows, st.integers(0, num_tiles), st.integers(-9, 9))
    anywhere = st.one_of(st.integers(0, num_rows), near.map(lambda row: min(max(row, 0), num_rows)))
    return st.tuples(st.just(num_rows), st.lists(anywhere, min_size=num_groups, max_size=num_groups).map(sorted))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
# Use few shapes, each compiled once.
@given(st.one_of(cuts(1, 1), cuts(2, 1), cuts(5, 3), cuts(24, 8), cuts(24, 112)))
def test_each_row_is_of_one_tile(rows_and_ends):
    num_rows, ends = rows_and_ends
    sizes = np.diff(ends, prepend=0)
    tiles = jax.tree.map(np.asarray, tiles_of(jnp.array(sizes, jnp.int32), num_rows))
    group = np.full(num_rows, -1)
    for one, first, skipped, size in zip(*tiles, strict=True):
        assert size == 0 or (first % ALIGNED_ROWS == 0 and skipped >= 0 and skipped + size <= TILE)
        rows = slice(first + skipped, first + skipped + size)
        assert (group[rows] == -1).all()
        group[rows] = one
    np.testing.assert_array_equal(group[: sum(sizes)], np.repeat(np.arange(len(sizes)), sizes))
    assert (group[sum(sizes) :] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fused", "biased"),
    [
        pytest.param(False, True, marks=pytest.mark.thorough),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.thorough),
        pytest.param(True, True, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_experts_in_parts_equal_one_array(fused, biased, monkeypatch):
    """Home experts and replicas in separate arrays, forward and backward, with accumulated sums."""
    sizes = jnp.array(SIZES["uneven"], jnp.int32)
    experts = Experts(
        *(
            draw(4, *shape, seed=seed)
            for shape, seed in (((INNER, OUTER), 2), ((OUTER, INNER), 3), ((INNER, OUTER), 4))
        ),
        *((None, draw(4, OUTER, seed=5), draw(4, INNER, seed=6), draw(4, OUTER, seed=7)) if biased else ()),
    )
    experts = experts.fused() if fused else experts
    parts = tuple(jax.tree.map(lambda leaf, at=at: leaf[at], experts) for at in (slice(3), slice(3, 4)))
    rows, upstream = (unwritten_beyond(draw(NUM_ROWS, INNER, seed=seed), 232) for seed in (8, 9))
    weights = unwritten_beyond(draw(NUM_ROWS, 1, dtype=jnp.float32, seed=10), 232)
    before = jax.tree.map(lambda leaf: draw(*leaf.shape, dtype=jnp.float32, seed=11), experts)
    before_parts = tuple(jax.tree.map(lambda leaf, at=at: leaf[at], before) for at in (slice(3), slice(3, 4)))

    def both(experts, before):
        y = grouped_ffn.grouped_ffn(rows, experts, sizes)
        gradients = grouped_ffn.grouped_ffn_gradients(
            rows, weights, experts, sizes, upstream, jnp.float32, before, lambda after: experts
        )
        return y[:232], gradients[0][:232], gradients[1][:232], gradients[2]

    *want, want_sums = jax.jit(both)(experts, before)
    monkeypatch.setattr(grouped_ffn, "grouped_matmul", hopper_matmul)
    monkeypatch.setattr(grouped_ffn, "grouped_outer", hopper_outer)
    *got, sums = both(parts, before_parts)
    sums = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums)
    for a, b in zip(jax.tree.leaves((got, sums)), jax.tree.leaves((want, want_sums)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize(
    ("rows", "matrices", "why"),
    [
        (
            draw(NUM_ROWS, INNER, dtype=jnp.float32),
            draw(1, INNER, OUTER, dtype=jnp.float32),
            "operands are float32 and float32; expected bfloat16 or float16",
        ),
        (draw(NUM_ROWS + 8, INNER), draw(1, INNER, OUTER), "392 rows; expected a multiple of 128"),
        (draw(NUM_ROWS, INNER - 8), draw(1, INNER - 8, OUTER), "widths are 248 and 128; expected multiples of 128"),
        (draw(NUM_ROWS, INNER), draw(1, INNER, OUTER - 8), "widths are 256 and 120; expected multiples of 128"),
    ],
    ids=["float32", "rows", "inner", "outer"],
)
def test_what_does_not_fit_is_left_to_others(rows, matrices, why):
    others = jnp.zeros((rows.shape[0], matrices.shape[2]), rows.dtype)
    for product in (matmul_product(rows, (matrices,), False), outer_product(rows, others, (1,), jnp.float32)):
        assert why_not(product) == why


def test_nothing_is_multiplied_of_no_groups_or_of_one_array():
    rows, others = draw(NUM_ROWS, INNER), draw(NUM_ROWS, OUTER)
    assert why_not(outer_product(rows, others, (1, 0), jnp.float32)) == "an operand is empty"
    assert why_not(matmul_product(rows, draw(1, INNER, OUTER), False)).startswith("weights are in one array")
    assert why_not(outer_product(rows, others, 1, jnp.float32)).startswith("weights are in one array")


@pytest.mark.parametrize("device", [("cpu", ""), ("gpu", "8.0"), ("gpu", "10.0")])
def test_they_are_for_hopper_alone(device, monkeypatch):
    on_hopper(monkeypatch, *device)
    rows, others = draw(NUM_ROWS, INNER), draw(NUM_ROWS, OUTER)
    for product in (
        matmul_product(rows, (draw(1, INNER, OUTER),), False),
        outer_product(rows, others, (1,), jnp.float32),
    ):
        assert why_not(product).endswith("; expected compute capability 9.0")


def test_they_are_left_out_with_an_older_jax(monkeypatch):
    monkeypatch.setattr(grouped_kernels, "FIRST_WITH_HOPPER_KERNELS", (99,))
    product = matmul_product(draw(NUM_ROWS, INNER), (draw(1, INNER, OUTER),), False)
    assert why_not(product).endswith("; expected 99 or later")

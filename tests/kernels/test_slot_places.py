"""Places of copies by a running sum, and sums of rows, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.kernels.slot_places import _in_one_kernel, slot_places, sum_rows


def random_codes(kind: str, rng: np.random.Generator, rows: int, per_row: int, slots: int) -> np.ndarray:
    codes = rng.integers(0, slots + 1, (rows, per_row)).astype(np.int32)
    if kind == "one slot":
        codes[:] = slots
    if kind == "none":
        codes[:] = 0
    if kind == "few":
        codes[rng.random(codes.shape) < 0.9] = 0
    return codes


@pytest.mark.parametrize("kind", ["any", "one slot", "none", "few"])
def test_copies_are_sorted_by_slot_then_by_row(kind):
    """A stable sort gives the same order, also of rows that name a slot twice."""
    codes = random_codes(kind, np.random.default_rng(0), rows=13, per_row=3, slots=4)
    places = jax.jit(slot_places, static_argnums=(1, 2))(codes, 4, 41)
    flat = codes.reshape(-1)
    order = np.argsort(np.where(flat > 0, flat, 9), kind="stable")[: (flat > 0).sum()]
    np.testing.assert_array_equal(places.copy[: len(order)], order)
    np.testing.assert_array_equal(places.group_sizes, np.bincount(flat, minlength=5)[1:])
    want = np.full(flat.shape, 41)
    want[order] = np.arange(len(order))
    np.testing.assert_array_equal(places.place.reshape(-1), want)


@pytest.mark.slow
@pytest.mark.parametrize("form", [sum_rows, _in_one_kernel])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_are_wide_and_read_no_row_without_a_place(dtype, form):
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(20, 5)), dtype).at[15:].set(jnp.nan)
    place = rng.integers(-1, 15, (7, 3)).astype(np.int32)
    place[rng.random(place.shape) < 0.4] = 20
    weights = np.where((place < 0) | (place >= 20), np.nan, rng.normal(size=place.shape)).astype(np.float32)
    want = np.zeros((7, 5))
    for b, k in np.argwhere((place >= 0) & (place < 20)):
        want[b] += np.asarray(rows[place[b, k]], np.float64) * weights[b, k]
    got = form(rows, jnp.asarray(place), jnp.asarray(weights))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    without = np.where(np.isnan(weights), 0, 1).astype(np.float32)
    np.testing.assert_array_equal(form(rows, jnp.asarray(place)), form(rows, jnp.asarray(place), jnp.asarray(without)))


def test_sums_on_nvidia_gpus_are_one_reduction_of_gathered_rows():
    given = jnp.zeros((20, 5), jnp.bfloat16), jnp.zeros((7, 3), jnp.int32), jnp.zeros((7, 3))
    texts = [
        jax.jit(sum_rows).trace(*given).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")
    ]
    assert [text.count('stablehlo.gather"(%arg0') for text in texts] == [1, 3]
    assert ["stablehlo.reduce(" in text for text in texts] == [True, False]

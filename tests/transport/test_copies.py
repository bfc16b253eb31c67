"""Rows gathered or copied as words are unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Plan
from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words
from jax_moe_lb.transport.exchange import Receipt, inverse_order, rows_by_words, sending_order, to_sending_order


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("at", [[3, 0, 3, 6], []])
@pytest.mark.parametrize("width", [512, 100])
def test_rows_by_words_are_the_rows(dtype, at, width):
    rows = (jnp.arange(7 * width) % 97).reshape(7, width).astype(dtype)
    found = rows_by_words(rows, jnp.array(at, jnp.int32))
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows[np.array(at, int)])


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("bfloat16", (3, 256), (3, 2, 128)),
        ("float32", (3, 256), (3, 1, 256)),
        ("int8", (3, 512), (3, 4, 128)),
        ("bfloat16", (3, 128), (3, 128)),
        ("float32", (3, 1), (3, 1)),
        ("bfloat16", (0, 256), (0, 2, 128)),
        ("bfloat16", (3, 0), (3, 2, 0)),
    ],
)
def test_words_are_as_wide_as_a_tpu_has_them(dtype, shape, words):
    rows = jnp.arange(shape[0] * shape[1], dtype="float32").reshape(shape).astype(dtype)
    assert as_words(rows).shape == words
    np.testing.assert_array_equal(as_rows(as_words(rows)), rows)


def test_wider_words_stay_rows(x64):
    assert as_words(jnp.zeros((3, 256), "float64")).shape == (3, 256)


@pytest.mark.slow
def test_unrouted_copies_come_last_in_the_sending_order():
    plan = Plan(np.array([[0, -1], [1, -1]], np.int32), np.zeros((2, 2), np.int32), domain=2)
    experts = jnp.array([-1, 1, 0, -1, 0, 1], jnp.int32)
    going = jnp.array([[2, 0], [0, 2]], jnp.int32)
    order = np.asarray(sending_order(experts, going, plan))
    np.testing.assert_array_equal(order[:4], [2, 4, 1, 5])
    assert sorted(order[4:]) == [0, 3]


@pytest.mark.parametrize("per_token", [1, 3, 4])
def test_copies_are_gathered_without_selections_of_indices(per_token):
    order = jnp.asarray(np.random.default_rng(0).permutation(6 * per_token), jnp.int32)
    receipt = Receipt(
        rounds=jnp.int32(1), follows_plan=None, order=order, place=inverse_order(order), num_going=jnp.int32(order.size)
    )
    tokens = jnp.arange(6 * 8.0).reshape(6, 8)
    gather = jax.jit(lambda tokens, receipt: to_sending_order(tokens, receipt, per_token))
    np.testing.assert_array_equal(gather(tokens, receipt), np.asarray(tokens)[np.asarray(order) // per_token])
    # On GPUs a gather repeats the computation of its index for every few entries of a row.
    text = gather.trace(tokens, receipt).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.gather" in text
    assert not [name for name in ("select", "sign", "compare") if f"stablehlo.{name}" in text]

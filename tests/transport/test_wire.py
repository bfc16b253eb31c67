import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Buffers
from jax_moe_lb.transport import QuantizedTransfer, TwoPhase

E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (INT8, 1 / 254)])
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
def test_a_number_is_off_by_a_rounding_of_its_block(dtype, error, rows_dtype):
    """fp8 has 3 fraction bits, so rounding is up to 1/16 of the number. int8 is uniform over the block's range."""
    rows = jax.random.normal(jax.random.key(0), (64, 256)) * jnp.exp(jax.random.normal(jax.random.key(1), (64, 1)) * 8)
    rows = rows.at[3].set(0).astype(rows_dtype)
    wire = QuantizedTransfer(dtype, block=64)
    words = jax.jit(wire.encode)(rows)
    assert words.dtype == jnp.float32
    assert words.size * 4 == 64 * wire.row_bytes(256)
    got, want = (np.asarray(a, np.float64).reshape(64, 4, 64) for a in (wire.decode(words, rows.dtype), rows))
    largest = np.abs(want).max(-1, keepdims=True)
    # fp8 has subnormal numbers near 0, with the absolute error of the smallest.
    bound = error * np.maximum(np.abs(want), largest * 2**-6 if dtype == E4M3 else largest)
    assert (np.abs(got - want) <= bound * 1.01 + np.abs(want) * (2**-8 if rows_dtype == "bfloat16" else 1e-6)).all()
    assert np.abs(got - want).max() > 0


@pytest.mark.slow
def test_numbers_that_are_not_finite_stay_so():
    rows = jnp.ones((2, 64)).at[0, 5].set(jnp.nan).at[1, 7].set(jnp.inf)
    got = QuantizedTransfer(E4M3, block=32).decode(QuantizedTransfer(E4M3, block=32).encode(rows), jnp.float32)
    assert jnp.isnan(got[0, :32]).any()
    assert not jnp.isfinite(got[1, 7])
    np.testing.assert_array_equal(got[:, 32:], 1)


def test_no_rows():
    wire = QuantizedTransfer(INT8, block=32)
    words = wire.encode(jnp.zeros((0, 64)))
    assert words.shape == (0, wire.row_bytes(64) // 4)
    assert wire.decode(words, jnp.float32).shape == (0, 64)


def test_what_cannot_travel_so_is_refused():
    with pytest.raises(ValueError, match=r"QuantizedTransfer.dtype is float16; expected float8_e4m3fn or int8"):
        QuantizedTransfer(jnp.float16)
    with pytest.raises(ValueError, match=r"QuantizedTransfer.block is 6; expected a multiple of 4"):
        QuantizedTransfer(block=6)
    with pytest.raises(ValueError, match=r"QuantizedTransfer.block is 128; expected a divisor of the width, 64"):
        QuantizedTransfer().encode(jnp.ones((2, 64)))
    with pytest.raises(ValueError, match="expected None, as peer copies do not quantize rows"):
        TwoPhase(Buffers(1.5), transfer=QuantizedTransfer())


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-37])
def test_the_smallest_numbers_become_no_nan(dtype, largest):
    rows = jnp.full((1, 32), largest)
    got = QuantizedTransfer(dtype, block=32).decode(QuantizedTransfer(dtype, block=32).encode(rows), jnp.float32)
    np.testing.assert_allclose(got, rows, atol=1.2e-38)

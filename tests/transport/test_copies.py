"""Rows that are gathered word by word are the rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.transport.copies import rows_by_words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("at", [[3, 0, 3, 6], []])
def test_rows_by_words_are_the_rows(dtype, at):
    rows = jnp.arange(7 * 512, dtype=jnp.float32).reshape(7, 512).astype(dtype)
    found = rows_by_words(rows, jnp.array(at, jnp.int32))
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows[np.array(at, int)])

"""All forms of a gather and of a sum of rows have the same values."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from benchmarks.gpu import gathers
from benchmarks.gpu.comparison import TINY


@pytest.fixture(scope="module")
def arguments():
    return gathers._arguments(TINY)


@pytest.mark.parametrize("form", [gathers.SIGNED, gathers.WORDS, gathers.KERNEL])
def test_gathers_are_equal(monkeypatch, arguments, form):
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    found, expected = (gathers.GATHERS[one](*arguments["gather"], TINY.per_token) for one in (form, gathers.LIBRARY))
    np.testing.assert_array_equal(*(np.asarray(one.astype(jnp.float32)) for one in (found, expected)))


def test_sums_are_equal(monkeypatch, arguments):
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    found, expected = (gathers.SUMS[form](*arguments["sum"]) for form in (gathers.KERNEL, gathers.LIBRARY))
    np.testing.assert_allclose(*(np.asarray(one.astype(jnp.float32)) for one in (found, expected)), rtol=1e-2)


def test_the_library_is_compared_with_the_fastest_form():
    rows = [["tiny", "sum", form, us, None, None, ""] for form, us in ((gathers.LIBRARY, 3.0), (gathers.KERNEL, 2.0))]
    assert gathers._ratios(rows) == {"tiny, sum": 1.5}

"""Load metrics under the names of the literature."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Stats


@pytest.mark.parametrize("xp", [np, jnp], ids=["host", "device"])
def test_max_violation_is_that_of_the_experts_of_each_group(xp):
    counts = np.array([[[4, 0, 2], [4, 2, 0]], [[1, 1, 1], [1, 1, 1]], np.zeros((2, 3))], np.int32)
    stats = SimpleNamespace(counts=xp.asarray(counts), imbalance_after=xp.ones(3, np.float32))
    # Experts of the first group get 8, 2 and 2 copies, 4 on average.
    np.testing.assert_allclose(Stats.max_violation.fget(stats), [1.0, 0.0, 0.0])
    assert Stats.overload_factor.fget(stats) is stats.imbalance_after

"""Drawn counts have the imbalance that was asked for, and are counts that routing can have."""

import numpy as np
import pytest

from jax_moe_lb.sim import ModelShape, skewed_counts


def shape(experts, per_token, tokens):
    return ModelShape(1, 8, 8, experts, per_token, tokens)


@pytest.mark.parametrize(
    ("experts", "per_token", "ranks", "imbalance"), [(64, 8, 8, 1.2), (64, 2, 16, 4.0), (16, 2, 2, 1.9), (8, 2, 8, 3.0)]
)
def test_ranks_have_the_wanted_imbalance(experts, per_token, ranks, imbalance):
    counts = skewed_counts(shape(experts, per_token, 2048), ranks, imbalance, layers=3, seed=1)
    load = counts.sum(1).reshape(3, ranks, -1).sum(2)
    np.testing.assert_allclose(load.max(1) / load.mean(1), imbalance, rtol=0.05)
    assert (counts.sum(2) == 2048 * per_token).all()
    assert counts.min() >= 0
    assert counts.max() <= 2048
    assert (counts[0] != counts[1]).any()
    np.testing.assert_array_equal(counts, skewed_counts(shape(experts, per_token, 2048), ranks, imbalance, 3, 1))


def test_at_imbalance_one_all_experts_get_the_same():
    assert (skewed_counts(shape(16, 2, 128), 4, 1.0, 1) == 16).all()


def test_what_no_routing_has_is_refused():
    with pytest.raises(ValueError, match=r"imbalance is 3.0; expected at most 2.00, as a token chooses 2 different"):
        skewed_counts(shape(16, 2, 64), 2, 3.0, 1)
    with pytest.raises(ValueError, match="num_experts is 10; expected a positive multiple of the 4 ranks"):
        skewed_counts(shape(10, 2, 64), 4, 1.0, 1)

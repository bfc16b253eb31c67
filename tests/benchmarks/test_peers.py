"""Layers of other projects are correct, and fits recover known exponents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled.peer_layers import dense_one_hot, gshard, over_ranks, ragged_dot_ring
from benchmarks.layer.workloads import WORKLOADS
from benchmarks.plans.break_even import INNER, SKEWS, break_even
from benchmarks.plans.times import exponent
from jax_moe_lb import TopK
from tests.layer_cases import Case, make_mesh
from tests.oracle import dense_moe

CASE = Case()
ZIPF = next(workload for workload in WORKLOADS if workload.name == "zipf")


@pytest.mark.slow
@pytest.mark.parametrize("of_rank", [dense_one_hot, ragged_dot_ring, functools.partial(gshard, factor=8.0)])
def test_layers_that_drop_nothing_equal_the_dense_one(of_rank):
    x, kernel, experts = _arguments()
    y = jax.jit(over_ranks(make_mesh((4,), ("expert",)), of_rank, CASE.per_tok))(x, kernel, experts)
    np.testing.assert_allclose(y, dense_moe(x, kernel, experts, TopK(CASE.per_tok)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gshard_serves_as_many_copies_as_fit():
    x, kernel, experts = _arguments()
    mesh = make_mesh((4,), ("expert",))
    y = jax.jit(over_ranks(mesh, functools.partial(gshard, factor=1.0), CASE.per_tok))(x, kernel, experts)
    chosen = np.asarray(TopK(CASE.per_tok)(x @ kernel).experts).reshape(4, CASE.num_tokens, CASE.per_tok)
    capacity = CASE.num_tokens * CASE.per_tok // CASE.num_experts
    whole = np.zeros(chosen.shape[:2], bool)
    for rank, of_rank in enumerate(chosen):
        room = np.full(CASE.num_experts, capacity)
        kept = np.zeros(of_rank.shape, bool)
        for choice, token in np.ndindex(of_rank.T.shape):
            expert = of_rank[token, choice]
            kept[token, choice] = room[expert] > 0
            room[expert] -= 1
        whole[rank] = kept.all(1)
    want = dense_moe(x, kernel, experts, TopK(CASE.per_tok))
    same = np.isclose(y, want, rtol=1e-4, atol=1e-5).all(1)
    assert (same == whole.reshape(-1)).all()
    assert 0 < same.sum() < len(same)


def test_powers_are_found_again():
    sizes = np.array([8, 16, 64, 128, 512])
    assert exponent(sizes.tolist(), (3e-6 * sizes**1.5).tolist()) == pytest.approx(1.5, rel=1e-9)


def test_break_even_is_where_it_stays_faster():
    ratios = np.full((len(SKEWS), 4), 0.5)
    # Faster first, then slower, then faster permanently; in the second row never permanently.
    ratios[0], ratios[1] = [0.9, 1.2, 0.8, 0.7], [0.9, 0.8, 0.7, 1.0]
    guarded = np.minimum(ratios, 1.0)
    rows = break_even({INNER[0]: ratios}, {INNER[0]: guarded}, (1, 2, 4, 8)).rows
    assert [row[3] for row in rows[:3]] == ["4", "never", "1"]
    assert rows[0][4:] == [1.2, 0.7, 1.0, 0.7]


def _arguments():
    x, _ = CASE.tokens(ZIPF, 4, jnp.float32)
    return x, *CASE.params(jnp.float32)

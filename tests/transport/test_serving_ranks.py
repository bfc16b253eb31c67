"""Ranks that serve choices: counts of each expert and rank are exact, and copies prefer ranks that entries visit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.transport.serving_ranks import in_order, preferring

ENTRIES, CHOICES, EXPERTS, RANKS = 96, 4, 12, 4


def drawn(seed):
    """Return experts with absent and repeated choices, and copies of each expert for each rank."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.gumbel(size=(ENTRIES, EXPERTS)), 1)[:, :CHOICES]
    experts[rng.random(experts.shape) < 0.1] = -1
    experts[::7, 1] = experts[::7, 0]
    copies = np.bincount(experts[experts >= 0], minlength=EXPERTS)
    # Experts of a third of the slots have one rank, and others up to all.
    shares = rng.random((EXPERTS, RANKS)) * (rng.random((EXPERTS, RANKS)) < 0.5)
    shares[::3] = np.eye(RANKS)[np.arange(EXPERTS)[::3] % RANKS]
    shares[np.arange(EXPERTS), np.arange(EXPERTS) % RANKS] += 0.1
    going = np.stack(
        [rng.multinomial(n, p) for n, p in zip(copies, shares / shares.sum(1, keepdims=True), strict=True)]
    )
    return jnp.asarray(experts, jnp.int32), jnp.asarray(going, jnp.int32)


def rows(rank):
    return sum(len(set(entry) - {-1}) for entry in rank.tolist())


@pytest.mark.parametrize("choose", [in_order, preferring])
def test_every_rank_gets_its_copies_of_every_expert(choose):
    for seed in range(5):
        experts, going = drawn(seed)
        rank = np.asarray(jax.jit(choose)(experts, going))
        experts, going = np.asarray(experts), np.asarray(going)
        np.testing.assert_array_equal(rank >= 0, experts >= 0)
        found = np.zeros_like(going)
        np.add.at(found, (experts[experts >= 0], rank[experts >= 0]), 1)
        np.testing.assert_array_equal(found, going)


@pytest.mark.slow
def test_preferring_saves_rows():
    """Entries that name other experts of a rank go there with their shared experts, too."""
    saved = [1 - rows(preferring(*drawn(seed))) / rows(in_order(*drawn(seed))) for seed in range(5)]
    assert min(saved) > 0.05


@pytest.mark.slow
def test_no_choice_of_an_expert_with_one_rank_moves():
    experts, going = drawn(0)
    going = jnp.eye(RANKS, dtype=jnp.int32)[np.arange(EXPERTS) % RANKS] * going.sum(1, keepdims=True)
    np.testing.assert_array_equal(preferring(experts, going), in_order(experts, going))


@pytest.mark.slow
def test_no_entries_and_no_routed_choices():
    none = jnp.full((3, 2), -1, jnp.int32)
    for choose in (in_order, preferring):
        assert (choose(none, jnp.zeros((2, 2), jnp.int32)) == -1).all()

"""Properties of `plan_relocation` on the host."""

import numpy as np
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.planners import apply_relocation, domain_lower_bound, moved_experts, plan_relocation

TOPOLOGY = Topology.flat(8, 4)
STAY = np.tile(np.arange(32, dtype=np.int32), (3, 1))


def skewed(seed=0):
    return np.sort(np.random.default_rng(seed).lognormal(0, 1, (3, 32)))


def homes_of(loads, **options):
    return apply_relocation(STAY, plan_relocation(loads, TOPOLOGY, **options))


def test_domains_are_level_and_every_place_is_taken_once():
    loads = skewed()
    homes = homes_of(loads)
    np.testing.assert_array_equal(np.sort(homes, 1), STAY)
    assert domain_lower_bound(loads, STAY, TOPOLOGY).min() > 1.5
    assert domain_lower_bound(loads, homes, TOPOLOGY).max() < 1.01
    ranks = np.take_along_axis(loads, np.argsort(homes, 1), 1).reshape(3, 8, 4).sum(2)
    assert (ranks.max(1) / ranks.mean(1)).max() < 1.6


def test_hand_made_case():
    """Eight experts on two domains of two ranks: 7 + 3 + 1 + 1 against 5 + 4 + 2 + 1 is uneven, 12 each is even."""
    loads = np.array([[7.0, 5, 4, 3, 2, 1, 1, 1]])
    homes = apply_relocation(np.arange(8)[None], plan_relocation(loads, Topology.flat(4, 2)))
    assert domain_lower_bound(loads, homes, Topology.flat(4, 2)) == [1.0]


def test_the_permutation_starts_from_where_experts_are():
    """From any homes the plan is the same, and a second one moves no experts."""
    loads, now = skewed(), np.random.default_rng(1).permuted(STAY, axis=1)
    permutation = plan_relocation(loads, TOPOLOGY, now)
    then = apply_relocation(now, permutation)
    np.testing.assert_array_equal(then, homes_of(loads))
    at_place = np.argsort(now, 1)  # the expert at each place
    np.testing.assert_array_equal(np.argsort(then, 1), np.take_along_axis(at_place, permutation, 1))
    assert not moved_experts(plan_relocation(loads, TOPOLOGY, then), TOPOLOGY).any()


def test_several_workloads_are_levelled_together():
    both = np.stack([skewed(), skewed()[:, ::-1] ** 1.5])
    together = homes_of(both)
    worst = max(domain_lower_bound(loads, together, TOPOLOGY).max() for loads in both)
    assert worst < 1.1 < domain_lower_bound(both[1], homes_of(both[0]), TOPOLOGY).max() + 0.1


def test_groups_are_spread_over_domains():
    loads = np.random.default_rng(0).lognormal(0, 1, (3, 32))

    def unlike(homes):
        """Return differences of the groups' loads between the two domains."""
        signed = np.where(homes < 16, loads, -loads)
        return np.square(signed.reshape(3, 4, 8).sum(2)).sum()

    assert unlike(homes_of(loads, num_groups=4)) < 0.2 * unlike(homes_of(loads))


def test_layers_whose_gain_is_small_stay():
    loads = skewed()
    loads[1] = 1.0
    moved = moved_experts(plan_relocation(loads, TOPOLOGY, min_gain=0.1), TOPOLOGY)
    assert moved[0] > 0
    assert moved[1] == 0
    assert not moved_experts(plan_relocation(loads, TOPOLOGY, min_gain=0.9), TOPOLOGY).any()


def test_one_domain_levels_ranks():
    loads = skewed()
    topology = Topology.flat(8)
    homes = apply_relocation(STAY, plan_relocation(loads, topology, min_gain=0.05))
    ranks = np.take_along_axis(loads, np.argsort(homes, 1), 1).reshape(3, 8, 4).sum(2)
    before = loads.reshape(3, 8, 4).sum(2)
    assert (ranks.max(1) < 0.8 * before.max(1)).all()


def test_no_load_at_all_moves_nothing():
    assert not moved_experts(plan_relocation(np.zeros((3, 32)), TOPOLOGY), TOPOLOGY).any()


REFUSED = {
    "shape": ((np.ones(32), TOPOLOGY), {}, r"loads has shape \[32\]; expected"),
    "negative": ((np.full((1, 32), -1.0), TOPOLOGY), {}, "loads of layer 0, expert 0 is -1.0; expected"),
    "nan": ((np.full((1, 32), np.nan), TOPOLOGY), {}, "loads of layer 0, expert 0 is nan; expected"),
    "experts": ((np.ones((1, 12)), TOPOLOGY), {}, "num_experts is 12; expected a positive multiple of the 8 ranks"),
    "groups": ((np.ones((1, 32)), TOPOLOGY), {"num_groups": 5}, "num_groups is 5; expected a divisor of the 32"),
    "gain": ((np.ones((1, 32)), TOPOLOGY), {"min_gain": 1.0}, "min_gain is 1.0; expected"),
    "homes": ((np.ones((3, 32)), TOPOLOGY, STAY[:2]), {}, r"homes is int32\[2, 32\]; expected integers"),
    "twice": ((np.ones((3, 32)), TOPOLOGY, STAY // 2), {}, "homes of layer 0 has 0 2 times; expected a permutation"),
    "outside": ((np.ones((3, 32)), TOPOLOGY, STAY + 1), {}, "homes of layer 0 has 32 1 times; expected a permutation"),
}


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(args, options, message):
    with pytest.raises(ValueError, match=message):
        plan_relocation(*args, **options)

import copy
import os
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Plan, Topology
from jax_moe_lb.core import (
    Split,
    check_plan,
    imbalance,
    load,
    nearest_first,
    plain_plan,
    rows_between,
    straggler,
    traffic,
)
from jax_moe_lb.core.plan import replica_copies
from jax_moe_lb.core.split import arrivals
from jax_moe_lb.core.validation import check_plans, fallback_to_plain
from tests.oracle import random_plan, split


@st.composite
def planned(draw):
    """Return counts and a random legal plan for them."""
    domains, members = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_ranks, home = domains * members, draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, draw(st.sampled_from([1, 5, 1000])), (num_ranks, num_ranks * home), endpoint=True)
    counts = (counts * (rng.random(counts.shape) < 0.7)).astype(np.int32)
    placement, quota = random_plan(rng, counts, home + draw(st.integers(0, 3)), members)
    return counts, Plan(placement, quota, domain=members)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(planned())
def test_nearest_first_is_the_split_rule(case):
    counts, plan = case
    check_plan(plan, counts)
    expected = split(counts, plan.quota, plan.domain)
    for rank in range(plan.num_ranks):
        np.testing.assert_array_equal(nearest_first(counts, plan.quota, rank, plan.domain), expected[rank])
        np.testing.assert_array_equal(arrivals(counts, plan.quota, rank, plan.domain), expected[:, :, rank].T)


def test_own_rank_own_domain_own_offset_then_anywhere():
    counts = np.array([[6, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], np.int32)
    quota = np.array([[1, 2, 2, 1], [0] * 4, [0] * 4, [0] * 4], np.int32)
    assert nearest_first(counts, quota, 0, 2)[0].tolist() == [1, 2, 2, 1]
    far = np.array([[0, 0, 0, 6], [0] * 4, [0] * 4, [0] * 4], np.int32)
    assert nearest_first(counts, far, 0, 2)[0].tolist() == [0, 0, 0, 6]
    # Two sources compete for rank 2: rank 0, of equal offset, comes first; rank 1 takes the rest.
    counts[1, 0] = 2
    quota = np.array([[0, 0, 6, 2], [0] * 4, [0] * 4, [0] * 4], np.int32)
    assert nearest_first(counts, quota, 0, 2)[0].tolist() == [0, 0, 6, 0]
    assert nearest_first(counts, quota, 1, 2)[0].tolist() == [0, 0, 0, 2]


def test_load_straggler_imbalance():
    plan = plain_plan(np.array([[3, 1], [2, 0]], np.int32), Topology.flat(2))
    assert load(plan).tolist() == [5, 1]
    assert straggler(load(plan)) == 2
    assert imbalance(load(plan)) == pytest.approx(5 / 3)
    assert imbalance(np.zeros(4, np.int32)) == 1


def test_traffic():
    counts = np.array([[4, 2], [2, 8]], np.int32)
    placement = np.array([[0, 1], [1, -1]], np.int32)
    moved = traffic(Plan(placement, np.array([[6, 0], [5, 5]], np.int32), domain=2), counts)
    # Rank 0 keeps 4 + 2, rank 1 keeps 5: the other 5 of 16 copies move; rank 1 sends expert 1 to rank 0.
    assert (int(moved.rows), int(moved.replicas), moved.fan_out.tolist()) == (5, 1, [0, 1])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_plain_plan_serves_at_home(workload):
    counts = workload.counts(0, 4, 30, 8, 2)
    plan = plain_plan(counts, Topology.flat(4, 2), slots=3)
    check_plan(plan, counts)
    assert load(plan).tolist() == counts.reshape(4, 4, 2).sum((0, 2)).tolist()
    assert plan.domain == 2


COUNTS = np.full((4, 8), 3, np.int32)


def broken(field, index, value):
    plan = plain_plan(COUNTS, Topology.flat(4, 2), slots=3)
    arrays = {"placement": plan.placement.copy(), "quota": plan.quota.copy()}
    arrays[field][index] = value
    return Plan(arrays["placement"], arrays["quota"], domain=2)


ILLEGAL = {
    "loses tokens": (broken("quota", (5, 2), 11), r"quota of expert 5 sums to 11 tokens; expected the 12 of counts"),
    "negative": (broken("quota", (5, 2), -1), r"quota of expert 5, rank 2 is -1; expected at least 0"),
    "empty slot": (broken("quota", (5, 0), 1), r"quota of expert 5, rank 0 is 1; expected 0: no slot"),
    "no such expert": (broken("placement", (1, 2), 8), r"placement of rank 1, slot 2 is 8; expected an expert below 8"),
    "home moved": (broken("placement", (1, 0), 0), r"placement of rank 1, slot 0 is 0; expected its home expert 2"),
    "twice": (broken("placement", (1, 2), 2), r"placement puts expert 2 2 times on rank 1"),
    "other domain": (
        broken("placement", (1, 2), 7),
        r"slot 2 is expert 7, whose home is rank 3; expected one from inside",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_plans_are_refused_on_the_host_and_in_jit(name):
    plan, message = ILLEGAL[name]
    with pytest.raises(ValueError, match=message):
        check_plan(plan, COUNTS)
    legal_one = plain_plan(COUNTS, Topology.flat(4, plan.domain), plan.slots)
    check_plans([legal_one] * 2, [COUNTS] * 2)
    with pytest.raises(ValueError, match=message):
        check_plans([legal_one, plan], [COUNTS] * 2)
    plain, legal = jax.jit(fallback_to_plain)(jax.tree.map(jnp.asarray, plan), jnp.asarray(COUNTS))
    assert not legal
    check_plan(plain, COUNTS)
    np.testing.assert_array_equal(load(plain), COUNTS.sum(0).reshape(4, 2).sum(1))


@pytest.mark.slow
def test_a_legal_plan_passes_unchanged_through_jit():
    plan = plain_plan(jnp.asarray(COUNTS), Topology.flat(4, 2), slots=3)
    guarded, legal = jax.jit(fallback_to_plain)(plan, jnp.asarray(COUNTS))
    assert legal
    assert (guarded.quota == plan.quota).all()
    assert (guarded.placement == plan.placement).all()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(planned(), st.data())
def test_any_change_of_a_quota_is_refused(case, data):
    counts, plan = case
    expert, rank = data.draw(st.integers(0, plan.num_experts - 1)), data.draw(st.integers(0, plan.num_ranks - 1))
    quota = plan.quota.copy()
    quota[expert, rank] += data.draw(st.integers(-3, 3).filter(bool))
    with pytest.raises(ValueError, match=rf"plan.quota of expert {expert}"):
        check_plan(Plan(plan.placement, quota, domain=plan.domain), counts)


def test_relay_and_rails_are_checked():
    plan = plain_plan(COUNTS, Topology.flat(4, 2), slots=3)
    placement = plan.placement.copy()
    placement[0, 2] = 2
    relay = np.repeat(np.arange(4, dtype=np.int32)[:, None], 3, axis=1)
    relay[0, 2] = 1
    check_plan(Plan(placement, plan.quota, relay=relay, domain=2), COUNTS)
    relay[0, 2] = 3
    with pytest.raises(ValueError, match=r"plan.relay of rank 0, slot 2 is 3; expected a rank holding expert 2"):
        check_plan(Plan(placement, plan.quota, relay=relay, domain=2), COUNTS)
    # Experts 2 and 3 live on rank 1, so rank 0 cannot copy expert 2 from itself.
    relay[0, 2] = 0
    looped = Plan(placement, plan.quota, relay=relay, domain=2)
    with pytest.raises(ValueError, match=r"plan.relay of rank 0, slot 2 is 0; expected a chain of relays from"):
        check_plan(looped, COUNTS)
    assert not jax.jit(fallback_to_plain)(jax.tree.map(jnp.asarray, looped), jnp.asarray(COUNTS))[1]
    rails = np.stack([split(COUNTS, plan.quota, 2).sum(1)] * 2, -1) // 2
    check_plan(Plan(plan.placement, plan.quota, rails=rails.astype(np.int32), domain=2), COUNTS)
    rails[1, 3, 0] += 1
    with pytest.raises(ValueError, match=r"plan.rails from rank 1 to rank 3 sums to 7 tokens; expected 6,"):
        check_plan(Plan(plan.placement, plan.quota, rails=rails.astype(np.int32), domain=2), COUNTS)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones(4, np.int32), r"counts has shape \(4,\); expected \[R, E\]"),
        (np.where(np.eye(4, 8, 1, bool), -2, 3), r"counts of rank 0, expert 1 is -2; expected at least 0 tokens"),
        (np.full((4, 8), 2**27), r"counts sum to 4294967296 tokens; expected at most 2147483647"),
    ],
)
def test_bad_counts_are_refused(counts, message):
    plan = plain_plan(COUNTS, Topology.flat(4, 2))
    with pytest.raises(ValueError, match=message):
        check_plan(plan, counts)


def test_a_plan_of_negative_counts_is_refused():
    with pytest.raises(ValueError, match="counts of rank 1, expert 0 is -1; expected at least 0 tokens"):
        plain_plan(np.array([[3, 1], [-1, 0]], np.int32), Topology.flat(2))


@pytest.mark.parametrize(
    ("shape", "slots", "message"),
    [
        ((4, 6), None, r"num_experts is 6; expected a positive multiple of the 4 ranks"),
        ((4, 0), None, r"num_experts is 0; expected a positive multiple"),
        ((4, 8), 1, r"slots is 1; expected 2, a rank's home experts, to 8, all experts"),
        ((4, 8), 9, r"slots is 9; expected 2, a rank's home experts, to 8, all experts"),
    ],
)
def test_bad_shapes_are_refused(shape, slots, message):
    with pytest.raises(ValueError, match=message):
        plain_plan(np.zeros(shape, np.int32), Topology.flat(4, 2), slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"placement": np.zeros((3, 3), np.int32)},
            r"plan.placement has shape \(3, 3\); expected \[4, S\] with S >= 2",
        ),
        ({"quota": np.zeros((8, 3), np.int32)}, r"plan.quota has shape \(8, 3\); expected \[E, R\] = \(8, 4\)"),
        ({"relay": np.zeros((4, 2), np.int32)}, r"plan.relay has shape \(4, 2\); expected \(4, 3\), the shape of"),
        ({"rails": np.zeros((4, 3, 2), np.int32)}, r"plan.rails has shape \(4, 3, 2\); expected \[4, 4, N\]"),
        ({"domain": 3}, r"plan.domain is 3; expected a divisor of the 4 ranks"),
    ],
)
def test_plans_of_the_wrong_shape_are_refused(change, message):
    plan = copy.copy(plain_plan(COUNTS, Topology.flat(4, 2), slots=3))
    for name, value in change.items():
        # Bypass the constructor, whose annotations are checked in tests.
        object.__setattr__(plan, name, value)
    with pytest.raises(ValueError, match=message):
        check_plan(plan, COUNTS)


def saved_plan(*leading):
    """Return a plan with all optional fields and distinct array entries."""

    def numbers(*shape):
        return np.arange(np.prod(leading + shape), dtype=np.int32).reshape(*leading, *shape)

    arrays = {"placement": numbers(4, 3), "quota": numbers(8, 4), "relay": numbers(4, 3), "rails": numbers(4, 4, 2)}
    return Plan(**arrays, domain=2, split=Split("proportional", locality=False))


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(leaf, np.ndarray)
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", ["plan.npz", "plan"])
def test_a_saved_plan_comes_back_whole(tmp_path, leading, name):
    saved_plan(*leading).save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert_same(Plan.load(str(tmp_path / name)), saved_plan(*leading))


def test_a_plan_on_a_device_comes_back_as_numpy_arrays(tmp_path):
    plan = plain_plan(COUNTS, Topology.flat(4, 2), slots=3)
    jax.tree.map(jnp.asarray, plan).save(tmp_path / "plan.npz")
    assert_same(Plan.load(tmp_path / "plan.npz"), plan)


def test_saving_replaces_a_file_and_what_a_link_points_to(tmp_path):
    (tmp_path / "old.npz").write_bytes(b"old")
    (tmp_path / "link.npz").symlink_to("old.npz")
    saved_plan().save(tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert_same(Plan.load(tmp_path / "old.npz"), saved_plan())


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    saved_plan().save(tmp_path / "plan.npz")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        plain_plan(COUNTS, Topology.flat(4, 2)).save(tmp_path / "plan.npz")
    assert os.listdir(tmp_path) == ["plan.npz"]
    assert_same(Plan.load(tmp_path / "plan.npz"), saved_plan())


def test_saving_where_no_file_can_be(tmp_path):
    with pytest.raises(FileNotFoundError):
        saved_plan().save(tmp_path / "missing" / "plan.npz")
    with pytest.raises(IsADirectoryError):
        saved_plan().save(tmp_path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "missing.npz")
    saved_plan().save("/dev/null")


BAD_ARRAYS = {
    "no quota": ({"quota": None}, r"quota is missing"),
    "no split": ({"split_tier": None}, r"split_tier is missing"),
    "float placement": ({"placement": np.ones((4, 3))}, r"placement is float64\[4, 3\]; expected integers"),
    "bool rails": ({"rails": np.ones((4, 4, 2), bool)}, r"rails is bool\[4, 4, 2\]; expected integers"),
    "flat placement": ({"placement": np.ones(4, int)}, r"placement is int64\[4\]; expected \[..., R, S\]"),
    "ranks of quota": ({"quota": np.ones((8, 3), int)}, r"quota is int64\[8, 3\]; expected \[..., E, R\] beside"),
    "flat quota": ({"quota": np.ones(8, int)}, r"quota is int64\[8\]; expected \[..., E, R\]"),
    "layers of quota": ({"quota": np.ones((2, 8, 4), int)}, r"quota is int64\[2, 8, 4\]"),
    "slots of relay": ({"relay": np.ones((4, 2), int)}, r"relay is int64\[4, 2\]; expected \[..., R, S\]"),
    "ranks of rails": ({"rails": np.ones((4, 3, 2), int)}, r"rails is int64\[4, 3, 2\]; expected \[..., R, R, N\]"),
    "number for rails": ({"rails": np.int32(1)}, r"rails is int32\[\]"),
    "domains": ({"domain": np.array([2, 2])}, r"domain is int64\[2\]; expected an integer without dimensions"),
    "half a domain": ({"domain": 0.5}, r"domain is float64\[\]; expected an integer"),
    "tier in bytes": ({"split_tier": b"nearest"}, r"split_tier is \|S7\[\]; expected a word"),
    "unknown tier": ({"split_tier": "far"}, r"split_tier is 'far'; expected 'nearest' or 'proportional'"),
    "locality in words": ({"split_locality": "yes"}, r"split_locality is <U3\[\]; expected a bool"),
    "objects": ({"rails": np.array([{}], object)}, r"damaged or not an .npz file"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_files_that_hold_no_plan_are_refused(tmp_path, name):
    change, message = BAD_ARRAYS[name]
    saved_plan().save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as file:
        arrays = {key: value for key, value in ({**file} | change).items() if value is not None}
    np.savez(tmp_path / "plan.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(tmp_path / "plan.npz")
    assert str(tmp_path / "plan.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_files_and_pickles_are_refused(tmp_path):
    path = tmp_path / "plan.npz"
    saved_plan(20).save(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = [b"", b"PK", whole[:middle], whole[:middle] + bytes(9) + whole[middle + 9 :], pickle.dumps(saved_plan())]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"plan.npz: damaged or not an .npz file"):
            Plan.load(path)
    np.save(tmp_path / "plan.npy", COUNTS)
    with pytest.raises(ValueError, match=r"plan.npy: placement is missing"):
        Plan.load(tmp_path / "plan.npy")


def test_quotas_that_wrap_round_in_32_bits_are_refused():
    """Host sums are 64-bit; in a program, no sum of wrong quotas matches by overflow."""
    counts = np.zeros((4, 4), np.int32)
    counts[0, 0] = 8
    plan = plain_plan(counts, Topology.flat(4))
    wide = plan.quota.astype(np.int64)
    wide[0, 0] = 2**32 + 8
    with pytest.raises(ValueError, match=r"plan.quota of expert 0 sums to \d+ tokens; expected the 8 of counts"):
        check_plan(replace(plan, quota=wide), counts)
    assert not jax.jit(lambda c: fallback_to_plain(replace(plan, quota=wide), c)[1])(counts)


def test_many_large_quotas_do_not_sum_to_what_is_expected():
    counts = np.zeros((8, 8), np.int32)
    counts[0, 0] = 2**30
    placement = np.full((8, 2), -1, np.int32)
    placement[:, 0], placement[1:, 1] = np.arange(8), 0
    quota = np.zeros((8, 8), np.int32)
    quota[0, :5] = 2**30  # 5 * 2**30 is 2**30 in 32 bits
    plan = Plan(placement, quota, domain=8)
    with pytest.raises(ValueError, match=r"plan.quota of expert 0 sums to 5368709120 tokens; expected the 1073741824"):
        check_plan(plan, counts)
    assert not jax.jit(fallback_to_plain)(plan, counts)[1]


def test_counts_beyond_32_bits_make_no_plan():
    with pytest.raises(ValueError, match=r"counts sum to 4294967304 tokens; expected at most 2147483647"):
        plain_plan(np.array([[2**32 + 8, 0]], np.int64), Topology.flat(1))


def test_an_empty_slot_with_a_relay_is_not_copied():
    counts = np.array([[4, 0], [4, 0]], np.int32)
    relay = np.array([[0, 1], [1, 0]], np.int32)
    plan = replace(plain_plan(counts, Topology.flat(2), 2), relay=relay)
    check_plan(plan, counts)
    assert traffic(plan, counts).fan_out.tolist() == replica_copies(plan).sum((1, 2)).tolist() == [0, 0]


def two_ranks(counts_dtype, plan_dtype):
    plan = Plan(np.array([[0, 1], [1, 0]], plan_dtype), np.array([[4, 4], [0, 2]], plan_dtype), domain=2)
    return np.array([[6, 1], [2, 1]], counts_dtype), plan


def test_plans_and_counts_may_be_unsigned(unchecked):
    counts, plan = two_ranks(np.uint64, np.uint8)
    check_plan(plan, counts)
    assert rows_between(counts, plan).tolist() == [[4, 3], [0, 3]]
    assert traffic(plan, counts).rows == 3
    with pytest.raises(ValueError, match=r"placement of rank 0, slot 0 is 200; expected an expert below 2"):
        check_plan(replace(plan, placement=np.full((2, 2), 200, np.uint8)), counts)
    check_plans([plan, plan], [counts, counts])
    with pytest.raises(ValueError, match=r"placement of rank 0, slot 0 is 200; expected an expert below 2"):
        check_plans([plan, replace(plan, placement=np.full((2, 2), 200, np.uint8))], [counts, counts])


def test_counts_of_a_device_may_meet_a_plan_of_the_host():
    counts, plan = two_ranks(np.int32, np.int32)
    assert rows_between(jnp.asarray(counts), plan).tolist() == rows_between(counts, plan).tolist()
    sent = jax.jit(lambda rank: nearest_first(counts, plan.quota, rank, 2))(jnp.int32(0))
    np.testing.assert_array_equal(sent, nearest_first(counts, plan.quota, 0, 2))

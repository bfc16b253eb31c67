import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb.planners import rebalance_experts

# The example of EPLB's README: 12 experts in 4 groups, 4 redundant ones, 2 nodes of 4 GPUs.
LOADS = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
EXPERTS = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def gpu_loads(weight, phy2log, logcnt, num_gpus):
    """Return loads `[layers, GPUs]`, with every expert's load split evenly."""
    of_copy = np.take_along_axis(weight / logcnt, phy2log, 1)
    return of_copy.reshape(len(weight), num_gpus, -1).sum(2)


def duplicates(phy2log, num_gpus):
    gpus = np.sort(phy2log.reshape(len(phy2log) * num_gpus, -1))
    return int((gpus[:, 1:] == gpus[:, :-1]).sum())


def assert_consistent(weight, num_replicas, phy2log, log2phy, logcnt):
    """Check that the three arrays are consistent, and that every expert has a copy."""
    num_layers, num_experts = weight.shape
    assert phy2log.shape == (num_layers, num_replicas)
    assert log2phy.shape == (num_layers, num_experts, logcnt.max())
    assert (logcnt >= 1).all()
    np.testing.assert_array_equal((log2phy >= 0).sum(2), logcnt)
    for layer in range(num_layers):
        for expert in range(num_experts):
            copies = log2phy[layer, expert, : logcnt[layer, expert]]
            assert (phy2log[layer, copies] == expert).all()
            assert len(set(copies.tolist())) == len(copies)


def test_the_example_of_its_readme():
    phy2log, log2phy, logcnt = rebalance_experts(LOADS, 16, 4, 2, 8)
    assert phy2log.tolist() == EXPERTS
    assert_consistent(LOADS, 16, phy2log, log2phy, logcnt)
    loads = gpu_loads(LOADS, phy2log, logcnt, 8)
    assert np.round(loads.max(1) / loads.mean(1), 3).tolist() == [1.208, 1.242]


def test_groups_that_do_not_divide_into_nodes_are_packed_globally():
    want = rebalance_experts(LOADS, 16, 1, 1, 8)
    for got, expected in zip(rebalance_experts(LOADS, 16, 4, 3, 8), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    loads = [
        gpu_loads(LOADS, phy2log, logcnt, 8) for phy2log, _, logcnt in (want, rebalance_experts(LOADS, 16, 4, 2, 8))
    ]
    assert (loads[0].max(1) <= loads[1].max(1)).all()


def test_one_expert_per_gpu_stays_in_order():
    phy2log, _, _ = rebalance_experts(LOADS, 12, 4, 3, 12)
    assert np.sort(phy2log).tolist() == [list(range(12))] * 2


def test_a_second_copy_on_a_gpu_can_be_forbidden():
    weight = np.array([[100, 1, 1, 1]])
    phy2log, _, logcnt = rebalance_experts(weight, 8, 1, 1, 2)
    assert (duplicates(phy2log, 2), logcnt.tolist()) == (3, [[5, 1, 1, 1]])
    phy2log, log2phy, logcnt = rebalance_experts(weight, 8, 1, 1, 2, distinct=True)
    assert_consistent(weight, 8, phy2log, log2phy, logcnt)
    assert (duplicates(phy2log, 2), logcnt.tolist()) == (0, [[2, 2, 2, 2]])


@st.composite
def problems(draw):
    nodes, gpus_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 3))
    num_experts = groups * draw(st.integers(1, 4))
    num_gpus = nodes * gpus_per_node
    least = -(-num_experts // num_gpus)
    per_gpu = draw(st.integers(least, max(least, num_experts // nodes)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    weight = rng.lognormal(0, draw(st.sampled_from([0.0, 1.0, 3.0])), (2, num_experts))
    return np.where(rng.random(weight.shape) < 0.2, 0, weight), per_gpu * num_gpus, groups, nodes, num_gpus


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_distinct_copies_are_always_possible(problem):
    weight, num_replicas, *_, nodes, num_gpus = problem
    results = rebalance_experts(*problem, distinct=True)
    assert_consistent(weight, num_replicas, *results)
    assert duplicates(results[0], num_gpus) == 0
    assert results[2].max() <= num_gpus // nodes
    assert_consistent(weight, num_replicas, *rebalance_experts(*problem))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.ones(4)}, r"weight has shape \(4,\); expected \[layers, E\]"),
        ({"weight": -LOADS}, r"weight of layer 0, expert 0 is -90.0; expected a finite load, at least 0"),
        ({"weight": LOADS * np.inf}, r"weight of layer 0, expert 0 is inf; expected a finite load"),
        ({"num_groups": 8}, r"num_groups is 8; expected a divisor of the 12 experts"),
        ({"num_groups": 0}, r"num_groups is 0; expected at least 1"),
        ({"num_nodes": 0}, r"num_nodes is 0; expected at least 1"),
        ({"num_gpus": 3}, r"num_gpus is 3; expected a multiple of the 2 nodes"),
        ({"num_replicas": 8}, r"num_replicas is 8; expected a multiple of the 8 GPUs, at least 12"),
        ({"num_replicas": 17}, r"num_replicas is 17; expected a multiple of the 8 GPUs"),
        ({"num_replicas": 56, "distinct": True}, r"num_replicas is 56; expected at most 48, one copy of an expert"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"weight": LOADS, "num_replicas": 16, "num_groups": 4, "num_nodes": 2, "num_gpus": 8}
    with pytest.raises(ValueError, match=message):
        rebalance_experts(**good | change)

"""Tokens sent once to each rank or node, and rows in their own precision: compared with manual calculation."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, System
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Communication, Links, Migration, ModelShape, Step, simulate, simulate_uniform
from jax_moe_lb.sim.network import latency_s, seconds
from jax_moe_lb.sim.work import layer_work
from jax_moe_lb.transport import Direct, Forward, Once, QuantizedTransfer

NODES = Links("node", 2, 1e9, links=2, latency_s=1e-5)
THREE = Cluster((Links("dc", 2, 1e8, latency_s=1e-3), NODES, Links("gpu", 2, 1e10, latency_s=1e-6)))
EVEN = np.full((8, 16), 16, np.int32)
FORWARD = Step(backward=False, exchange_counts=False)


def model(**change):
    sizes = {"layers": 1, "hidden": 64, "inner": 32, "experts": 16, "per_token": 4, "tokens": 64, "pre_expert_s": 0.0}
    return ModelShape(**(sizes | change))


def forwarding(system: System) -> System:
    return replace(system, dispatch=Forward(Buffers(1e3)))


def test_a_token_goes_to_its_offset_in_another_node_then_to_its_rank():
    """The first hop crosses datacenters and nodes at once, and pays for both; the second stays in the node."""
    counts = np.zeros((8, 16), np.int32)
    counts[0, 14] = 64  # from the first rank to the last
    straight, forwarded = (
        layer_work(system, model(per_token=1), THREE, counts)[0].waves[0].dispatch
        for system in (systems.plain(Buffers(1e3)), forwarding(systems.plain()))
    )
    (one,), (between, inside) = straight, forwarded
    row_bytes = 128 + 8
    assert [sent.sum() / 128 for sent in one.sent] == [64, 64, 0]
    assert [sent.sum() / row_bytes for sent in between.sent] == [64, 64, 0]
    assert [sent.sum() / row_bytes for sent in inside.sent] == [0, 0, 64]
    assert between.received[1].sum(0).tolist() == [64 * row_bytes, 0]
    assert inside.received[2].argmax() == 7
    assert (latency_s(one, THREE), latency_s(between, THREE), latency_s(inside, THREE)) == (1e-3, 1e-3, 1e-6)


def test_tokens_with_two_experts_on_a_node_cross_once():
    cluster = Cluster((Links("node", 2, 1e9, links=1), Links("gpu", 1, 1e10)))
    shape = model(experts=4, per_token=2, tokens=6)

    def crossed(counts):
        work, _ = layer_work(forwarding(systems.plain()), shape, cluster, np.array(counts, np.int32))
        return work.waves[0].dispatch[0].sent[0][:, 0] / (128 + 16)

    # Of the six pairs of four experts one has none on the other node: 5 of 6 tokens cross.
    assert crossed([[3, 3, 3, 3]] * 2) == pytest.approx([5, 5])
    # All tokens have both experts on the second node: 12 copies, 6 tokens.
    assert crossed([[0, 0, 6, 6]] * 2) == pytest.approx([6, 0], abs=1e-3)


def test_the_first_hop_of_forward_runs_beside_the_planner():
    """The first hop needs no plan. With a slow planner it is hidden, and the hop of `Direct` is not."""
    cluster = Cluster((Links("node", 2, 1e8, links=2), Links("gpu", 4, 1e10)), planner_s=1.0)
    counts = np.random.default_rng(1).multinomial(256, np.arange(1, 17) / 136, 8).astype(np.int32)
    report = simulate(forwarding(systems.exact(2)), model(), cluster, counts, step=FORWARD)
    (plan,) = [task for task in report.timeline.tasks if task.stage == "plan"]
    first, second = [task for task in report.timeline.tasks if task.stage == "dispatch"]
    assert first.end.max() < plan.end.min() <= second.start.min()
    straight = simulate(systems.exact(2, Buffers(1e3)), model(), cluster, counts, step=FORWARD)
    (hop,) = [task for task in straight.timeline.tasks if task.stage == "dispatch"]
    assert hop.start.min() >= 1.0


def test_the_hops_of_chunks_overlap():
    """With n chunks the longer hop takes its whole time, and the shorter one an n-th of it."""
    cluster = Cluster((Links("node", 2, 1e8, links=2), Links("gpu", 2, 1e8)))
    even = np.full((4, 16), 16, np.int32)

    def exposed(buffers):
        stages = simulate(System(dispatch=Forward(buffers)), model(), cluster, even, step=FORWARD).stages
        return np.array([stages["dispatch"].exposed_s, stages["combine"].exposed_s])

    work, _ = layer_work(System(dispatch=Forward()), model(), cluster, even)
    sides = work.waves[0].dispatch, work.waves[0].back
    hops = np.array([[seconds(flow, cluster) for flow in side] for side in sides])
    pipelined = hops.max(1) + hops.min(1) / 4
    np.testing.assert_allclose(exposed(Buffers()), hops.sum(1))
    np.testing.assert_allclose(exposed(Buffers(chunks=4, max_rounds=1)), pipelined)
    # A loop over rounds carries the sums of all chunks.
    np.testing.assert_allclose(exposed(Buffers(chunks=4)), [pipelined[0], hops[1].sum()])


def test_forward_bounds_the_copies_of_rail_ranks_by_rounds():
    """All tokens of one offset go to one node: its rail rank sends twice the mean load, whatever the plan."""
    cluster = Cluster((Links("node", 2, 1e9, links=2), Links("gpu", 2, 1e10)))
    counts = np.zeros((4, 16), np.int32)
    counts[::2, 8:] = 32  # offset 0, to the second node
    counts[1::2, :8] = 32
    system = replace(systems.exact(4), dispatch=Forward(Buffers(1.0)))
    work, _ = layer_work(system, model(), cluster, counts)
    assert (work.load.max(), work.rounds) == (256, 2)


def test_a_domain_larger_than_a_node_is_refused():
    cluster = Cluster((Links("node", 2, 1e9), Links("gpu", 2, 1e10)), domain_level="node")
    with pytest.raises(ValueError, match=r"plan\.domain is 4; expected at most 2, the ranks of a node"):
        layer_work(forwarding(systems.exact(2)), model(), cluster, np.full((4, 16), 16, np.int32))


def test_once_sends_tokens_with_two_experts_on_a_rank_once():
    cluster, shape = Cluster((Links("gpu", 2, 1e9),)), model(experts=4, per_token=2, tokens=6)
    system = System(dispatch=Once(Buffers(1e3), transfer=QuantizedTransfer(block=32)))
    work, _ = layer_work(system, shape, cluster, np.array([[3, 3, 3, 3]] * 2, np.int32))
    # 5 of 6 tokens cross, each of 64 bytes and two scales of 4; their sums return in bfloat16.
    row_bytes = 72 + 2 * (4 + 4)  # with the slot and the weight of both choices
    assert work.waves[0].dispatch[0].sent[0][:, 0] / row_bytes == pytest.approx([5, 5])
    # Gradients of tokens return with those of the weights.
    assert work.waves[0].widths == (row_bytes, 128, 128, 128 + 2 * 4)


@pytest.mark.parametrize("system", [systems.plain(), systems.exact(2)])
def test_once_sends_no_more_and_no_less_than_a_kth(system: System):
    counts = np.random.default_rng(1).multinomial(256, np.arange(1, 17) / 136, 8).astype(np.int32)
    dispatches = Direct(Buffers(1e3)), Once(Buffers(1e3))
    works = [layer_work(replace(system, dispatch=one), model(), THREE, counts)[0] for one in dispatches]
    many, few = (sum(sent.sum() for sent in work.waves[0].dispatch[0].sent) for work in works)
    row_bytes = 128 + 4 * 8
    assert many / 4 * row_bytes / 128 <= few <= many * row_bytes / 128


BY_PAIRS = Communication(by_pairs=True, dispatch_bytes=1.0)


@pytest.mark.parametrize("how", [Communication(), BY_PAIRS])
@pytest.mark.parametrize("dispatch", [Direct(), Once(), Forward()])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_even_counts_equal_uniform_routing(how, dispatch, sizes):
    cluster, migration = replace(THREE, communication=how), Migration(sizes)
    whole = simulate(System(dispatch=dispatch), model(), cluster, EVEN, migration=migration)
    one = simulate_uniform(model(), cluster, migration=migration, dispatch=dispatch)
    assert one.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert one.level_bytes == pytest.approx(whole.level_bytes, rel=1e-9)


def test_dispatch_in_fp8_and_combine_in_bfloat16():
    cluster = Cluster((Links("gpu", 8, 1e9),), communication=Communication(dispatch_bytes=1.03125))
    stages = simulate(systems.plain(), model(), cluster, EVEN).stages
    crossing = 8 * 256 * 7 / 8
    assert stages["dispatch"].bytes == pytest.approx(crossing * 64 * 1.03125)
    assert stages["combine"].bytes == pytest.approx(crossing * 64 * 2)
    # Copies are sent again, with gradients of outputs, both in fp8.
    assert stages["dispatch (backward)"].bytes == pytest.approx(2 * crossing * 64 * 1.03125)


def test_a_wire_is_for_rows_forward_and_gradients_travel_as_they_are():
    cluster = Cluster((Links("gpu", 8, 1e9),))
    system = systems.plain().replace(transfer=QuantizedTransfer(block=32))
    stages = simulate(system, model(), cluster, EVEN).stages
    # 64 numbers of a byte and two scales of 4, compared with 64 numbers of 2.
    wire, plainly = 8 * 256 * 7 / 8 * (64 + 8), 8 * 256 * 7 / 8 * 128
    assert stages["dispatch"].bytes == stages["combine"].bytes == pytest.approx(wire)
    assert stages["dispatch (backward)"].bytes == pytest.approx(wire + plainly)
    assert stages["combine (backward)"].bytes == pytest.approx(plainly)


def test_shared_experts_compute_beside_the_exchange():
    shape, cluster = model(shared_inner=96), Cluster((Links("gpu", 8, 1e9),))
    step = Step(exchange_counts=False)
    with_them, without = (simulate(systems.plain(), one, cluster, EVEN, step=step) for one in (shape, model()))
    # Three matrices of 64 x 96 for each of 64 tokens, plus 295 equivalent rows; four times with the backward pass.
    once_s = (64 + 295) * 2 * 3 * 64 * 96 / 600e12 + 10e-6
    assert with_them.stages["shared experts"].busy_s == pytest.approx(once_s)
    assert with_them.stages["shared experts (backward)"].busy_s == pytest.approx(3 * (once_s - 10e-6) + 10e-6)
    # The exchange of 28 us in each direction hides them.
    assert with_them.step_s == pytest.approx(without.step_s)

"""Tokens forwarded level by level, once per member, in their own precision: compared with manual calculation."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, System
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Communication, Links, Migration, ModelShape, Step, simulate, simulate_uniform
from jax_moe_lb.sim.network import latency_s
from jax_moe_lb.sim.traffic import copies_to, forwarded, share_in_member, tokens_to
from jax_moe_lb.sim.work import layer_work
from jax_moe_lb.transport import Forward, Once, QuantizedTransfer

THREE = Cluster(
    (
        Links("dc", 2, 1e8, latency_s=1e-3),
        Links("node", 2, 1e9, links=2, latency_s=1e-5),
        Links("gpu", 2, 1e10, latency_s=1e-6),
    )
)
ONCE = Communication(by_level=True, once_per_member=True)
FORWARD = Step(backward=False, exchange_counts=False)


def model(**change):
    sizes = {"layers": 1, "hidden": 64, "inner": 32, "experts": 16, "per_token": 4, "tokens": 64, "pre_expert_s": 0.0}
    return ModelShape(**(sizes | change))


def test_a_copy_goes_to_its_offset_in_another_datacenter_then_node_then_to_its_rank():
    rows = np.zeros((8, 8), np.int64)
    rows[0, 7] = 10
    sent = forwarded(copies_to(rows, (2, 2, 2)), (2, 2, 2))
    assert {(a, b): sent[a, b] for a, b in zip(*np.nonzero(sent), strict=True) if a != b} == {
        (0, 4): 10,
        (4, 6): 10,
        (6, 7): 10,
    }


def test_every_level_is_paid_for_by_what_crosses_several():
    counts = np.zeros((8, 16), np.int32)
    counts[0, 14] = 64  # from the first rank to the last
    straight, by_level = (
        layer_work(systems.plain(Buffers(1e3)), model(per_token=1), replace(THREE, communication=one), counts)[0]
        for one in (Communication(), Communication(by_level=True))
    )
    (one,), (other,) = straight.waves[0].dispatch, by_level.waves[0].dispatch
    assert [sent.sum() / 128 for sent in one.sent] == [64, 64, 0]
    assert [sent.sum() / 128 for sent in other.sent] == [64, 64 + 64, 64]
    assert latency_s(one, THREE) == 1e-3
    assert latency_s(other, THREE) == pytest.approx(1e-3 + 1e-5 + 1e-6)


def test_tokens_with_two_experts_on_a_node_cross_once():
    cluster = Cluster((Links("node", 2, 1e9, links=1), Links("gpu", 1, 1e10)), communication=ONCE)
    shape = model(experts=4, per_token=2, tokens=6)

    def crossed(counts):
        work, _ = layer_work(systems.plain(Buffers(1e3)), shape, cluster, np.array(counts, np.int32))
        return work.waves[0].dispatch[0].sent[0][:, 0] / 128

    # Of the six pairs of four experts one has none on the other node: 5 of 6 tokens cross.
    assert crossed([[3, 3, 3, 3]] * 2) == pytest.approx([5, 5])
    # All tokens have both experts on the second node: 12 copies, 6 tokens.
    assert crossed([[0, 0, 6, 6]] * 2) == pytest.approx([6, 0], abs=1e-3)
    assert share_in_member(4, 2, 2) == pytest.approx(5 / 6)
    # Of DeepSeek-V3's 256 experts 16 are on a node: of 8 choices half a copy goes there, in 0.41 tokens.
    assert share_in_member(256, 8, 16) == pytest.approx(0.408, abs=1e-3)


def test_forward_has_the_rows_of_a_library_in_two_hops():
    """The dispatch declares its rows and hops: first between nodes, then inside."""
    cluster = Cluster((Links("node", 2, 1e9, links=2, latency_s=1e-5), Links("gpu", 4, 1e10, latency_s=1e-6)))
    counts = np.random.default_rng(1).multinomial(256, np.arange(1, 17) / 136, 8).astype(np.int32)
    straight, forwarding = systems.exact(2, Buffers(1e3)), replace(cluster, communication=ONCE)
    by_library, _ = layer_work(straight, model(), forwarding, counts)
    by_dispatch, _ = layer_work(replace(straight, dispatch=Forward(Buffers(1e3))), model(), cluster, counts)
    (whole,), (between, inside) = by_library.waves[0].dispatch, by_dispatch.waves[0].dispatch
    np.testing.assert_allclose(between.sent[1], 0, atol=1e-6)
    np.testing.assert_allclose(inside.sent[0], 0, atol=1e-6)
    np.testing.assert_allclose(between.sent[0], whole.sent[0], rtol=1e-12)
    np.testing.assert_allclose(inside.sent[1], whole.sent[1], rtol=1e-12)
    assert latency_s(between, cluster) == pytest.approx(1e-5)
    assert latency_s(inside, cluster) == pytest.approx(1e-6)


def test_once_sends_tokens_with_two_experts_on_a_rank_once():
    cluster, shape = Cluster((Links("gpu", 2, 1e9),)), model(experts=4, per_token=2, tokens=6)
    system = System(dispatch=Once(Buffers(1e3), transfer=QuantizedTransfer(block=32)))
    work, _ = layer_work(system, shape, cluster, np.array([[3, 3, 3, 3]] * 2, np.int32))
    # 5 of 6 tokens cross, each of 64 bytes and two scales of 4; their sums return in bfloat16.
    assert work.waves[0].dispatch[0].sent[0][:, 0] / 72 == pytest.approx([5, 5])
    assert (work.waves[0].widths.out, work.waves[0].widths.back) == (72, 128)


def test_tokens_with_uneven_chances_are_estimated_within_five_percent():
    rng = np.random.default_rng(0)
    tokens, experts, per_token = 20000, 32, 4
    chosen = np.argsort(-(1.2 * rng.normal(size=experts) + rng.gumbel(size=(tokens, experts))), 1)[:, :per_token]
    has = np.zeros((tokens, experts), int)
    np.put_along_axis(has, chosen, 1, 1)
    rows = np.zeros((4, experts, 4), np.int64)
    rows[:, np.arange(experts), np.arange(experts) // 8] = has.sum(0)
    counts = np.tile(has.sum(0), (4, 1))
    found = tokens_to(rows, counts, per_token, (4,))[0][0]
    np.testing.assert_allclose(found, has.reshape(tokens, 4, 8).any(2).sum(0), rtol=0.05)


@pytest.mark.parametrize(
    "system", [systems.plain(Buffers(1e3)), systems.exact(2, Buffers(1e3)), systems.rails(Buffers(1e3))]
)
def test_once_per_member_sends_no_more_and_no_less_than_a_kth(system: System):
    counts = np.random.default_rng(1).multinomial(256, np.arange(1, 17) / 136, 8).astype(np.int32)
    times, on_links = [], []
    for how in (Communication(by_level=True), ONCE):
        work, _ = layer_work(system, model(), replace(THREE, communication=how), counts)
        on_links.append([sent.sum() for wave in work.waves for hop in wave.dispatch for sent in hop.sent])
        times.append(simulate(system, model(), replace(THREE, communication=how), counts, step=FORWARD).step_s)
    assert all(few <= many <= 4 * few + 1e-6 for many, few in zip(*on_links, strict=True))
    assert times[1] <= times[0]


@pytest.mark.parametrize("how", [Communication(by_level=True), ONCE, replace(ONCE, by_pairs=True, dispatch_bytes=1.0)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_even_counts_equal_uniform_routing(how, sizes):
    cluster, migration = replace(THREE, communication=how), Migration(sizes)
    even = np.full((8, 16), 16, np.int32)
    whole = simulate(systems.plain(), model(), cluster, even, migration=migration)
    one = simulate_uniform(model(), cluster, migration=migration)
    assert one.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert one.level_bytes == pytest.approx(whole.level_bytes, rel=1e-9)


def test_dispatch_in_fp8_and_combine_in_bfloat16():
    cluster = Cluster((Links("gpu", 8, 1e9),), communication=Communication(dispatch_bytes=1.03125))
    even = np.full((8, 16), 16, np.int32)
    stages = simulate(systems.plain(), model(), cluster, even).stages
    crossing = 8 * 256 * 7 / 8
    assert stages["dispatch"].bytes == pytest.approx(crossing * 64 * 1.03125)
    assert stages["combine"].bytes == pytest.approx(crossing * 64 * 2)
    # Copies are sent again, with gradients of outputs, both in fp8.
    assert stages["dispatch (backward)"].bytes == pytest.approx(2 * crossing * 64 * 1.03125)


def test_a_wire_is_for_rows_forward_and_gradients_travel_as_they_are():
    cluster, even = Cluster((Links("gpu", 8, 1e9),)), np.full((8, 16), 16, np.int32)
    system = systems.plain().replace(transfer=QuantizedTransfer(block=32))
    stages = simulate(system, model(), cluster, even).stages
    # 64 numbers of a byte and two scales of 4, compared with 64 numbers of 2.
    wire, plainly = 8 * 256 * 7 / 8 * (64 + 8), 8 * 256 * 7 / 8 * 128
    assert stages["dispatch"].bytes == stages["combine"].bytes == pytest.approx(wire)
    assert stages["dispatch (backward)"].bytes == pytest.approx(wire + plainly)
    assert stages["combine (backward)"].bytes == pytest.approx(plainly)


def test_shared_experts_compute_beside_the_exchange():
    shape, cluster = model(shared_inner=96), Cluster((Links("gpu", 8, 1e9),))
    even = np.full((8, 16), 16, np.int32)
    step = Step(exchange_counts=False)
    with_them, without = (simulate(systems.plain(), one, cluster, even, step=step) for one in (shape, model()))
    # Three matrices of 64 x 96 for each of 64 tokens, plus 295 equivalent rows; four times with the backward pass.
    once_s = (64 + 295) * 2 * 3 * 64 * 96 / 600e12 + 10e-6
    assert with_them.stages["shared experts"].busy_s == pytest.approx(once_s)
    assert with_them.stages["shared experts (backward)"].busy_s == pytest.approx(3 * (once_s - 10e-6) + 10e-6)
    # The exchange of 28 us in each direction hides them.
    assert with_them.step_s == pytest.approx(without.step_s)


def test_communication_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="once_per_member is True; expected by_level=True"):
        Communication(once_per_member=True)
    with pytest.raises(ValueError, match=r"dispatch_bytes is 0\.0; expected more than 0 and at most 8"):
        Communication(dispatch_bytes=0.0)

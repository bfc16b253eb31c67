"""The simulator moves the planned bytes within link rates, and its times match manual calculation."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import Buffers, Experts, Topology
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.core import Level
from jax_moe_lb.core.plan import load, plain_plan, rows_between, traffic
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.layer import systems
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.sim import (
    AnalyticGemm,
    Cluster,
    Collective,
    Communication,
    Links,
    Migration,
    ModelShape,
    Step,
    Work,
    choose_expert_domains,
    simulate,
    simulate_uniform,
)
from jax_moe_lb.sim.network import all_reduce, flow, level_bytes, seconds
from jax_moe_lb.sim.stream_model import latency
from jax_moe_lb.sim.work import gradients_between, layer_work, replicas_between, rows_per_slot, shared_work
from jax_moe_lb.transport import Codec, CodecBase, Direct, Gather
from jax_moe_lb.transport.slot_weights import at_home
from jax_moe_lb.transport.wave_rows import WaveRows

SYSTEMS = {
    "plain": systems.plain(),
    "greedy": systems.greedy(),
    "ultraep": systems.ultraep(),
    "feplb": systems.feplb(replica_slots=2),
    "hybridep": systems.hybridep(),
    "rails": systems.rails(),
    "fastermoe": systems.fastermoe(replica_slots=3),
}


def model(**change):
    shape = {"layers": 2, "hidden": 64, "inner": 32, "experts": 16, "per_token": 2, "tokens": 128}
    return ModelShape(**(shape | change))


SIZES = [(8,), (4,), (2, 4), (4, 2), (2, 2, 2), (1, 4), (2, 1, 4)]
RATES = st.lists(st.integers(6, 11), min_size=3, max_size=3)
MACHINES = st.tuples(st.sampled_from(SIZES), RATES, st.integers(0, 2), st.booleans())
"""Sizes of levels, powers of ten of their rates, link sharing, and presence of latencies."""


def cluster_of(machine):
    """Return a cluster of 4 to 8 ranks with one to three levels."""
    sizes, rates, sharing, has_latency = machine
    levels, inner = [], math.prod(sizes)
    for name, size, rate in zip(("dc", "node", "gpu")[-len(sizes) :], sizes, rates, strict=False):
        inner //= size
        links = math.gcd(2**sharing, inner)
        levels.append(Links(name, size, 10.0**rate, links, 1e-5 if has_latency else 0.0))
    return Cluster(tuple(levels), planner_s=1e-4 if has_latency else 0.0)


def counts_of(cluster, seed, skew):
    """Return counts of two layers."""
    rng = np.random.default_rng(seed)
    popular = rng.permutation(np.arange(1.0, 17) ** -skew)
    return rng.multinomial(256, popular / popular.sum(), (2, cluster.num_ranks)).astype(np.int32)


SKEWS = st.sampled_from([0.0, 1.0, 2.0])
CLUSTERS = MACHINES.map(cluster_of)
CASES = CLUSTERS, st.sampled_from(sorted(SYSTEMS)).map(SYSTEMS.get), st.integers(0, 99), SKEWS


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(*CASES)
def test_what_is_sent_is_received_and_is_what_the_plan_says(cluster, system, seed, skew):
    counts = counts_of(cluster, seed, skew)
    plan = plan_on_host(system, counts[0], cluster.topology()).plan
    rows, moved = rows_between(counts[0], plan), traffic(plan, counts[0])
    for rank in range(plan.num_ranks):
        row = nearest_first(counts[0], plan.quota, rank, plan.domain, plan.split).sum(0)
        np.testing.assert_array_equal(rows[rank], row)
    np.testing.assert_array_equal(rows.sum(0), load(plan))
    assert rows.sum() - np.trace(rows) == moved.rows
    np.testing.assert_array_equal(rows_per_slot(plan).sum(1), load(plan))
    np.testing.assert_array_equal(replicas_between(plan).sum(1), moved.fan_out)
    np.testing.assert_array_equal(gradients_between(plan).sum(1), (plan.placement[:, plan.num_home :] >= 0).sum(1))
    on_links = flow(rows, cluster)
    for sent, received in zip(on_links.sent, on_links.received, strict=True):
        assert sent.sum() == received.sum()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(*CASES)
def test_a_step_takes_at_least_every_bound_and_no_link_is_above_its_rate(cluster, system, seed, skew):
    counts = counts_of(cluster, seed, skew)
    report = simulate(system, model(), cluster, counts)
    tasks = report.timeline.tasks
    assert report.step_s == pytest.approx(sum(stage.exposed_s for stage in report.stages.values()), rel=1e-9)
    # Work of every rank and every link.
    for stream in {stream for task in tasks for stream in task.streams}:
        mine = [task for task in tasks if stream in task.streams]
        assert report.step_s >= np.sum([task.end - task.start for task in mine], 0).max() * (1 - 1e-9)
        for before, after in itertools.pairwise(mine):
            assert (after.start >= before.end).all()
    for at, level in enumerate(cluster.levels):
        moving = [task for task in tasks if task.flow is not None and task.flow.sent[at].any()]
        for task in moving:
            most = max(task.flow.sent[at].max(), task.flow.received[at].max())
            assert task.seconds * level.bytes_per_s * (1 + 1e-9) >= most
        on_links = sum(task.flow.sent[at] for task in moving)
        assert report.step_s * level.bytes_per_s * (1 + 1e-9) >= np.max(on_links)
    # Dependencies.
    assert all((task.start >= before.end - 1e-12).all() for task in tasks for before in task.before)


@settings(max_examples=6, deadline=None)
@given(CLUSTERS, st.lists(st.integers(0, 3), min_size=3, max_size=3), st.booleans())
def test_even_counts_equal_uniform_routing_by_symmetry(cluster, powers, gather_again):
    sizes = tuple(math.gcd(2**power, level.size) for power, level in zip(powers, cluster.levels, strict=False))
    even = np.full((cluster.num_ranks, 16), 128 * 2 // 16, np.int32)
    migration = Migration(sizes, gather_again=gather_again)
    whole = simulate(systems.plain(), model(), cluster, even, migration=migration)
    one = simulate_uniform(model(), cluster, migration=migration)
    assert one.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert one.level_bytes == pytest.approx(whole.level_bytes, rel=1e-9)
    assert one.stages.keys() == whole.stages.keys()
    for name, stage in whole.stages.items():
        assert one.stages[name].busy_s == pytest.approx(stage.busy_s, rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_hybridep_takes_what_its_stream_model_says(size):
    shape = model(layers=3, experts=8, pre_expert_s=2e-4, hidden=512, inner=1024)
    # The paper's gather has one latency.
    told_directly = Communication(Collective.DIRECT)
    links = (Links("gpu", 8, 5e9, latency_s=1e-6),)
    cluster = Cluster(links, AnalyticGemm(1e12, 0.0, 0.0), communication=told_directly)
    report, forward = (
        simulate_uniform(shape, cluster, migration=Migration((size,)), step=Step(**options, exchange_counts=False))
        for options in ({"recompute": False}, {"backward": False})
    )
    copies = shape.tokens * shape.per_token
    work = {"token_bytes": float(copies * shape.row_bytes), "expert_bytes": float(shape.expert_bytes)}
    level = Level("gpu", 8, 5e9, 1e-6)
    experts_s = copies * shape.row_flops / 1e12
    assert forward.step_s == pytest.approx(
        3 * (latency(Work(**work, pre_expert_s=2e-4), level, size).total_s + experts_s)
    )
    train = Work(**work, pre_expert_s=2e-4, gradient_bytes=float(shape.expert_bytes), backward_s=4e-4)
    assert report.step_s == pytest.approx(3 * (latency(train, level, size).total_s + 3 * experts_s))


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_domains_serve_what_the_balancer_hybridep_plans(size):
    cluster = Cluster((Links("gpu", 8, 1e9),))
    counts = counts_of(cluster, seed=3, skew=1.0)[0]
    gathered, _ = layer_work(systems.plain(), model(), cluster, counts, Migration((size,)))
    balancer = systems.System(HybridEP(size), replica_slots=2 * (size - 1))
    planned, _ = layer_work(balancer, model(), cluster, counts)
    np.testing.assert_array_equal(gathered.load, planned.load)
    for a, b in zip(gathered.waves[0].dispatch, planned.waves[0].dispatch, strict=True):
        np.testing.assert_array_equal(a.sent[0], b.sent[0])
        np.testing.assert_array_equal(a.received[0], b.received[0])
    # A rank gets the same experts either way; one gathers level by level, the other copies each from home.
    assert gathered.gather[0].sent[0].max() == planned.replicate.sent[0].max() == 2 * (size - 1) * model().expert_bytes


def test_plain_expert_parallelism_in_closed_form():
    shape, cluster = model(layers=1, pre_expert_s=1e-3), Cluster((Links("gpu", 4, 1e9),), AnalyticGemm(1e12, 0.0, 0.0))
    counts = np.zeros((4, 16), np.int32)
    counts[:, 0] = 256  # all tokens prefer the first expert
    report = simulate(systems.plain(), shape, cluster, counts, step=Step(backward=False, exchange_counts=False))
    exchange_s = 3 * 256 * shape.row_bytes / 1e9
    assert report.step_s == pytest.approx(1e-3 + 2 * exchange_s + 4 * 256 * shape.row_flops / 1e12)
    assert report.imbalance_before == report.imbalance_after == 4
    assert report.rounds == 4
    assert report.level_bytes == {"gpu": 2 * 3 * 256 * shape.row_bytes}


def test_a_step_of_forward_and_backward_has_the_stages_of_the_executor():
    shape, cluster = model(layers=1), Cluster((Links("gpu", 4, 1e9),), planner_s=1e-4)
    counts = np.full((4, 16), 8, np.int32)
    counts[1:, 0] = 136
    stages = simulate(systems.greedy(), shape, cluster, counts).stages
    back = [f"{name} (backward)" for name in ("weights", "dispatch", "experts", "combine", "gradients", "attention")]
    forward = ["attention", "counts", "plan", "weights", "dispatch", "experts", "combine"]
    assert list(stages) == [*forward, *back]
    assert stages["gradients (backward)"].bytes == stages["weights (backward)"].bytes
    # Copies are sent again, with the gradients of their outputs.
    assert stages["dispatch (backward)"].bytes == 2 * stages["dispatch"].bytes


@pytest.mark.slow
def test_feplb_hides_planner_rows_and_weights_under_static_experts():
    """Its exchanges equal plain expert parallelism, and all moved rows return before the rows go back."""
    shape = model(layers=1, experts=64, tokens=4096, hidden=1024, inner=1024)
    rng = np.random.default_rng(0)
    popular = rng.permutation(np.arange(1.0, 65) ** -0.5) * np.where(np.arange(64) < 16, 2.0, 1.0)
    counts = rng.multinomial(8192, popular / popular.sum(), 4).astype(np.int32)
    cluster = Cluster((Links("gpu", 4, 100e9),), AnalyticGemm(50e12, 100.0), planner_s=50e-6)
    report = simulate(systems.feplb(), shape, cluster, counts)
    for stage in ("plan", "weights", "rows"):
        assert report.stages[stage].busy_s > 0
        assert report.stages[stage].exposed_s == 0
    assert report.imbalance_after < report.imbalance_before
    plain = simulate(systems.plain(Buffers(headroom=1.5)), shape, cluster, counts)
    for stage in ("dispatch", "combine", "dispatch (backward)"):
        assert report.stages[stage].bytes == plain.stages[stage].bytes
    assert report.stages["return"].bytes == report.stages["rows"].bytes > 0
    (back,) = (task for task in report.timeline.tasks if task.stage == "combine")
    assert "return" in {task.stage for task in back.before}
    # Both waves together compute the planned rows.
    computed = [task for task in report.timeline.tasks if task.stage == "experts"]
    balanced = replace(systems.feplb(), dispatch=Direct())
    work, _ = layer_work(balanced, shape, cluster, counts)
    phased, _ = layer_work(systems.feplb(), shape, cluster, counts)
    assert len(computed) == 2
    np.testing.assert_array_equal(phased.load, work.load)
    np.testing.assert_array_equal(sum(wave.rows for wave in phased.waves), work.waves[0].rows)


def test_gradients_of_replicas_travel_in_the_dtype_of_the_weights():
    """As in a program, which converts them before they are sent; home gradients may be wider."""
    shape, sent = model(layers=1), []
    cluster, counts = Cluster((Links("gpu", 4, 100e9),)), np.array([[240] + [1] * 15] + [[16] * 16] * 3, np.int32)
    stages = simulate(systems.exact(1), shape, cluster, counts).stages
    assert stages["gradients (backward)"].bytes == stages["weights"].bytes > 0

    class Recording(Gather):
        def add_at_home(self, sums, gradients, plan, topology):
            sent.append(gradients.nbytes)
            return sums

    plan = plain_plan(counts, cluster.topology(), 5)
    experts = Experts(*(jnp.zeros((4, *sizes), jnp.bfloat16) for sizes in ((64, 32), (32, 64), (64, 32))))
    sums = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), experts)
    at_home(experts, sums, jax.tree.map(lambda leaf: leaf[:1], sums), plan, Recording(), cluster.topology())
    assert sent == [shape.expert_bytes]


def test_ranks_of_a_node_share_its_links():
    alone = Cluster((Links("node", 2, 1e9, links=4), Links("gpu", 4, 1e12)))
    shared = Cluster((Links("node", 2, 1e9, links=1), Links("gpu", 4, 1e12)))
    matrix = np.zeros((8, 8), np.int64)
    matrix[:4, 4:] = 10**6
    assert seconds(flow(matrix, alone), alone) == pytest.approx(4e-3)
    assert seconds(flow(matrix, shared), shared) == pytest.approx(16e-3)
    assert level_bytes(flow(matrix, shared), shared) == (16e6, 0.0)


def test_to_leave_its_datacenter_a_byte_must_leave_its_node():
    cluster = Cluster((Links("dc", 2, 1e9), Links("node", 2, 1e9, links=2), Links("gpu", 2, 1e12)))
    matrix = np.zeros((8, 8), np.int64)
    matrix[0, 7] = 1000
    sent, received = flow(matrix, cluster).sent, flow(matrix, cluster).received
    np.testing.assert_array_equal(sent[0], [[1000], [0]])
    np.testing.assert_array_equal(sent[1], [[1000, 0], [0, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(received[1], [[0, 0], [0, 0], [0, 0], [0, 1000]])
    assert not sent[2].any()


def test_spraying_evens_out_the_rails_and_brings_every_row_to_its_rank():
    cluster = Cluster((Links("node", 2, 1e9, links=4), Links("gpu", 4, 1e12)))
    counts = np.zeros((8, 16), np.int32)
    counts[0, 8] = 256  # from one rank to one rank of the other node
    plan = plan_on_host(systems.rails(), counts, cluster.topology()).plan
    rows = rows_between(counts, plan)
    to_rail, rail, from_rail = systems.rails().dispatch.cost().hops(WaveRows(counts, plan, 1), cluster.topology())
    np.testing.assert_array_equal(rail[:4, 4:], np.diag([64] * 4))
    np.testing.assert_array_equal(to_rail[0, :4], [64] * 4)
    np.testing.assert_array_equal(from_rail[4:, 4], [64] * 4)
    assert seconds(flow(rail, cluster), cluster) * 4 == seconds(flow(rows, cluster), cluster)


@pytest.mark.parametrize("rails", [1, 2, 4])
def test_hops_follow_the_rails_of_any_number(rails):
    cluster = Cluster((Links("node", 2, 1e9, links=rails), Links("gpu", 4, 1e12)))
    counts = np.random.default_rng(0).integers(0, 50, (8, 16), np.int32)
    plan = plan_on_host(systems.rails(), counts, cluster.topology()).plan
    rows = rows_between(counts, plan)
    to_rail, rail, from_rail = systems.rails().dispatch.cost().hops(WaveRows(counts, plan, 1), cluster.topology())
    node = np.arange(8) // 4
    near = np.where(node[:, None] == node[None], rows, 0)
    # Rows leaving a sender and reaching a receiver, inside its node or via a rail rank.
    np.testing.assert_array_equal(to_rail.sum(1), rows.sum(1))
    np.testing.assert_array_equal((near + from_rail).sum(0), rows.sum(0))
    np.testing.assert_array_equal((to_rail - near).sum(0), rail.sum(1))
    np.testing.assert_array_equal(from_rail.sum(1), rail.sum(0))


def test_a_thousand_datacenters_take_seconds_at_most():
    cluster = Cluster((Links("dc", 1000, 1.25e9), Links("gpu", 8, 100e9)))
    shape = model(layers=60, experts=8000, tokens=4096, hidden=1024, inner=4096)
    step = Step(exchange_counts=False)
    plain, hybrid = (simulate_uniform(shape, cluster, migration=Migration(sizes), step=step) for sizes in [(), (10, 1)])
    share = 8 * 4096 * 2 * shape.row_bytes * 0.999 / 1.25e9
    assert plain.stages["dispatch"].busy_s == pytest.approx(60 * share)
    assert hybrid.stages["dispatch"].busy_s == pytest.approx(60 * share * 0.99 / 0.999)


def test_domains_that_the_stream_model_chooses_are_nearly_the_fastest_simulated():
    shape = model(experts=16, pre_expert_s=5e-4, hidden=256, inner=128, tokens=1024)
    cluster = Cluster((Links("dc", 4, 1e9, links=2), Links("gpu", 2, 50e9)), AnalyticGemm(1e13, 0.0, 0.0))
    copies = shape.tokens * shape.per_token
    work = Work(float(copies * shape.row_bytes), float(2 * shape.expert_bytes), 5e-4)
    topology = Topology((Level("dc", 4, 1e9), Level("gpu", 2, 50e9)), 2)
    step = Step(backward=False, exchange_counts=False)
    times = {
        sizes: simulate_uniform(shape, cluster, migration=Migration(sizes), step=step).step_s
        for sizes in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
    }
    # The model overlaps the gather of every level separately; here they are sequential.
    assert times[choose_expert_domains(work, topology).domain_sizes] <= 1.05 * min(times.values())


def test_an_all_reduce_passes_every_member_once():
    cluster = Cluster((Links("dc", 2, 1e9), Links("node", 2, 1e9, links=2), Links("gpu", 4, 1e9)))
    (sent,) = all_reduce(16.0, (2, 2, 4), cluster)
    # On a ring of 16 ranks every rank sends 30 bytes: 2 of them leave a datacenter, 4 a node.
    assert level_bytes(sent, cluster) == pytest.approx((2 * 30, 4 * 30, 12 * 30))
    alone = Migration((2, 1, 1), Codec(10.0, CodecBase.ZERO))
    shape = model(experts=32)
    shared = replace(alone, codec=Codec(10.0, CodecBase.SHARED))
    plainly, summed = (shared_work(shape, cluster, one, 32, Direct()).gather for one in (alone, shared))
    assert len(summed) == len(plainly) + 1


def test_encoded_gradients_send_as_many_bytes_home_as_encoded_experts_take():
    cluster = Cluster((Links("dc", 2, 1e9), Links("gpu", 4, 1e9)))
    shape = model(experts=32)
    codec = Codec(10.0, CodecBase.ZERO, gradient_ratio=10.0)
    codecs = codec, replace(codec, gradient_ratio=1.0)
    encoded, whole = (shared_work(shape, cluster, Migration((2, 4), one), 32, Direct()) for one in codecs)

    def sent(flows):
        return np.sum([level_bytes(flow, cluster) for flow in flows], 0)

    np.testing.assert_allclose(sent(encoded.gather_home), sent(encoded.gather))
    np.testing.assert_allclose(sent(whole.gather_home), 10 * sent(encoded.gather_home), rtol=0.01)


def test_what_a_codec_remembers_takes_memory():
    cluster, shape = Cluster((Links("dc", 2, 1e9), Links("gpu", 4, 1e9))), model(experts=32)
    forgetful, remembering = (
        simulate_uniform(shape, cluster, migration=Migration((2, 1), Codec(10.0, base))).memory
        for base in (CodecBase.ZERO, CodecBase.REMEMBERED)
    )
    # Two ranks' four experts each, of all layers.
    assert remembering.total - forgetful.total == shape.layers * 8 * shape.expert_bytes


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_imbalances_are_means_over_the_layers_of_the_model(layers):
    counts = np.full((3, 8, 16), 16)
    counts[1, :, 0], counts[2, :, 0] = 64, 256
    cluster = Cluster((Links("gpu", 8, 1e9),))
    report = simulate(systems.plain(), model(layers=layers), cluster, counts)
    assert report.imbalance_before == pytest.approx(report.imbalance_after)

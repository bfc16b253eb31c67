"""One rank alone equals the dense layer if it is the whole group, and serves the rows of the plan otherwise."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from benchmarks.gpu import one_rank
from benchmarks.gpu.comparison import TINY, Served, Variant, routing, variants
from benchmarks.gpu.one_rank import LocalExchange, RankInputs, copy_rows, rank_step
from jax_moe_lb import Buffers, Experts, Topology, exact
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.experts import dense_ffn
from jax_moe_lb.core.plan import load

TOKENS, EXPERTS, PER_TOKEN, HIDDEN, INNER = 12, 4, 2, 8, 16


@pytest.mark.slow
@pytest.mark.parametrize("headroom", [1.0, 0.4])
def test_the_only_rank_equals_the_dense_layer(headroom):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    up, gate, down = normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, INNER, HIDDEN)
    x, weights, upstream = normal(TOKENS, HIDDEN), normal(TOKENS, PER_TOKEN), normal(TOKENS, HIDDEN)
    routed = jnp.asarray(np.argsort(rng.random((TOKENS, EXPERTS)), 1)[:, :PER_TOKEN], jnp.int32)
    counts = jnp.bincount(routed.reshape(-1), length=EXPERTS)[None].astype(jnp.int32)
    experts, topology = Experts(up, down, gate), Topology.flat(1)
    plan = plain_plan(counts, topology, EXPERTS)
    inputs = RankInputs(jnp.int32(0), routed, weights, counts, plan, x, experts, upstream)
    run = partial(rank_step, exchange=LocalExchange(Buffers(headroom)), capacity=None, topology=topology)
    found = jax.jit(run)(inputs)

    def dense(x, weights, experts):
        of_experts = jax.vmap(dense_ffn, (None, 0))(x, experts)
        return (of_experts[routed, jnp.arange(TOKENS)[:, None]] * weights[..., None]).sum(1)

    want, pull_back = jax.vjp(dense, x, weights, experts)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, (want, pull_back(upstream)))


@pytest.mark.slow
def test_a_rank_serves_the_rows_of_the_plan_in_its_rounds():
    served = Served.of(TINY, Variant(exact()), 4.0)
    exchange = LocalExchange(Buffers(0.5))
    copies = jnp.arange(TINY.copies, dtype=jnp.float32)[:, None]
    for rank in range(TINY.ranks):
        routed, counts, plan = jax.tree.map(jnp.asarray, (served.routed[rank], served.counts, served.plan))
        receipt = exchange.receipt_of(jnp.int32(rank), routed, counts, plan)
        topology, rounds = Topology.flat(TINY.ranks), range(int(receipt.rounds))
        rows = [exchange.send(copies, receipt, jnp.int32(i), topology)[1] for i in rounds]
        held = served.plan.placement[rank]
        want = np.where(held >= 0, served.plan.quota[held, rank], 0)
        np.testing.assert_array_equal(sum(rows), want)
        assert want.sum() == load(served.plan)[rank]


def test_capacity_bounds_the_rows_of_a_rank_and_loses_copies():
    limited = variants(TINY)["capacity 1.25"]
    served, whole = Served.of(TINY, limited, 4.0), Served.of(TINY, Variant(exact()), 4.0)
    assert load(served.plan).max() <= limited.system.dispatch.buffers.rows(TINY.copies)
    assert served.dropped == pytest.approx(1 - served.counts.sum() / whole.counts.sum())
    assert 0.1 < served.dropped <= served.hurt
    assert whole.dropped == whole.hurt == 0


def test_experts_of_a_token_are_distinct_and_even_counts_equal():
    for skew in (4.0, "even"):
        routed = np.sort(routing(TINY, skew), 2)
        assert (np.diff(routed) > 0).all()
        assert set(routed.reshape(-1)) <= set(range(TINY.experts))
    assert len(set(Served.of(TINY, Variant(exact()), "even").counts.sum(0))) == 1


@pytest.mark.parametrize(("first", "to", "number"), [(0, 0, 24), (16, 0, 21), (0, 8, 5)])
def test_rows_are_copied(monkeypatch, first, to, number):
    source = jnp.arange(24.0 * 2048).reshape(24, 2048)
    target = -jnp.ones((32, 2048))
    found = copy_rows(source, target, first, to, jnp.int32(number))
    want = np.array(target)
    want[(to + np.arange(number)) % 32] = np.asarray(source)[(first + np.arange(number)) % 24]
    np.testing.assert_array_equal(found, want)
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    found = one_rank._kernel(source, target, jnp.array([first, to, number], jnp.int32))
    np.testing.assert_array_equal(found, want)


SOURCES = jnp.array([1, -1, 0, 1, -1], jnp.int32)


@pytest.mark.slow
def test_only_occupied_slots_are_copied_and_added(monkeypatch):
    weights = jnp.arange(2.0 * 64 * 128).reshape(2, 64, 128)
    gradients = jnp.ones((5, 64, 128)).at[jnp.array([1, 4])].set(jnp.nan)
    replicas = np.asarray(weights)[np.maximum(SOURCES, 0)] * (np.asarray(SOURCES) >= 0)[:, None, None]
    sums = np.asarray(weights) + np.array([1, 2])[:, None, None]
    np.testing.assert_array_equal(one_rank.copy_slots(weights, SOURCES), replicas)
    np.testing.assert_array_equal(one_rank.add_slots(weights, gradients, SOURCES), sums)
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    flat = weights.reshape(2, -1)
    found = one_rank._copy_kernel(flat, SOURCES).reshape(5, 64, 128)
    np.testing.assert_array_equal(np.asarray(found)[[0, 2, 3]], replicas[[0, 2, 3]])
    found = one_rank._add_kernel(flat, gradients.reshape(5, -1), SOURCES)
    np.testing.assert_array_equal(found.reshape(sums.shape), sums)


def test_a_rank_copies_its_own_slots_of_the_plan():
    served = Served.of(TINY, Variant(exact()), 4.0)
    for rank in range(TINY.ranks):
        plan = replace(served.plan, placement=np.roll(served.plan.placement, -rank, 0))
        held = served.plan.placement[rank, plan.num_home :]
        want = np.where(held < 0, -1, held % plan.num_home)
        np.testing.assert_array_equal(one_rank._sources(jax.tree.map(jnp.asarray, plan)), want)

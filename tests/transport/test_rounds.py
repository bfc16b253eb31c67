"""Rounds under random plans: for any plan and routing, each row is served exactly once."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Buffers, Experts, Topology, exact, feplb, greedy, plain, ultraep
from jax_moe_lb.kernels import grouped_ffn
from jax_moe_lb.kernels.grouped_matmul import grouped_outer
from jax_moe_lb.transport import Direct, Gather, Once, Saved, rounds, slot_weights
from tests.layer_cases import Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

pytestmark = pytest.mark.slow


def unread_sums_as_nan(traced):
    """Return `grouped_outer` with NaN where kernels of accelerators write nothing."""

    def outer(left, right, groups, dtype, sums, parts):
        found = grouped_outer(left, right, groups, dtype, sums, parts)
        if groups.is_read is None:
            return found
        traced.append(found)
        return jnp.where(((groups.sizes == 0) & ~groups.is_read)[:, None, None], jnp.nan, found)

    return outer


@parametrize(
    "system",
    [exact(2), feplb(2), replace(exact(2), replicate=Gather())],
    [
        ultraep(2),
        replace(exact(2), dispatch=Once()),
        exact(2, Buffers(0.4)),
        replace(exact(2), dispatch=Direct(saved=Saved(replicas=True))),
    ],
    ids=["exact", "two phases", "gather", "relays", "once", "rounds", "saved"],
)
def test_gradients_of_empty_slots_are_not_read(system, monkeypatch):
    case, traced = Case(), []
    monkeypatch.setattr(grouped_ffn, "grouped_outer", unread_sums_as_nan(traced))
    mesh = make_mesh((8,), ("expert",))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    for workload in ("balanced", "hot_rank"):
        assert_equals_dense(layer, case.arguments(workload, 8), 1e-4)
    assert traced


FORM_SYSTEMS = {"home": plain(), "gathered": greedy(2), "relayed": ultraep(2), "two_phase": feplb(2)}
# platform, max_rounds, in_parts
FORMS = {
    "gpu": ("gpu", None, False),
    "gpu in 4 rounds": ("gpu", 4, False),
    "gpu in parts": ("gpu", None, True),
    "tpu": ("tpu", None, False),
}


@parametrize("system, form", [("gathered", "gpu in 4 rounds")], itertools.product(FORM_SYSTEMS, FORMS))
def test_forms_of_accelerators_equal_dense(system, form, monkeypatch, x64):
    """Gate and up are adjacent in the backward pass, and experts are in parts for Triton kernels; includes biases."""
    platform, max_rounds, in_parts = FORMS[form]
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: platform)
    monkeypatch.setattr(slot_weights, "takes_parts", lambda parts: in_parts)
    monkeypatch.setattr(grouped_ffn, "products_are_by_group", lambda: False)
    mesh, case, system = make_mesh((8,), ("expert",)), Case(), FORM_SYSTEMS[system]
    system = system.replace(buffers=replace(system.dispatch.buffers, max_rounds=max_rounds))
    rng = np.random.default_rng(3)
    x, mask, kernel, experts, target = case.arguments("zipf", 8, "float64", "float64")
    up_bias, gate_bias = jnp.asarray(0.3 * rng.normal(size=(2, case.num_experts, case.mlp_dim)))
    down_bias = jnp.asarray(0.3 * rng.normal(size=(case.num_experts, case.width)))
    experts = replace(experts, up_bias=up_bias, gate_bias=gate_bias, down_bias=down_bias)
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    stats = assert_equals_dense(layer, (x, mask, kernel, experts, target), 1e-11)
    assert (int(stats.weight_bytes_moved.sum()) > 0) == (system.replica_slots > 0)


@pytest.mark.parametrize(
    ("num_rows", "are_joined", "in_parts", "goes"),
    [(26, False, False, True), (25, False, False, False), (1, True, True, True), (51, False, True, False)],
    ids=["many rows", "few rows", "a copy already", "few rows for two parts"],
)
def test_gate_goes_in_up_where_less_is_moved(num_rows, are_joined, in_parts, goes, monkeypatch):
    """Two kinds of 128 words of each part would be read and written, more than five times rows of 4 words."""
    experts = Experts(up=jnp.zeros((2, 4, 16)), down=jnp.zeros((2, 16, 4)), gate=jnp.zeros((2, 4, 16)))
    monkeypatch.setattr(slot_weights, "takes_parts", lambda parts: not are_joined)
    rows, slots = jnp.zeros((num_rows, 4)), slot_weights.Slots(experts, experts if in_parts else None)
    assert not slots.fuse_gate_up(rows)
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: "tpu")
    assert slots.fuse_gate_up(rows) == goes
    assert not slots._replace(home=experts.fused()).fuse_gate_up(rows)


@pytest.mark.parametrize(
    ("platform", "fuses", "adds"),
    [("cpu", False, True), ("gpu", True, False), ("tpu", True, True), ("tpu", False, False)],
)
def test_a_backward_pass_has_chunks_where_kernels_add_their_sums(platform, fuses, adds, monkeypatch):
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: platform)
    monkeypatch.setattr(slot_weights, "fuses", lambda rows, parts: fuses)
    experts = Experts(up=jnp.zeros((2, 4, 16)), down=jnp.zeros((2, 16, 4)))
    exchange, tokens = Direct(Buffers(chunks=2)), jnp.zeros((32, 4))
    backward = rounds._backward_exchange(exchange, tokens, 8, slot_weights.Slots(experts, None))
    assert backward.buffers.chunks == 1 + adds


@parametrize("platform", ["cpu"], ["gpu"])
def test_gradients_of_many_rounds_lose_no_small_addends(platform, monkeypatch):
    """The first round has the dtype of the weights; further ones are added in float32, or in two halves."""
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: platform)
    mesh, args = make_mesh((8,), ("expert",)), Case().arguments("zipf", 8, "bfloat16", "bfloat16")

    def gradients(headroom):
        layer = sharded_moe(mesh, Topology.from_mesh(mesh), exact(2, Buffers(headroom)))
        (_, stats), (_, _, of_experts) = with_gradients(layer)(*args)
        return int(stats.rounds[0]), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), of_experts)

    (one, want), (many, got) = gradients(8.0), gradients(0.04)
    assert (one, many > 20) == (1, True)
    for ours, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Three roundings: of the first round and of both sums.
        assert np.abs(ours - expected).max() <= 3 * 2**-9 * np.abs(expected).max()
        assert np.abs(ours - expected).mean() <= 2**-9 * np.abs(expected).mean()


def test_halves_are_a_wide_sum():
    """Of 100 addends below half a unit in the last place, a bfloat16 sum would keep none."""
    first, part = jnp.full(8, 256, jnp.bfloat16), jnp.linspace(0.1, 0.9, 8).astype(jnp.bfloat16)
    start = slot_weights.Halves(first, jnp.zeros_like(first))
    add = jax.jit(lambda sums: jax.lax.fori_loop(0, 100, lambda _, sums: sums.plus(part), sums))
    want = 256 + 100 * np.asarray(part, np.float64)
    high, low = (np.asarray(one, np.float64) for one in add(start))
    np.testing.assert_allclose(high + low, want, rtol=2**-10)
    np.testing.assert_allclose(high, want, rtol=2**-8)

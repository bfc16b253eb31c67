"""Expected copies and sums are computed with NumPy; tests use the custom calls unless stated otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb.collectives import expert_gather, peer_copy
from jax_moe_lb.collectives.expert_gather import Group, add_at_home, zero_sums
from jax_moe_lb.collectives.peer_copy import Route, add_copies_at_home, add_pulled, copy_expert_weights
from tests.collectives.peer_copy_cases import (
    ALL,
    HOME,
    MESH,
    RANKS,
    ROUTE,
    SLOTS,
    SPEC,
    TABLES,
    copy,
    draw,
    expected,
    expected_sums,
    loss_and_copies,
    over_ranks,
    sum_of,
    weights,
)
from tests.layer_cases import make_mesh

# ---- values and gradients ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_slots_are_their_experts_and_gradients_are_their_sums(dtype, x64):
    home = weights(dtype)
    forward, backward = over_ranks(copy), over_ranks(loss_and_copies, (SPEC, ALL, SPEC))
    for name, wanted in TABLES.items():
        slots = forward(home, wanted)
        target = jax.tree.map(lambda slot: draw(slot.shape, dtype, 3), slots)
        gradients = backward(home, wanted, target)
        for kind in home:
            np.testing.assert_array_equal(
                np.asarray(slots[kind], np.float64), expected(home[kind], wanted), err_msg=name
            )
            np.testing.assert_array_equal(gradients[kind], expected_sums(target[kind], wanted), err_msg=name)
    # "no slots" has another shape.
    assert forward._cache_size() == backward._cache_size() == 2


@pytest.mark.slow
def test_an_empty_slots_gradient_goes_nowhere():
    wanted = TABLES["one expert everywhere"]
    target = jnp.where((wanted.reshape(-1) >= 0)[:, None], 1.0, jnp.nan) + jnp.zeros((1, 5))
    sums = over_ranks(sum_of)(target, wanted)
    np.testing.assert_array_equal(sums[2], np.full(5, 7.0))
    assert not np.asarray(sums)[[0, 1, *range(3, RANKS * HOME)]].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_pulled_replicas_have_the_bits_of_sums_at_home(dtype):
    """The GPU algorithm on CPUs; for experts with at most one replica per rank, bitwise equal to `ragged_sum`."""
    slots = draw((RANKS * SLOTS, 4, 5), dtype)

    def three(slots, wanted):
        zeros = zero_sums((slots,), HOME)
        (ragged,) = add_at_home(zeros, (slots,), wanted, HOME, RANKS, Group(("expert",)))
        return sum_of(slots, wanted), sum_of(slots, wanted, add_pulled), ragged.astype(dtype)

    run = over_ranks(three)
    for name in ("any", "one expert everywhere", "all empty"):
        at_home, pulled, ragged = run(slots, TABLES[name])
        np.testing.assert_array_equal(at_home, pulled, err_msg=name)
        np.testing.assert_array_equal(at_home, ragged, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 3])
def test_replicas_that_find_no_room_come_home_in_turns(room, monkeypatch):
    """The sums are bitwise equal to a single pass."""
    slots = draw((RANKS * SLOTS, 4, 5), "bfloat16")
    for module in (expert_gather, peer_copy):
        monkeypatch.setattr(module, "max_incoming_replicas", lambda *_: room)

    def both(slots, wanted):
        zeros = zero_sums((slots,), HOME)
        (ragged,) = add_at_home(zeros, (slots,), wanted, HOME, RANKS, Group(("expert",)))
        return sum_of(slots, wanted, add_pulled), ragged.astype(slots.dtype)

    run = over_ranks(both)
    for name in ("any", "one expert everywhere", "own home experts"):
        for sums in run(slots, TABLES[name]):
            np.testing.assert_array_equal(sums, expected_sums(slots, TABLES[name]), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("how", [add_copies_at_home, add_pulled])
def test_sums_grow_by_what_comes_home_and_what_follows_them_passes_through(how):
    """Narrow sums of many replicas are rounded once: added one by one, addends of 1/256 would not change 1."""
    wanted = jnp.full((RANKS, HOME), -1, jnp.int32).at[:, 0].set(4).at[1].set(-1)
    sums, slots = jnp.ones((RANKS * (HOME + 1), 5), jnp.bfloat16), jnp.full((RANKS * HOME, 5), 1 / 256, jnp.bfloat16)
    run = over_ranks(lambda sums, slots, w: how((sums,), (slots,), w, HOME, ROUTE)[0], (SPEC, SPEC, ALL))
    got = np.asarray(run(sums, slots, wanted), np.float32).reshape(RANKS, HOME + 1, 5)
    want = np.ones_like(got)
    want[1, 1] = jnp.bfloat16(1 + (RANKS - 1) / 256)
    np.testing.assert_array_equal(got, want)


def test_no_slots_have_no_sums():
    for how in (add_copies_at_home, add_pulled):
        run = over_ranks(functools.partial(sum_of, how=how))
        np.testing.assert_array_equal(run(jnp.zeros((0, 4)), TABLES["no slots"]), np.zeros((RANKS * HOME, 4)))


def test_sums_have_equal_bits_in_every_run():
    wanted = TABLES["any"] * 0 + 5
    slots = draw((RANKS * SLOTS, 64, 64), jnp.float32)
    run = over_ranks(sum_of)
    first = np.asarray(run(slots, wanted))
    for _ in range(20):
        np.testing.assert_array_equal(run(slots, wanted), first)


@pytest.mark.slow
def test_one_device_can_hold_all_ranks():
    home, wanted, route = weights(), TABLES["any"], Route(())

    @jax.jit
    def both(home, target):
        slots, vjp = jax.vjp(lambda h: copy_expert_weights(h, wanted, route=route), home)
        return slots, vjp(target)[0], sum_of(target["up"], wanted, add_pulled, RANKS * HOME, route)

    target = jax.tree.map(lambda h: draw((RANKS * SLOTS, *h.shape[1:]), jnp.float32, 3), home)
    slots, gradients, pulled = both(home, target)
    np.testing.assert_array_equal(slots["up"], expected(home["up"], wanted))
    np.testing.assert_array_equal(gradients["up"], expected_sums(target["up"], wanted))
    np.testing.assert_array_equal(pulled, gradients["up"])


# ---- relays -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_chain_of_relays_brings_the_same_bytes():
    """Expert 0 passes through all ranks, 100 bytes at a time."""
    wanted = jnp.asarray([[-1, 4], *[[0, -1]] * 7], jnp.int32)
    relay = jnp.asarray([[-1, -1], *[[rank, -1] for rank in range(7)]], jnp.int32)
    route = Route(("expert",), timeout_s=20.0, chunk_bytes=100)
    home = draw((RANKS * HOME, 50, 7))
    run = over_ranks(lambda h, w, r: copy_expert_weights(h, w, r, route=route), (SPEC, ALL, ALL))
    np.testing.assert_array_equal(run(home, wanted, relay), expected(home, wanted))
    gradients = over_ranks(
        lambda h, w, r: jax.grad(lambda h: copy_expert_weights(h, w, r, route=route).sum())(h), (SPEC, ALL, ALL)
    )(home, wanted, relay)
    np.testing.assert_array_equal(gradients[0], np.full((50, 7), 7.0))


# ---- transformations ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
def test_groups_side_by_side_have_tables_of_their_own(axis_type, check_vma):
    """Home weights are equal in both groups, tables are not: gradients of both are summed."""
    mesh = make_mesh((2, 4), ("data", "expert"), axis_type)
    tables = jnp.asarray(np.random.default_rng(5).integers(-1, 8, (2, 4, 3)), jnp.int32)
    home = draw((8, 6))
    target = draw((2, 12, 6), jnp.float32, 3)

    def one_rank(home, wanted, target):
        slots, vjp = jax.vjp(lambda h: copy_expert_weights(h, wanted[0], route=ROUTE), home)
        return slots[None], vjp(target[0])[0]

    gradient_spec = PartitionSpec("expert") if check_vma else PartitionSpec(("data", "expert"))
    specs = (PartitionSpec("expert"), PartitionSpec("data"), PartitionSpec("data", "expert"))
    run = jax.shard_map(
        one_rank,
        mesh=mesh,
        in_specs=specs,
        out_specs=(PartitionSpec("data", "expert"), gradient_spec),
        check_vma=check_vma,
    )
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((home, tables, target), specs, strict=True)]
    slots, gradients = jax.tree.map(np.asarray, jax.jit(run)(*args))
    sums = []
    for group in range(2):
        np.testing.assert_array_equal(slots[group], expected(home, tables[group]))
        sums.append(np.asarray(expected_sums(np.asarray(target)[group], tables[group], 8)))
    if check_vma:
        np.testing.assert_allclose(gradients, sums[0] + sums[1], rtol=1e-6)
    else:
        np.testing.assert_array_equal(gradients, np.concatenate(sums))


@pytest.mark.slow
def test_vmap_copies_one_after_the_other():
    home = jnp.stack([weights()["up"], 2 * weights()["up"]])
    wanted = jnp.stack([TABLES["any"], TABLES["own home experts"]])
    run = jax.jit(
        jax.shard_map(
            jax.vmap(copy),
            mesh=MESH,
            in_specs=(PartitionSpec(None, "expert"), ALL),
            out_specs=PartitionSpec(None, "expert"),
        )
    )
    slots = run(home, wanted)
    for i in range(2):
        np.testing.assert_array_equal(slots[i], expected(home[i], wanted[i]))


def test_sums_of_more_replicas_than_a_legal_plan_has_are_no_numbers():
    wanted, slots = jnp.full((RANKS, HOME), 4, jnp.int32), jnp.ones((RANKS * HOME, 5))
    sums = over_ranks(functools.partial(sum_of, how=add_pulled))(slots, wanted)
    assert np.isnan(sums[4]).all()
    assert not np.asarray(sums)[[0, 1, 2, 3, *range(5, RANKS * HOME)]].any()

"""Peer copies of weights against sums in NumPy; tests use the custom calls unless stated otherwise."""

import functools
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb.collectives import expert_gather, peer_copy
from jax_moe_lb.collectives.expert_gather import Group, add_at_home, rounded, zero_sums
from jax_moe_lb.collectives.peer_copy import Route, add_copies_at_home, add_pulled, copy_expert_weights, join, start
from jax_moe_lb.core.custom_calls import is_built
from tests.layer_cases import make_mesh
from tests.marks import parametrize

RANKS, HOME, SLOTS = 8, 3, 2
MESH = make_mesh((RANKS,), ("expert",))
ROUTE = Route(("expert",), timeout_s=20.0)
SPEC, ALL = PartitionSpec("expert"), PartitionSpec()


def tables():
    rng = np.random.default_rng(0)
    hot = np.full((RANKS, SLOTS), -1)
    hot[1:, 1] = 2
    return {
        "any": rng.integers(-1, RANKS * HOME, (RANKS, SLOTS)),
        "one expert everywhere": hot,
        "own home experts": np.repeat(np.arange(RANKS)[:, None] * HOME, SLOTS, 1),
        "all empty": np.full((RANKS, SLOTS), -1),
        "no slots": np.zeros((RANKS, 0)),
    }


TABLES = {name: jnp.asarray(table, jnp.int32) for name, table in tables().items()}


def draw(shape, dtype=jnp.float32, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def weights(dtype=jnp.float32):
    return {"up": draw((RANKS * HOME, 4, 5), dtype, 1), "down": draw((RANKS * HOME, 7), dtype, 2)}


def expected(home, wanted):
    flat = np.asarray(wanted).reshape(-1)
    taken = np.asarray(home, np.float64)[np.maximum(flat, 0)]
    return np.where((flat >= 0).reshape(-1, *[1] * (taken.ndim - 1)), taken, 0)


def expected_sums(slots, wanted, num_experts=RANKS * HOME):
    """Return sums in float32 in the order of ranks and slots, as documented."""
    wide = np.float64 if slots.dtype == np.float64 else np.float32
    sums = np.zeros((num_experts, *slots.shape[1:]), wide)
    for slot, expert in zip(np.asarray(slots, wide), np.asarray(wanted).reshape(-1), strict=True):
        if expert >= 0:
            sums[expert] += slot
    return jnp.asarray(sums).astype(slots.dtype)


def sum_of(slots, wanted, how=add_copies_at_home, num_experts=HOME, route=ROUTE):
    """Return the sums of one kind of weights at home, starting from zeros."""
    return rounded(how(zero_sums((slots,), num_experts), (slots,), wanted, HOME, route), (slots,))[0]


def over_ranks(function, in_specs=(SPEC, ALL), mesh=MESH, out_specs=SPEC, **options):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


def copy(home, wanted):
    return copy_expert_weights(home, wanted, route=ROUTE)


def loss_and_copies(home, wanted, target):
    def loss(home):
        slots = copy(home, wanted)
        return sum((slot * t).sum() for slot, t in zip(jax.tree.leaves(slots), jax.tree.leaves(target), strict=True))

    return jax.grad(loss)(home)


@pytest.mark.slow
@parametrize("dtype", ["float32", "bfloat16"], ["float64", "float16"])
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
@parametrize("room", [1], [3])
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


@pytest.mark.slow
@parametrize(
    "axis_type, check_vma",
    [(AxisType.Auto, False), (AxisType.Explicit, True)],
    [(AxisType.Auto, True), (AxisType.Explicit, False)],
)
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
    run = over_ranks(one_rank, specs, mesh, (PartitionSpec("data", "expert"), gradient_spec), check_vma=check_vma)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((home, tables, target), specs, strict=True)]
    slots, gradients = jax.tree.map(np.asarray, run(*args))
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
    stacked = PartitionSpec(None, "expert")
    slots = over_ranks(jax.vmap(copy), (stacked, ALL), out_specs=stacked)(home, wanted)
    for i in range(2):
        np.testing.assert_array_equal(slots[i], expected(home[i], wanted[i]))


def test_sums_of_more_replicas_than_a_legal_plan_has_are_no_numbers():
    wanted, slots = jnp.full((RANKS, HOME), 4, jnp.int32), jnp.ones((RANKS * HOME, 5))
    sums = over_ranks(functools.partial(sum_of, how=add_pulled))(slots, wanted)
    assert np.isnan(sums[4]).all()
    assert not np.asarray(sums)[[0, 1, 2, 3, *range(5, RANKS * HOME)]].any()


def bad(entry, wanted=None, relay=None):
    wanted, relay = np.array(TABLES["any"]), np.full((RANKS, SLOTS), -1, np.int32)
    entry(wanted, relay)
    return jnp.asarray(wanted), jnp.asarray(relay)


def no_such_expert(wanted, relay):
    wanted[3, 1] = 24


def no_such_rank(wanted, relay):
    wanted[2, 0], relay[2, 0] = 0, 8


def does_not_hold(wanted, relay):
    wanted[:] = -1
    wanted[2, 0], relay[2, 0] = 0, 5


def circle(wanted, relay):
    wanted[:] = -1
    wanted[2, 0] = wanted[3, 1] = 0
    relay[2, 0], relay[3, 1] = 3, 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (no_such_expert, "wanted of rank 3, slot 1 is 24; expected an expert below 24"),
        (no_such_rank, "relay of rank 2, slot 0 is 8; expected a rank from 0 to 7"),
        (does_not_hold, "relay of rank 2, slot 0 is 5; expected a rank holding expert 0"),
        (circle, "relay of rank 2, slot 0 is 3; expected a chain from the expert's home"),
    ],
)
def test_a_bad_entry_stops_all_ranks_and_the_next_program_works(entry, message):
    run = over_ranks(lambda h, w, r: copy_expert_weights(h, w, r, route=ROUTE), (SPEC, ALL, ALL))
    home = weights()["up"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(home, *bad(entry)))
    good = jnp.asarray(TABLES["any"]), jnp.full((RANKS, SLOTS), -1, jnp.int32)
    np.testing.assert_array_equal(run(home, *good), expected(home, good[0]))


@pytest.mark.slow
def test_tables_that_differ_between_ranks_are_refused():
    wanted = jnp.tile(TABLES["any"][None], (RANKS, 1, 1)).at[5, 2, 1].set(7)
    run = over_ranks(lambda h, w: copy(h, w[0]), (SPEC, SPEC))
    with pytest.raises(jax.errors.JaxRuntimeError, match="wanted of rank 2, slot 1 is 7 on rank 5 and"):
        jax.block_until_ready(run(weights(), wanted))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_the_next_program_works():
    route = Route(("expert",), site="layer 3", timeout_s=0.5)

    def one_rank(home, wanted):
        here = jax.lax.axis_index("expert") != 3
        zeros = jnp.zeros_like(home, shape=(SLOTS, *home.shape[1:]))
        return jax.lax.cond(here, lambda h: copy_expert_weights(h, wanted, route=route), lambda h: zeros, home)

    home, wanted = weights()["up"], TABLES["any"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"layer 3: rank 3 of 8 did not arrive within 0\.5 s"):
        jax.block_until_ready(over_ranks(one_rank)(home, wanted))
    np.testing.assert_array_equal(over_ranks(copy)(home, wanted), expected(home, wanted))


def test_a_ticket_of_another_run_is_refused():
    pending = over_ranks(lambda h, w: jax.tree.map(lambda leaf: leaf[None], start(h, w, route=ROUTE)))(
        weights()["up"], TABLES["any"]
    )
    late = over_ranks(lambda p: join(jax.tree.map(lambda leaf: leaf[0], p)), (SPEC,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected one that start gave in this run"):
        jax.block_until_ready(late(pending))


@pytest.mark.parametrize(
    ("home", "wanted", "message"),
    [
        ((3, 2), (4, 2), r"wanted has 4 ranks; expected the 8 of the mesh axes"),
        ((3, 2), (0, 2), r"wanted has shape \(0, 2\); expected \[R, P\] with R at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_when_traced(home, wanted, message):
    with pytest.raises(ValueError, match=message):
        over_ranks(copy)(jnp.zeros((home[0] * RANKS, home[1])), jnp.zeros(wanted, jnp.int32))


@pytest.mark.slow
def test_work_between_start_and_join_runs_while_a_rank_is_late():
    """Rank 0 is delayed until all others have done the work after `start`."""
    others_done = threading.Semaphore(0)

    def arrive_late(rank, home):
        for _ in range(RANKS - 1 if rank == 0 else 0):
            assert others_done.acquire(timeout=10), "another rank's work did not run"
        return home

    def work(rank, x):
        if rank != 0:
            others_done.release()
        return x + 1

    def callback(function, *args):
        return jax.pure_callback(function, jax.ShapeDtypeStruct(args[-1].shape, args[-1].dtype), *args)

    def one_rank(home, x):
        rank = jax.lax.axis_index("expert")
        pending = start(callback(arrive_late, rank, home), TABLES["any"], route=ROUTE)
        done = callback(work, rank, x)
        slots = tail = join(pending, after=done)
        # XLA:CPU runs short programs sequentially; these steps make the program longer.
        for _ in range(12):
            tail = jnp.cumsum(tail, 1)
        return slots, done, tail

    run = over_ranks(one_rank, (SPEC, SPEC), check_vma=False)
    home, x = draw((RANKS * HOME, 300)), draw((RANKS, 500))
    # A compiled program is printed in execution order, so this checks the position of the work after `start`.
    lines = run.lower(home, x).compile().as_text().splitlines()
    calls = [line for line in lines if "moe_lb_copy_start" in line or ("callback" in line and "f32[1,500]" in line)]
    assert "moe_lb_copy_start" in calls[0]
    slots, done, _ = run(home, x)
    np.testing.assert_array_equal(slots, expected(home, TABLES["any"]))
    np.testing.assert_array_equal(done, x + 1)


@pytest.mark.slow
def test_many_pairs_in_one_program_beside_collectives():
    """Programs continue at the end of their copies; sums of other ranks must not delay them."""
    wanted = TABLES["any"]

    def one_rank(home, wanted):
        total = jnp.zeros_like(home, shape=(SLOTS, *home.shape[1:]))
        pending = [start(home * i, wanted, route=ROUTE) for i in range(1, 5)]
        for i, one in enumerate(pending):
            slots = join(one, after=total)
            total = total + slots + jax.lax.psum(slots, "expert") * i
        return total

    run = over_ranks(one_rank)
    home = draw((RANKS * HOME, 40))
    copies = expected(home, wanted).reshape(RANKS, SLOTS, 40)
    want = sum(i * copies + (i - 1) * i * copies.sum(0) for i in range(1, 5))
    for _ in range(20):
        got = np.asarray(jax.block_until_ready(run(home, wanted)), np.float64)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-4, atol=1e-3)


def test_the_pair_is_not_differentiable():
    with pytest.raises(ValueError, match="cannot be differentiated"):
        over_ranks(lambda h, w: jax.grad(lambda h: join(start(h, w, route=ROUTE)).sum())(h))(
            weights()["up"], TABLES["any"]
        )


@pytest.mark.slow
def test_memory_stays_flat():
    run = over_ranks(copy)
    home, wanted = draw((RANKS * HOME, 16384)), TABLES["any"]
    for i in range(600):
        jax.block_until_ready(run(home, wanted))
        if i == 150:
            before = resident_bytes()
    # 450 leaks of one slot would be 29 MB.
    assert resident_bytes() - before < 14e6


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_lowering_for_cuda():
    def both_ways(home, wanted, target):
        slots, vjp = jax.vjp(lambda h: copy(h, wanted), home)
        return slots, vjp(target)[0]

    run = over_ranks(both_ways, (SPEC, ALL, SPEC))
    home = jax.tree.map(lambda h: jax.ShapeDtypeStruct(h.shape, jnp.bfloat16), weights())
    target = jax.tree.map(lambda h: jax.ShapeDtypeStruct((RANKS * SLOTS, *h.shape[1:]), jnp.bfloat16), home)
    wanted = jax.ShapeDtypeStruct((RANKS, SLOTS), jnp.int32)
    text = run.trace(home, wanted, target).lower(lowering_platforms=("cuda",)).as_text()
    if not is_built("cuda"):
        assert "ragged_all_to_all" in text
        assert "moe_lb_copy" not in text
        return
    assert "@moe_lb_copy_start" in text
    assert "@moe_lb_copy_join" in text
    assert "moe_lb_copy_sum" not in text
    assert f"num_participants = {RANKS} : i64" in text
    # Home experts are copied to slots; backward, the slots are copied.
    assert f"num_home = {HOME} : i64" in text
    assert f"num_home = {SLOTS} : i64" in text
    assert "timeout_s = 2.000000e+01 : f64" in text
    joins = [line for line in text.splitlines() if "@moe_lb_copy_join" in line]
    assert all("output_operand_alias<output_tuple_indices = [0], operand_index = 1" in line for line in joins)
    assert "command_buffer" not in text


def test_lowering_for_processes_of_one_machine():
    route = Route(("expert",), timeout_s=20.0, reach=False, processes=tuple(range(RANKS)))

    def gradient(home, wanted, target):
        return jax.vjp(lambda h: copy_expert_weights(h, wanted, route=route), home)[1](target)[0]

    run = over_ranks(gradient, (SPEC, ALL, SPEC))
    home = jax.tree.map(lambda h: jax.ShapeDtypeStruct(h.shape, jnp.bfloat16), weights())
    target = jax.tree.map(lambda h: jax.ShapeDtypeStruct((RANKS * SLOTS, *h.shape[1:]), jnp.bfloat16), home)
    traced = run.trace(home, jax.ShapeDtypeStruct((RANKS, SLOTS), jnp.int32), target)
    # CPUs have no memory shared between processes.
    assert "moe_lb_copy" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_lb_copy_sum" not in text
    assert ("@moe_lb_copy_start" in text) == is_built("cuda")
    if is_built("cuda"):
        assert text.count(f"[{', '.join(map(str, range(RANKS)))}]> : tensor<{RANKS}xi64>") == text.count(
            "@moe_lb_copy_start"
        )

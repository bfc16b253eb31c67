"""Invalid inputs of peer copies, `start` and `join`, and lowering for GPUs."""

import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights, join, start
from jax_moe_lb.core.custom_calls import is_built
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
    over_ranks,
    weights,
)

# ---- invalid inputs ---------------------------------------------------------------


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


# ---- the pair -----------------------------------------------------------------------


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

    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, SPEC), out_specs=SPEC, check_vma=False))
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


# ---- lowering for a GPU ---------------------------------------------------------------


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

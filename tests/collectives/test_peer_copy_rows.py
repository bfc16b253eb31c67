"""Peer copies of rows equal those of the exchange; tests use the custom calls unless stated otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.peer_copy import Route, join
from jax_moe_lb.collectives.peer_copy_rows import CopyWindow, MovedRows, move, move_back, start_back, start_onward
from tests.layer_cases import make_mesh

RANKS, SLOTS, AT_HOME, ROOM = 8, 3, 40, 30
ROUTE = Route(("expert",), timeout_s=20.0)
MESH = make_mesh((RANKS,), ("expert",))
SPEC, ALL = PartitionSpec("expert"), PartitionSpec()


def draw(seed, domain=RANKS):
    """Return blocks of a stream of 60 rows; blocks of a rank do not overlap, and stay in its domain."""
    rng = np.random.default_rng(seed)
    home = np.where(rng.random((RANKS, SLOTS)) < 0.2, RANKS, rng.integers(0, domain, (RANKS, SLOTS)))
    home = np.where(home < RANKS, home + np.arange(RANKS)[:, None] // domain * domain, RANKS)
    first, size, end = np.zeros((RANKS, SLOTS)), np.zeros((RANKS, SLOTS)), np.zeros(RANKS + 1)
    for rank, slot in np.ndindex(RANKS, SLOTS):
        start = end[home[rank, slot]] + rng.integers(0, 4)
        first[rank, slot], size[rank, slot] = start, min(rng.integers(0, 11), 60 - start) * (home[rank, slot] < RANKS)
        end[home[rank, slot]] = start + size[rank, slot]
    return MovedRows(*(jnp.asarray(a, jnp.int32) for a in (home, first, size, np.zeros((1, RANKS)))))


def keep(taken, moved, window):
    """Keep the taken rows and set others to 0."""
    mine = window.of(moved.first, moved.size)[1][jax.lax.axis_index("expert")].sum()
    return tuple(jnp.where((jnp.arange(ROOM) < mine)[:, None], part, 0) for part in taken)


def both_ways(route=ROUTE, first_row=0):
    """Return a function that sends two kinds of rows to their takers and returns the results, in either form."""
    window = CopyWindow(jnp.int32(first_row), jnp.int32(first_row + AT_HOME))

    def by_calls(moved, rows, weights):
        passed, pending = start_onward((rows, weights), ROOM, moved, window, rows[:2], route=route)
        taken = join(pending, jnp.sin(passed))
        out = tuple(jnp.negative(part) for part in (rows, weights))
        _, pending = start_back(tuple(part * 2 for part in taken), out, moved, window, route=route)
        return passed, keep(taken, moved, window), join(pending)

    def by_exchange(moved, rows, weights):
        room = jnp.zeros((ROOM, 3)), jnp.zeros((ROOM, 1), jnp.bfloat16)
        parts = rows, weights
        taken = tuple(move(part, moved, window, out, ROUTE.group) for part, out in zip(parts, room, strict=True))
        back = (move_back(t * 2, moved, window, -part, ROUTE.group) for t, part in zip(taken, parts, strict=True))
        return rows[:2], keep(taken, moved, window), tuple(back)

    return (
        jax.jit(jax.shard_map(form, mesh=MESH, in_specs=(ALL, SPEC, SPEC), out_specs=SPEC, check_vma=False))
        for form in (by_calls, by_exchange)
    )


def arguments(seed, domain=RANKS):
    rows = jnp.arange(RANKS * AT_HOME * 3, dtype=jnp.float32).reshape(-1, 3) + 1
    return draw(seed, domain), rows, rows[:, :1].astype(jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("domain", [None, 4])
@pytest.mark.parametrize("first_row", [0, 20], ids=["from the first row", "of a later window"])
def test_rows_land_where_those_of_the_exchange_do(domain, first_row):
    got, want = both_ways(Route(("expert",), timeout_s=20.0, domain=domain), first_row)
    moved = 0
    for seed in range(4):
        args = arguments(seed, domain or RANKS)
        results = got(*args)
        jax.tree.map(np.testing.assert_array_equal, results, want(*args))
        moved += np.count_nonzero(results[1][0])
    assert moved > 100


@pytest.mark.thorough
def test_without_custom_calls(no_custom_calls):
    got, want = both_ways()
    jax.tree.map(np.testing.assert_array_equal, got(*arguments(0)), want(*arguments(0)))


def test_rows_beyond_an_array_stop_all_ranks():
    got, _ = both_ways()
    moved, *parts = arguments(0)
    far = MovedRows(moved.home.at[2].set(1), moved.first, moved.size.at[2].set(15), moved.taken)
    message = r"rows of rank 2, slot 2 are .* expected them to end at 40 and 30"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(got(far, *parts))


def test_kinds_that_do_not_fit_are_refused():
    moved, rows, _ = arguments(0)
    window = CopyWindow(jnp.int32(0), jnp.int32(AT_HOME))
    with pytest.raises(ValueError, match="into has 0 arrays; expected 1, as many as rows"):
        start_back((rows,), (), moved, window, route=ROUTE)
    with pytest.raises(ValueError, match="rows is empty; expected at least one kind"):
        start_onward((), ROOM, moved, window, route=ROUTE)
    with pytest.raises(ValueError, match=r"route\.axis_name is empty; expected mesh axes"):
        start_onward((rows,), ROOM, moved, window, route=Route(()))

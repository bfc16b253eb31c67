"""Lists of entries between ranks, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.ragged_all_to_all import Group
from jax_moe_lb.transport.lists import Lists
from tests.layer_cases import make_mesh

RANKS, ENTRIES, CHOICES, ROOM = 4, 9, 3, 40


def destinations(kind: str) -> np.ndarray:
    """Return the rank of each choice, `[RANKS, ENTRIES, CHOICES]`; -1 for none."""
    rng = np.random.default_rng(0)
    rank = rng.integers(-1, RANKS, (RANKS, ENTRIES, CHOICES)).astype(np.int32)
    if kind == "one rank":
        rank[:] = 2
    if kind == "idle ranks":
        rank[1], rank[3] = -1, -1
    return rank


@jax.jit
def exchanged(rank, values, steps):
    """Return, for each step, received values and codes, the sums returned, the choices returned, and the table."""
    group = Group(("expert",), True)

    def one_rank(rank, values):
        code = 1 + jax.lax.axis_index("expert") * 100 + jnp.arange(rank.size, dtype=jnp.int32).reshape(rank.shape)
        lists = Lists.of(rank, code, steps, group)

        def of_step(step):
            received = step.send(values, jnp.zeros_like(values, shape=(ROOM, 2)), "test")
            codes = step.clear(step.exchange(step.codes(), ROOM, "test"))
            # Rows that were not received must not be read.
            sums = step.sum_back(jnp.where(codes.any(1, keepdims=True), received * 2, jnp.nan), "test")
            back = step.choices_back(jnp.where(codes > 0, codes, -7).astype(values.dtype), "test")
            return received, codes, sums, back, step.table

        outs = [of_step(lists.round(i if i == 0 else jnp.int32(i), ROOM, group)) for i in range(4)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *outs)

    spec = PartitionSpec("expert")
    run = jax.shard_map(one_rank, mesh=make_mesh((RANKS,), ("expert",)), in_specs=(spec, spec), out_specs=spec)
    return run(rank.reshape(-1, CHOICES), values.reshape(-1, 2))


@pytest.mark.parametrize("kind", ["any", "one rank", "idle ranks"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.slow
def test_an_entry_travels_once_to_each_of_its_ranks(kind, steps):
    """In order, in one step; `sum_back` is the transpose; no step exceeds an even share of the copies."""
    rank = destinations(kind)
    values = np.arange(RANKS * ENTRIES * 2, dtype=np.float32).reshape(RANKS, ENTRIES, 2)
    received, codes, sums, back, table = map(np.asarray, exchanged(rank, values, steps))
    pairs = [[[n for n in range(ENTRIES) if d in rank[s, n]] for d in range(RANKS)] for s in range(RANKS)]
    np.testing.assert_array_equal(table[0].sum(0), [[len(row) for row in rows] for rows in pairs])
    for d in range(RANKS):
        got = [[] for _ in range(RANKS)]
        for i in range(4):
            at, copies = 0, (codes[d, i] > 0).sum()
            for s in range(RANKS):
                for _ in range(table[d, i, s, d]):
                    got[s].append((received[d, i, at].tolist(), codes[d, i, at].tolist()))
                    at += 1
            assert not codes[d, i, at:].any()
            assert copies <= (rank == d).sum() / steps + RANKS * CHOICES
        for s in range(RANKS):
            code = 1 + s * 100 + np.arange(ENTRIES * CHOICES).reshape(ENTRIES, CHOICES)
            here = np.where(rank[s] == d, code, 0)
            assert got[s] == [(values[s, n].tolist(), here[n].tolist()) for n in pairs[s][d]]
    visits = np.array([[len(set(entry) - {-1}) for entry in entries] for entries in rank])
    np.testing.assert_array_equal(sums.sum(1), 2 * values * visits[:, :, None])
    own = 1 + np.arange(RANKS)[:, None, None] * 100 + np.arange(ENTRIES * CHOICES).reshape(ENTRIES, CHOICES)
    np.testing.assert_array_equal(back.sum(1), np.where(rank >= 0, own, 0))


def test_shares_of_large_lists_do_not_overflow():
    """Half of the steps have half of the copies, also where copies times steps exceed 2^31."""
    copies = jnp.int32(2**30 + 5)
    zero = jnp.zeros((1,), jnp.int32)
    lists = Lists(zero, zero, zero, zero[:, None], zero[:, None], copies[None], jnp.int32(1000), zero[:, None, None])
    assert int(lists.share(jnp.int32(500))[0]) == (2**30 + 5) // 2
    assert int(lists.share(jnp.int32(2000))[0]) == 2**30 + 5

"""Tables and NumPy references shared by the tests of peer copies."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.expert_gather import rounded, zero_sums
from jax_moe_lb.collectives.peer_copy import Route, add_copies_at_home, copy_expert_weights
from tests.layer_cases import make_mesh

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


def over_ranks(function, in_specs=(SPEC, ALL), mesh=MESH, **options):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=SPEC, **options))


def copy(home, wanted):
    return copy_expert_weights(home, wanted, route=ROUTE)


def loss_and_copies(home, wanted, target):
    def loss(home):
        slots = copy(home, wanted)
        return sum((slot * t).sum() for slot, t in zip(jax.tree.leaves(slots), jax.tree.leaves(target), strict=True))

    return jax.grad(loss)(home)

"""Checks of copies by copy engines: values, sums of gradients at home, and errors.

The ranks are simulated: one device holds the arrays of all ranks.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Finding, Scale
from jax_moe_lb.collectives.peer_copy import Route, after_start, copy_expert_weights, join, start
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.planners.greedy import greedy, greedy_planner

RANKS, HOME, SLOTS = 8, 3, 2


def _weights() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (RANKS * HOME, 256, 128), jnp.float32)


def _expected(home: jax.Array, wanted: np.ndarray) -> np.ndarray:
    flat = wanted.reshape(-1)
    return np.where((flat >= 0)[:, None, None], np.asarray(home)[np.maximum(flat, 0)], 0)


def copies_are_exact(scale: Scale) -> Finding:
    """Check copies beside a product, with many calls queued, so that rings of events wrap around."""
    home, x = _weights(), jnp.eye(scale.of(1024, 32))
    cases = [np.random.default_rng(seed).integers(-1, RANKS * HOME, (RANKS, SLOTS)) for seed in range(20)]

    @jax.jit
    def run(wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, pending = after_start(start(home, wanted, route=Route(())), x)
        y = left @ left
        return y, join(pending, after=y)

    for _ in range(scale.of(50, 1)):
        found = [run(jnp.asarray(wanted, jnp.int32)) for wanted in cases]
        for (y, slots), wanted in zip(found, cases, strict=True):
            np.testing.assert_array_equal(slots, _expected(home, wanted))
            np.testing.assert_array_equal(y, x)
    return Finding(True, f"{scale.of(50, 1) * len(cases)} calls")


def relays_and_gradients(scale: Scale) -> Finding:
    """Check copies along a chain of relays, and sums of gradients at home."""
    home, route = _weights(), Route((), chunk_bytes=1000)
    wanted = jnp.asarray([[-1, 4], *[[0, -1]] * 7], jnp.int32)
    relay = jnp.asarray([[-1, -1], *[[rank, -1] for rank in range(7)]], jnp.int32)
    slots, vjp = jax.vjp(jax.jit(lambda home: copy_expert_weights(home, wanted, relay, route=route)), home)
    np.testing.assert_array_equal(slots, _expected(home, np.asarray(wanted)))
    sums = np.zeros(home.shape, np.float32)
    np.add.at(sums, np.where(np.asarray(wanted).reshape(-1) < 0, 0, np.asarray(wanted).reshape(-1)), slots)
    np.testing.assert_allclose(vjp(slots)[0], sums, rtol=1e-6)
    return Finding(True, "7 relays")


def bad_load_stops_the_program(scale: Scale) -> Finding:
    """Check that a negative quota raises with its rank, and that the next program is correct."""
    home = _weights()
    placement = jnp.full((RANKS, HOME + SLOTS), -1, jnp.int32)
    placement = placement.at[:, :HOME].set(jnp.arange(RANKS * HOME, dtype=jnp.int32).reshape(RANKS, HOME))
    experts = jnp.arange(RANKS * HOME)
    quota = jnp.zeros((RANKS * HOME, RANKS), jnp.int32).at[experts, experts // HOME].set(experts**2)

    @jax.jit
    def run(quota: jax.Array) -> jax.Array:
        planner = greedy_planner(RANKS, 2)
        x, posted = post(placement, quota, home, home[0], planner=planner, route=Route(()))
        return join(plan_and_copy(posted, x)[2])

    try:
        jax.block_until_ready(run(quota.at[2, 0].set(-3)))
    except jax.errors.JaxRuntimeError as error:
        reason = str(error)
    else:
        raise AssertionError("a negative quota stops no program")
    assert "quota of expert 2, rank 0 is -3" in reason, reason
    wanted = greedy(np.asarray(placement), np.asarray(quota), RANKS, 2)[0][:, HOME:]
    np.testing.assert_array_equal(run(quota), _expected(home, wanted))
    return Finding(True, reason.splitlines()[0][:120])

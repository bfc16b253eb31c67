"""Checks of copy engines beside a GEMM: its slowdown by copies of expert weights and by planning, against kernels.

The ranks are simulated: one device holds the arrays of all ranks, so the numbers describe its memory and not a link
between devices.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.render.results import Table
from benchmarks.render.timing import interleaved_s
from jax_moe_lb.collectives.peer_copy import Route, after_start, copy_expert_weights, join, start
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.planners.greedy import greedy, greedy_planner

SLOWDOWN = 1.1
"""Largest ratio of the time of a GEMM beside copies and alone."""

RANKS = 8
ROUTE = Route(())


def gemm(x: jax.Array, home: jax.Array) -> jax.Array:
    """Compute ten pairs of products, long enough for concurrent copies."""
    for _ in range(10):
        x = (x @ home[0]) @ home[0].T / x.shape[1]
    return x


def measure(width: int, inner: int, rows: int, slots: int, repeats: int) -> dict[str, float]:
    """Return the times of the GEMM, of copies of `slots` experts per rank, and of planning, alone and concurrent."""
    home = jax.random.normal(jax.random.key(0), (RANKS, width, inner), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    rank = jnp.arange(RANKS, dtype=jnp.int32)
    # Every rank gets the experts of the next ranks.
    wanted = (rank[:, None] + 1 + jnp.arange(slots, dtype=jnp.int32)[None]) % RANKS
    placement = jnp.full((RANKS, 1 + slots), -1, jnp.int32).at[:, 0].set(rank)
    # Every second rank has load, so all others take replicas.
    quota = jnp.diag(rank % 2 * 1000)

    def beside_copy_engines(x: jax.Array, home: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, pending = after_start(start(home, wanted, route=ROUTE), x)
        y = gemm(x, home)
        return y, join(pending, after=y)

    def planned_beside(x: jax.Array, home: jax.Array, quota: jax.Array) -> tuple:
        x, posted = post(placement, quota, home, x, planner=greedy_planner(RANKS, 1), route=ROUTE)
        y, plan, pending = plan_and_copy(posted, gemm(x, home))
        return y, plan, join(pending, after=y)

    def planned_before(x: jax.Array, home: jax.Array, quota: jax.Array) -> tuple:
        plan = greedy(placement, quota, RANKS, 1)
        slots = copy_expert_weights(home, plan[0][:, 1:], route=ROUTE)
        x, slots = jax.lax.optimization_barrier((x, slots))
        return gemm(x, home), plan, slots

    calls: dict[str, tuple[Any, ...]] = {
        "gemm": (gemm, x, home),
        "copies": (lambda home: copy_expert_weights(home, wanted, route=ROUTE), home),
        "kernel copies": (lambda home: jnp.tile(home, (slots, 1, 1)), home),
        "beside copy engines": (beside_copy_engines, x, home),
        "beside kernels": (lambda x, home: (gemm(x, home), home[wanted.reshape(-1)]), x, home),
        "planned beside": (planned_beside, x, home, quota),
        "planned before": (planned_before, x, home, quota),
        "planner": (lambda quota: greedy(placement, quota, RANKS, 1), quota),
        "empty": (lambda quota: quota + 1, quota),
    }
    # In turns: the clocks of the GPU are then equal for all.
    times = interleaved_s({name: partial(jax.jit(run), *args) for name, (run, *args) in calls.items()}, repeats)
    seconds, copied = {name: float(np.median(one)) for name, one in times.items()}, 2 * RANKS * slots * width * inner
    return {
        "copied_bytes": copied,
        "gemm_s": seconds["gemm"],
        "copies_s": seconds["copies"],
        "copies_bytes_per_s": copied / seconds["copies"],
        "kernel_copy_bytes_per_s": copied / seconds["kernel copies"],
        "gemm_beside_copy_engines_s": seconds["beside copy engines"],
        "gemm_beside_kernels_s": seconds["beside kernels"],
        "exposed_s": seconds["planned beside"] - seconds["gemm"],
        "exposed_if_before_s": seconds["planned before"] - seconds["gemm"],
        "planner_round_trip_s": seconds["planner"],
        "empty_program_s": seconds["empty"],
    }


@cache
def measure_all(scale: Scale) -> dict[str, dict[str, float]]:
    """Return the measurements for several numbers of slots."""
    if scale.dry:
        sizes = {"1 slot": (64, 32, 16, 1, 2)}
    else:
        sizes = {f"{slots} slots": (6144, 2048, 4096, slots, 20) for slots in (1, 2, 4)}
    return {name: measure(*case) for name, case in sizes.items()}


def table_of(found: dict[str, dict[str, float]]) -> Table:
    """Return a table with one row per quantity and one column per case."""
    names = next(iter(found.values()))
    rows = [[name, *(of_case[name] for of_case in found.values())] for name in names]
    return Table({"": ""} | dict.fromkeys(found, ".4g"), rows, f"{RANKS} ranks on one device")


def gemm_beside_copies(scale: Scale) -> Finding:
    """Check that copies by copy engines hardly slow a GEMM, and that copies by kernels slow it more."""
    found = measure_all(scale)
    engines, kernels = (
        max(one[f"gemm_beside_{how}_s"] / one["gemm_s"] for one in found.values())
        for how in ("copy_engines", "kernels")
    )
    text = f"GEMM x {engines:.2f} beside copy engines, x {kernels:.2f} beside kernels"
    return Finding(engines <= SLOWDOWN and engines < kernels, text, table_of(found))


def planning_beside_gemm(scale: Scale) -> Finding:
    """Check that a plan with its copies beside a GEMM exposes less than both before it."""
    found = measure_all(scale)
    beside, before = (max(one[name] for one in found.values()) for name in ("exposed_s", "exposed_if_before_s"))
    text = f"{beside * 1e6:.0f} us exposed beside the GEMM, {before * 1e6:.0f} us before it"
    return Finding(beside < before, text, table_of(found))


# ---- values ---------------------------------------------------------------------------

HOME, SLOTS = 3, 2


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
        left, pending = after_start(start(home, wanted, route=ROUTE), x)
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
        x, posted = post(placement, quota, home, home[0], planner=planner, route=ROUTE)
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

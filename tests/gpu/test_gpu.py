"""Every CUDA custom call against its reference. Not run on a GPU yet.

`ci/test_gpu.sh` selects these tests with `-m gpu`; only then does `tests/conftest.py` make a GPU visible to JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights, join, start
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.core.custom_calls import is_built
from jax_moe_lb.planners.eplb import eplb_plus, eplb_plus_reference
from jax_moe_lb.planners.greedy import greedy, greedy_planner, greedy_reference
from tests.collectives.test_peer_copy import expected, expected_sums
from tests.collectives.test_plan_and_copy import GREEDY, HOME, OPTIONS, RANKS, assert_equal, load
from tests.layer_cases import make_mesh

pytestmark = pytest.mark.gpu

REPETITIONS, CASES = 1000, 20


@pytest.fixture(autouse=True)
def needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    assert is_built("cuda"), "the custom calls were not built for CUDA"


def repeat(run, cases, want):
    """Queue many calls at a time, so that the rings of pinned memory and events wrap around."""
    for first in range(0, REPETITIONS, CASES):
        for i, got in enumerate([run(*cases[i % len(cases)]) for i in range(first, first + CASES)]):
            assert_equal(got, want[(first + i) % len(cases)])


PLANNERS = {
    "eplb_plus": (lambda p, q: eplb_plus(q.sum(1), p, RANKS), lambda p, q: eplb_plus_reference(q.sum(1), p, RANKS)),
    "greedy": (lambda p, q: greedy(p, q, **OPTIONS), lambda p, q: greedy_reference(p, q, **OPTIONS)),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_plans(name):
    native, reference = PLANNERS[name]
    cases = [load(seed) for seed in range(CASES)]
    repeat(jax.jit(native), cases, [jax.jit(reference)(*case) for case in cases])


def test_a_failing_planner_marks_its_plan_and_the_next_one_works():
    run, (placement, tokens) = jax.jit(PLANNERS["greedy"][0]), load(0)
    for _ in range(REPETITIONS):
        bad = run(placement, tokens.at[2, 0].set(-3))
        assert all((np.asarray(part) == -1).all() for part in bad)
    assert_equal(run(placement, tokens), greedy_reference(placement, tokens, **OPTIONS))


def weights(ranks=RANKS):
    return jax.random.normal(jax.random.key(0), (ranks * HOME, 256, 128), jnp.bfloat16)


def check_copies(ranks, over_ranks, route, domain):
    """Check `start` and `join`, and a plan with its copies, concurrent with a product."""

    def pair(home, placement, _, x):
        pending = start(home, placement[:, HOME:], route=route)
        return (y := x @ x), placement, join(pending, after=y).astype(jnp.float32)

    def planned(home, placement, tokens, x):
        x, posted = post(placement, tokens, home, x, planner=greedy_planner(domain, 2), route=route)
        y, plan, pending = plan_and_copy(posted, x @ x)
        return y, plan, join(pending).astype(jnp.float32)

    home, x = weights(ranks), jnp.eye(1024, dtype=jnp.float32)
    loads = [load(seed, ranks) for seed in range(CASES)]
    plans = [jax.jit(lambda p, q: greedy_reference(p, q, domain, 2))(*one) for one in loads]
    want = [(x, plan, expected(home, plan[0][:, HOME:])) for plan in plans]
    repeat(over_ranks(planned), [(home, *one, x) for one in loads], want)
    repeat(over_ranks(pair), [(home, *plan, x) for plan in plans], [(x, plan[0], slots) for _, plan, slots in want])


def test_copies_of_all_ranks_on_one_device():
    check_copies(RANKS, jax.jit, Route(()), 4)


def test_copies_between_devices():
    num, spec, everywhere = jax.device_count(), PartitionSpec("expert"), PartitionSpec()
    if num < 2:
        pytest.skip("one GPU")
    specs = {"in_specs": (spec, *[everywhere] * 3), "out_specs": (everywhere, everywhere, spec)}
    specs["mesh"] = make_mesh((num,), ("expert",))
    check_copies(num, lambda f: jax.jit(jax.shard_map(f, **specs)), Route(("expert",)), num)


def test_gradients_and_relays():
    home, route = weights().astype(jnp.float32), Route((), chunk_bytes=1000)
    wanted = jnp.asarray([[-1, 4], *[[0, -1]] * 7], jnp.int32)
    relay = jnp.asarray([[-1, -1], *[[rank, -1] for rank in range(7)]], jnp.int32)
    slots, vjp = jax.vjp(jax.jit(lambda h: copy_expert_weights(h, wanted, relay, route=route)), home)
    np.testing.assert_array_equal(slots, expected(home, wanted))
    np.testing.assert_array_equal(vjp(slots)[0], expected_sums(slots, wanted))


def test_a_bad_load_stops_the_program_and_the_next_one_works():
    @jax.jit
    def run(home, placement, tokens):
        x, posted = post(placement, tokens, home, home[0], planner=GREEDY, route=Route(()))
        return join(plan_and_copy(posted, x)[2])

    placement, tokens = load(0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="quota of expert 2, rank 0 is -3"):
        jax.block_until_ready(run(weights(), placement, tokens.at[2, 0].set(-3)))
    wanted = greedy_reference(placement, tokens, **OPTIONS)[0][:, HOME:]
    np.testing.assert_array_equal(run(weights(), placement, tokens).astype(jnp.float32), expected(weights(), wanted))

"""Plan and slots equal those of the separate calls; tests use the custom calls unless stated otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights, join
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.core import custom_calls
from jax_moe_lb.planners.base import edit
from jax_moe_lb.planners.feplb import feplb_planner
from jax_moe_lb.planners.greedy import greedy_planner
from tests.dependencies import of_compiled
from tests.layer_cases import make_mesh
from tests.marks import parametrize

RANKS, HOME, SLOTS = 8, 3, 5
ROUTE = Route(("expert",), timeout_s=20.0)
MESH = make_mesh((RANKS,), ("expert",))
SPEC, ALL = PartitionSpec("expert"), PartitionSpec()
OPTIONS = {"domain": 4, "min_tokens": 2}
GREEDY = greedy_planner(**OPTIONS)
FEPLB = feplb_planner(domain=4, num_dynamic=2, max_num_dyn=2, tau=1, skip=True)


def load(seed=0, ranks=RANKS):
    """Return home experts, some replicas, and a skewed quota."""
    rng = np.random.default_rng(seed)
    experts = ranks * HOME
    placement = np.full((ranks, SLOTS), -1)
    placement[:, :HOME] = np.arange(experts).reshape(ranks, HOME)
    quota = np.zeros((experts, ranks))
    quota[np.arange(experts), np.arange(experts) // HOME] = rng.zipf(1.5, experts).clip(0, 500)
    return jnp.asarray(placement, jnp.int32), jnp.asarray(quota, jnp.int32)


def weights(experts=RANKS * HOME, dtype=jnp.float32):
    def draw(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)

    return {"up": draw(1, experts, 4, 5), "down": draw(2, experts, 7)}


def static_wave(x):
    with jax.named_scope("static_wave"):
        return jnp.sin(x @ x.T) @ x


def together(home, placement, quota, x, route=ROUTE, planner=GREEDY):
    x, posted = post(placement, quota, home, x, planner=planner, route=route)
    wave, plan, pending = plan_and_copy(posted, static_wave(x))
    return wave, plan, join(pending)


def separately(home, placement, quota, x, route=ROUTE, planner=GREEDY):
    plan = edit(planner, placement, quota)
    return static_wave(x), plan, copy_expert_weights(home, plan[0][:, HOME:], route=route)


def over_ranks(function, mesh=MESH, in_specs=(SPEC, ALL, ALL, SPEC), out_specs=(SPEC, ALL, SPEC), **options):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def arguments(seed=0):
    return weights(), *load(seed), jnp.ones((RANKS * 2, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "dtype"),
    [(GREEDY, "float32"), (GREEDY, "bfloat16"), (FEPLB, "float32")],
    ids=lambda value: getattr(value, "name", value),
)
def test_plan_and_slots_are_those_of_the_separate_calls(planner, dtype):
    got, want = (
        over_ranks(lambda *args, calls=calls: calls(*args, planner=planner)) for calls in (together, separately)
    )
    for seed in range(5):
        args = weights(dtype=dtype), *load(seed), jnp.ones((RANKS * 2, 6))
        wave, plan, slots = got(*args)
        assert_equal((wave, plan, slots), want(*args))
        assert (np.asarray(plan[0])[:, HOME:] >= 0).any()
        assert not (np.asarray(plan[1]) == np.asarray(args[2])).all()


@pytest.mark.slow
def test_without_custom_calls(request):
    want = over_ranks(separately)(*arguments())
    request.getfixturevalue("no_custom_calls")
    run = over_ranks(together)
    assert "moe_lb" not in run.lower(*arguments()).as_text()
    assert_equal(run(*arguments()), want)


@pytest.mark.slow
def test_one_device_can_hold_all_ranks():
    route = Route(())
    wave, plan, slots = jax.jit(lambda *args: together(*args, route=route))(*arguments())
    assert_equal((wave, plan, slots), jax.jit(lambda *args: separately(*args, route=route))(*arguments()))


@pytest.mark.slow
@parametrize("axis_type", [AxisType.Explicit], [AxisType.Auto])
def test_groups_side_by_side_have_plans_of_their_own(axis_type):
    mesh = make_mesh((2, 4), ("data", "expert"), axis_type)
    loads = [load(seed, 4) for seed in (3, 4)]
    placement, quota = (jnp.stack(parts) for parts in zip(*loads, strict=True))
    data, expert, both = PartitionSpec("data"), PartitionSpec("expert"), PartitionSpec("data", "expert")
    specs = (expert, data, data, both)

    def through(calls):
        def one_rank(home, placement, quota, x):
            wave, plan, slots = calls(home, placement[0], quota[0], x[0])
            return wave[None], jax.tree.map(lambda a: a[None], plan), jax.tree.map(lambda a: a[None], slots)

        run = over_ranks(one_rank, mesh, specs, (both, data, both), check_vma=True)
        values = weights(4 * HOME), placement, quota, jnp.ones((2, 8, 6))
        return run(*(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(values, specs, strict=True)))

    wave, plan, slots = through(together)
    assert_equal((wave, plan, slots), through(separately))
    placements = np.asarray(plan[0])
    assert not (placements[0] == placements[1]).all()


@pytest.mark.slow
def test_many_repetitions_in_one_program_beside_collectives():
    def one_rank(home, placement, quota, x):
        for _ in range(4):
            x, (_, quota), slots = together(home, placement, quota, x)
            x = jnp.tanh(x + jax.lax.psum(slots["up"].sum(), "expert"))
        return x

    run = over_ranks(one_rank, out_specs=SPEC)
    first = np.asarray(run(*arguments()))
    for _ in range(20):
        np.testing.assert_array_equal(jax.block_until_ready(run(*arguments())), first)


@pytest.mark.slow
def test_equal_loads_in_a_loop_and_twice_in_a_program():
    """XLA must neither hoist `post` out of the loop nor merge both calls."""

    def one_rank(home, placement, quota, x, calls):
        def layer(x, _):
            wave, _, slots = calls(home, placement, quota, x)
            return jnp.tanh(wave + slots["up"].sum()), None

        x = jax.lax.scan(layer, x, None, length=3)[0]
        return layer(layer(x, None)[0], None)[0]

    got, want = (
        over_ranks(lambda *args, calls=calls: one_rank(*args, calls), out_specs=SPEC)(*arguments())
        for calls in (together, separately)
    )
    assert_equal(got, want)


def test_the_static_wave_needs_neither_plan_nor_copies_and_comes_before():
    graph = of_compiled(over_ranks(together).lower(*arguments()).compile().as_text())
    (posted,) = graph.holding('custom_call_target="moe_lb_copy_post"')
    (planned,) = graph.holding("moe_lb_plan_greedy_and_copy")
    waves = graph.holding("/static_wave/")
    assert waves
    assert posted in graph.needs([planned])
    # The wave passed through `plan_and_copy` is computed before it and independent of the calls.
    assert waves <= graph.needs([planned])
    for wave in waves:
        assert posted in graph.needs([wave])
        assert planned not in graph.needs([wave])
    # The slots reuse the memory of `post`, and neither they nor the wave are copied.
    (call,) = graph.lines[planned]
    kinds = len(weights())
    for i in range(kinds + 1):
        assert f"{{{3 + i}}}: ({3 + kinds + i}, {{}}" in call
    copies = [name for name in graph.operands[planned] if name.startswith("%copy")]
    assert not any(graph.needs([name]) & {posted, *waves} for name in copies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, q: (p, q.at[2, 0].set(-3)), "quota of expert 2, rank 0 is -3; expected at least 0"),
        (lambda p, q: (p.at[3, 4].set(24), q), "placement of rank 3, slot 4 is 24; expected an expert below 24"),
        (lambda p, q: (p, q.at[0, 0].set(2**31 - 1)), "expected at most 2147483647"),
    ],
)
def test_a_bad_load_stops_all_ranks_and_the_next_program_works(change, message):
    run = over_ranks(together)
    home, placement, quota, x = arguments()
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(home, *change(placement, quota), x))
    assert_equal(run(home, placement, quota, x), over_ranks(separately)(home, placement, quota, x))


@pytest.mark.slow
def test_one_ranks_bad_load_stops_all_ranks():
    home, placement, quota, x = arguments()
    quotas = jnp.tile(quota[None], (RANKS, 1, 1)).at[5, 2, 0].set(-3)
    specs = (SPEC, ALL, SPEC, SPEC)
    run = over_ranks(lambda h, p, q, x: together(h, p, q[0], x)[2], in_specs=specs, out_specs=SPEC)
    with pytest.raises(jax.errors.JaxRuntimeError, match="quota of expert 2, rank 0 is -3"):
        jax.block_until_ready(run(home, placement, quotas, x))
    different = jnp.tile(quota[None], (RANKS, 1, 1)).at[5].set(load(1)[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"wanted of rank \d, slot \d is .* on rank 5 and"):
        jax.block_until_ready(run(home, placement, different, x))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_the_next_program_works():
    route = Route(("expert",), site="layer 3", timeout_s=0.5)

    def one_rank(home, placement, quota, x):
        def absent(home):
            return jnp.zeros_like(home, shape=(SLOTS - HOME, *home.shape[1:]))

        def present(home):
            return together(home, placement, quota, x, route=route)[2]

        return jax.lax.cond(jax.lax.axis_index("expert") != 3, present, absent, home)

    home, *others = arguments()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"layer 3: rank 3 of 8 did not arrive within 0\.5 s"):
        jax.block_until_ready(over_ranks(one_rank, out_specs=SPEC)(home["up"], *others))
    assert_equal(over_ranks(together)(home, *others), over_ranks(separately)(home, *others))


def test_a_post_serves_once_and_in_its_own_run():
    route = Route(())
    home, placement, quota, x = arguments()
    posted = jax.jit(lambda *args: post(*args, (), planner=GREEDY, route=route))(placement, quota, home)[1]
    late = jax.jit(lambda posted, x: join(plan_and_copy(posted, x)[2]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected one that post gave in this run"):
        jax.block_until_ready(late(posted, x))

    @jax.jit
    def twice(home, placement, quota, x):
        x, posted = post(placement, quota, home, x, planner=GREEDY, route=route)
        x, _, first = plan_and_copy(posted, x)
        return join(first), join(plan_and_copy(posted, x + 1)[2])

    with pytest.raises(jax.errors.JaxRuntimeError, match="that was not used yet"):
        jax.block_until_ready(twice(home, placement, quota, x))


@pytest.mark.parametrize(
    ("placement", "quota", "planner", "message"),
    [
        ((RANKS, HOME), (24, RANKS), GREEDY, r"placement has shape \(8, 3\)"),
        ((RANKS, SLOTS), (32, RANKS), GREEDY, r"quota \(32, 8\) and a rank 3 home experts"),
        ((RANKS, SLOTS), (24, RANKS), greedy_planner(3, 1), "domain is 3; expected a divisor of the 8"),
        ((RANKS, SLOTS), (24, RANKS), greedy_planner(4, 0), "min_tokens is 0; expected at least 1"),
        ((RANKS, SLOTS), (24, RANKS), feplb_planner(4, 0, 1, 1, True), "num_dynamic is 0; expected at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_when_traced(placement, quota, planner, message):
    home, _, _, x = arguments()
    run = over_ranks(lambda *args: together(*args, planner=planner))
    with pytest.raises(ValueError, match=message):
        run(home, jnp.zeros(placement, jnp.int32), jnp.zeros(quota, jnp.int32), x)


@pytest.mark.parametrize("planner", [GREEDY, FEPLB], ids=lambda planner: planner.name)
def test_lowering_for_cuda(planner):
    run = over_ranks(lambda *args: together(*args, planner=planner))
    text = run.trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    if not custom_calls.is_built("cuda"):
        assert "moe_lb_" not in text
        return
    (posted,) = [line for line in text.splitlines() if "@moe_lb_copy_post" in line]
    (planned,) = [line for line in text.splitlines() if f"@moe_lb_plan_{planner.name}_and_copy" in line]
    assert "@moe_lb_copy_join" in text
    assert "output_operand_alias<output_tuple_indices = [3], operand_index = 5" in posted
    for attribute in ("num_participants = 8", "num_home = 3", f"plan_size = {RANKS * SLOTS + 24 * RANKS}"):
        assert f"{attribute} : i64" in posted
    assert f'planner = "{planner.name}"' in posted
    for name, value in planner.options:
        option = f"{name} = {str(value).lower() if isinstance(value, bool) else f'{value} : i64'}"
        assert option in planned
        assert option in posted
    # Both kinds of slots, the wave and the placement.
    for i in range(4):
        assert f"output_operand_alias<output_tuple_indices = [{3 + i}], operand_index = {5 + i}" in planned
    assert "command_buffer" not in text

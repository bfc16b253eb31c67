import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb.collectives.permutes import unidirectional_permutes
from jax_moe_lb.collectives.ragged_all_to_all import (
    Group,
    Slices,
    on_one_rank,
    one_way_all_to_all,
    padded_all_to_all,
    ragged_all_to_all,
)
from tests.layer_cases import make_mesh
from tests.marks import parametrize


def exchange(mesh, axes, form=ragged_all_to_all, **options):
    spec = PartitionSpec(axes)

    def one_rank(*args):
        rows, output, *slices = (arg[0] for arg in args)
        group = Group(axes, **options) if form is ragged_all_to_all else axes
        return form(rows, output, Slices(*slices), group)[None]

    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))


def draw_case(rng, num_ranks, per_peer, num_rows, skew):
    """Return operands and slice positions; sizes range from empty to the whole operand."""
    slices = num_ranks * per_peer
    sizes = rng.poisson(num_rows / slices * rng.gamma(1 / skew, skew, (num_ranks, slices)))
    operand = rng.normal(size=(num_ranks, num_rows, 3)).astype(np.float32)
    sizes = np.minimum(sizes, num_rows // 2)
    starts = rng.integers(0, num_rows - sizes + 1)
    received = sizes.reshape(num_ranks, num_ranks, per_peer).transpose(1, 0, 2)
    landings = np.cumsum(received.reshape(num_ranks, -1), 1) - received.reshape(num_ranks, -1)
    landings = landings.reshape(num_ranks, num_ranks, per_peer)
    return operand, starts, sizes, landings.transpose(1, 0, 2).reshape(num_ranks, -1), received.reshape(num_ranks, -1)


def reference(operand, output, starts, sizes, landings):
    out = output.copy()
    num_ranks, slices = sizes.shape
    for source in range(num_ranks):
        for i in range(slices):
            to, size = i // (slices // num_ranks), sizes[source, i]
            rows = operand[source, starts[source, i] : starts[source, i] + size]
            out[to, landings[source, i] : landings[source, i] + size] = rows
    return out


MESHES = {("expert",): make_mesh((8,), ("expert",)), ("node", "gpu"): make_mesh((2, 4), ("node", "gpu"))}
RUN = {axes: exchange(mesh, axes) for axes, mesh in MESHES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), per_peer=st.sampled_from([1, 3]), skew=st.sampled_from([0.1, 8.0]))
def test_exchange_against_a_loop(axes, seed, per_peer, skew):
    rng = np.random.default_rng(seed)
    operand, *where, received = draw_case(rng, 8, per_peer, 40, skew)
    output = rng.normal(size=(8, received.sum(1).max() // 64 * 64 + 128, 3)).astype(np.float32)
    got = RUN[axes](operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, received)))
    np.testing.assert_array_equal(got, reference(operand, output, *where))


def test_the_accelerators_path_lowers():
    """The path with `lax.ragged_all_to_all` can be lowered on a machine without such a device."""
    arrays = [jax.ShapeDtypeStruct((8, 16, 3), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((8, 8), jnp.int32)] * 4
    text = RUN[("expert",)].trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text
    assert "while" not in text


def test_large_slices_exchange_padded_steps():
    """XLA refuses ragged exchanges on chips with limited routing."""
    arrays = [jax.ShapeDtypeStruct((8, 16, 3), jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct((8, 8), jnp.int32)] * 4
    for is_limited in (False, True):
        run = exchange(MESHES["expert",], ("expert",), limited_routing=is_limited)
        text = run.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert ("ragged_all_to_all" in text) is not is_limited
        assert ('"stablehlo.all_to_all"' in text) is is_limited
        # Only CPUs send narrow floats as integers.
        assert "ui16" not in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_one_rank_gathers_on_a_gpu(seed):
    rng = np.random.default_rng(seed)
    operand, *where, received = draw_case(rng, 1, 5, 40, 8.0)
    output = rng.normal(size=(1, received.sum() + seed % 3, 3)).astype(np.float32)
    sizes = (jnp.asarray(a[0], jnp.int32) for a in (*where, received))
    got = on_one_rank(jnp.asarray(operand[0]), jnp.asarray(output[0]), *sizes)
    np.testing.assert_array_equal(got, reference(operand, output, *where)[0])


def test_a_layer_of_one_rank_has_no_exchange_on_a_gpu():
    arrays = [jax.ShapeDtypeStruct((1, 16, 3), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((1, 2), jnp.int32)] * 4
    text = exchange(make_mesh((1,), ("expert",)), ("expert",)).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "ragged_all_to_all" not in text.as_text()


FORMS = {"padded": padded_all_to_all, "one way": one_way_all_to_all}


@pytest.mark.slow
@parametrize("num_ranks", [1, 5, 6], [2])
@pytest.mark.parametrize("form", FORMS)
def test_steps_of_collectives_against_a_loop(form, num_ranks):
    rng = np.random.default_rng(num_ranks)
    run = exchange(make_mesh((num_ranks,), ("expert",)), ("expert",), FORMS[form])
    for per_peer, skew in [(1, 0.1), (2, 8.0)]:
        operand, *where, received = draw_case(rng, num_ranks, per_peer, 40, skew)
        output = rng.normal(size=(num_ranks, received.sum(1).max() + 3, 3)).astype(np.float32)
        got = run(operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, received)))
        np.testing.assert_array_equal(got, reference(operand, output, *where))


@pytest.mark.slow
@parametrize(
    "num_rows, width, per_peer",
    [(2, 96, 1), (3, 7, 2), (1, 32, 1)],
    [(2, 96, 2), (3, 7, 1), (1, 32, 2), (5, 64, 1), (5, 64, 2)],
)
def test_few_wide_rows_travel_in_parts(num_rows, width, per_peer):
    """As experts do: a step with a row for every rank would send more than all rows."""
    rng = np.random.default_rng(num_rows)
    _, *where, received = draw_case(rng, 8, per_peer, 2 * num_rows, 1.0)
    where[0] = where[0] % num_rows
    where[1] = np.minimum(where[1], num_rows - where[0])
    received = where[1].reshape(8, 8, per_peer).transpose(1, 0, 2).reshape(8, -1)
    landings = (np.cumsum(received, 1) - received).reshape(8, 8, per_peer)
    where[2] = landings.transpose(1, 0, 2).reshape(8, -1)
    operand, output = (rng.normal(size=(8, rows, width)) for rows in (num_rows, received.sum(1).max() + 1))
    operand, output = operand.astype(np.float32), output.astype(np.float32)
    slices = [jnp.asarray(a, jnp.int32) for a in (*where, received)]
    run = exchange(MESHES[("expert",)], ("expert",), padded_all_to_all)
    np.testing.assert_array_equal(run(operand, output, *slices), reference(operand, output, *where))
    text = run.lower(operand, output, *slices).as_text()
    sent = re.findall(r"all_to_all.*-> tensor<(\d+)x(\d+)x(\d+)xf32>", text)
    assert len(sent) == per_peer
    for shape in sent:
        assert math.prod(map(int, shape)) <= max(2 * num_rows * width, 8 * width / math.gcd(width, 64))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_steps_between_ranks_that_know_all_slices_need_no_other_collective(form):
    rng = np.random.default_rng(0)
    operand, *where, received = draw_case(rng, 4, 2, 40, 1.0)
    output = rng.normal(size=(4, received.sum(1).max(), 3)).astype(np.float32)
    of_ranks = Slices(*(jnp.asarray(a, jnp.int32) for a in (*where, received)))
    run = exchange(make_mesh((4,), ("expert",)), ("expert",), functools.partial(FORMS[form], known=of_ranks))
    np.testing.assert_array_equal(run(operand, output, *of_ranks), reference(operand, output, *where))
    told = exchange(make_mesh((4,), ("expert",)), ("expert",), FORMS[form])
    texts = [jax.jit(of).lower(operand, output, *of_ranks).as_text() for of in (run, told)]
    assert [text.count("stablehlo.all_gather") for text in texts] == [0, 1]
    assert "stablehlo.all_reduce" not in "".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_slices_that_do_not_overlap_travel_as_one(form):
    rng = np.random.default_rng(0)
    mesh, packed = make_mesh((5,), ("expert",)), functools.partial(FORMS[form], disjoint=True)
    run = exchange(mesh, ("expert",), packed)
    for skew in (0.1, 8.0):
        _, _, sizes, landings, received = draw_case(rng, 5, 3, 40, skew)
        operand = rng.normal(size=(5, sizes.sum(1).max() + 2, 3)).astype(np.float32)
        output = rng.normal(size=(5, received.sum(1).max() + 3, 3)).astype(np.float32)
        # Adjacent, but in another order than the slices.
        order = rng.permuted(np.tile(np.arange(15), (5, 1)), axis=1)
        first = np.stack([(np.cumsum(s[o]) - s[o])[np.argsort(o)] for s, o in zip(sizes, order, strict=True)])
        where = (first, sizes, landings)
        got = run(operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, received)))
        np.testing.assert_array_equal(got, reference(operand, output, *where))
    shapes = [jnp.zeros((5, 16, 3))] * 2 + [jnp.zeros((5, 15), jnp.int32)] * 4
    together, apart = (jax.jit(exchange(mesh, ("expert",), f)).lower(*shapes).as_text() for f in (packed, FORMS[form]))
    assert together.count("while") < apart.count("while")


DTYPES = ("bfloat16", "float16", "int8", "bool", "uint32", "float8_e4m3fn", "complex64")


def test_no_permute_holds_a_pair_and_its_reverse():
    for num_ranks in range(1, 17):
        sent = []
        for way in unidirectional_permutes(num_ranks):
            assert not {(b, a) for a, b in way} & set(way)
            assert len({a for a, _ in way}) == len({b for _, b in way}) == len(way)
            sent += way
        assert len(set(sent)) == len(sent) == num_ranks * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [4, 6, 8])
def test_halves_send_to_each_other_at_the_same_time(num_ranks):
    half = num_ranks // 2
    across = [[(a < half) for a, b in way if (a < half) != (b < half)] for way in unidirectional_permutes(num_ranks)]
    for up in filter(None, across):
        assert sum(up) == half
        assert len(up) == num_ranks


@pytest.mark.slow
@parametrize(
    "form, dtype",
    # One dtype of each smaller size than float32, and `bool`, in all forms.
    [*(("in process", one) for one in DTYPES), *itertools.product(FORMS, ("bfloat16", "bool", "float8_e4m3fn"))],
    itertools.product(FORMS, DTYPES),
)
def test_any_dtype_keeps_its_bits(form, dtype):
    rng = np.random.default_rng(0)
    bits, *where, received = draw_case(rng, 8, 1, 24, 1.0)
    operand = jnp.asarray(bits * 4).astype(dtype)
    output = jnp.ones((8, received.sum(1).max() + 1, 3), dtype)
    run = exchange(MESHES[("expert",)], ("expert",), FORMS.get(form, ragged_all_to_all))
    got = run(operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, received)))
    np.testing.assert_array_equal(np.asarray(got), reference(np.asarray(operand), np.asarray(output), *where))


@pytest.mark.parametrize("processes", [1, 2])
def test_what_travels_in_16_bits_is_no_float(monkeypatch, processes):
    """XLA:CPU would send it in 32 bits."""
    monkeypatch.setattr("jax_moe_lb.collectives.ragged_all_to_all.moves_in_process", lambda: False)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    arrays = [jax.ShapeDtypeStruct((8, 16, 3), jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct((8, 8), jnp.int32)] * 4
    text = exchange(MESHES[("expert",)], ("expert",)).lower(*arrays).as_text()
    moves = [line for line in text.splitlines() if "stablehlo.collective_permute" in line or "all_to_all" in line]
    assert any("ui16" in line for line in moves)
    assert not any("bf16" in line for line in moves)


NOTHING = {"no rows": (0, 4, 3), "no output rows": (4, 0, 3), "rows of no bytes": (4, 4, 0)}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_move(name):
    num_rows, output_rows, width = NOTHING[name]
    zeros = jnp.zeros((8, 8), jnp.int32)
    output = jnp.ones((8, output_rows, width), jnp.float32)
    operand = jnp.zeros((8, num_rows, width), jnp.float32)
    np.testing.assert_array_equal(RUN[("expert",)](operand, output, zeros, zeros, zeros, zeros), output)


def test_all_to_one_rank():
    """Every row of every rank goes to rank 5."""
    sizes = np.zeros((8, 8), np.int32)
    sizes[:, 5] = 16
    landings = np.broadcast_to(16 * np.arange(8)[:, None], (8, 8))
    operand = np.arange(8 * 16 * 3, dtype=np.float32).reshape(8, 16, 3)
    output = np.zeros((8, 128, 3), np.float32)
    where = np.zeros((8, 8), np.int32), sizes, landings
    got = RUN[("expert",)](operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, sizes.T)))
    np.testing.assert_array_equal(got, reference(operand, output, *where))


def square_case(num_groups, num_ranks):
    """Return a case in which row `i` of rank `r` becomes row `r` of rank `i`, in every group."""
    offsets = np.broadcast_to(np.arange(num_ranks, dtype=np.int32), (num_groups, num_ranks, num_ranks))
    x = np.arange(num_groups * num_ranks * num_ranks * 2, dtype=np.float32).reshape(num_groups, num_ranks, num_ranks, 2)
    args = (x, np.zeros_like(x), offsets, np.ones_like(offsets), offsets.swapaxes(1, 2), np.ones_like(offsets))
    return tuple(jnp.asarray(arg) for arg in args), x.swapaxes(1, 2)


@pytest.mark.slow
@parametrize("axis_type", [AxisType.Auto], [AxisType.Explicit])
@pytest.mark.parametrize("manual", [("data", "expert"), ("expert",)])
def test_beside_other_axes(axis_type, manual):
    """Groups on a manual data axis are independent, with their own numbers of iterations; devices on another axis
    agree.
    """
    mesh = make_mesh((2, 4), ("data", "expert"), axis_type)
    (x, *rest), want = square_case(2 if "data" in manual else 1, 4)
    spec = PartitionSpec("data", "expert") if "data" in manual else PartitionSpec(None, "expert")

    def one_rank(x, *rest):
        x, *rest = (arg[0, 0] for arg in (x, *rest))
        turns = 2 * jax.lax.axis_index("data") + 1 if "data" in manual else 3

        def turn(_, x):
            return ragged_all_to_all(x, rest[0], Slices(*rest[1:]), Group(("expert",)))

        return jax.lax.fori_loop(0, turns, turn, x)[None, None]

    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, axis_names=set(manual)))
    placed = [jax.device_put(arg, NamedSharding(mesh, spec)) for arg in (x, *rest)]
    for _ in range(3):
        np.testing.assert_array_equal(jax.block_until_ready(run(*placed)), want)


@pytest.mark.slow
def test_inside_scan_remat_and_vmap():
    (x, *rest), want = square_case(1, 8)
    spec = PartitionSpec("expert")

    def one_rank(x, *rest):
        def step(x, _):
            return jax.checkpoint(lambda x: ragged_all_to_all(x, rest[0], Slices(*rest[1:]), Group(("expert",))))(
                x
            ), None

        def many(x):
            return jax.lax.scan(step, x, None, 3)[0]

        return jax.vmap(many)(jnp.stack([x, 2 * x]))

    def batched(*args):
        return one_rank(*(arg[0] for arg in args))[None]

    run = jax.jit(jax.shard_map(batched, mesh=MESHES[("expert",)], in_specs=(spec,) * 6, out_specs=spec))
    got = run(*(arg[0] for arg in (x, *rest)))
    np.testing.assert_array_equal(got, np.stack([want[0], 2 * want[0]], 1))


def test_the_output_is_written_in_place():
    """Unused rows of the output are neither copied nor cleared."""
    arrays = [jax.ShapeDtypeStruct((8, 16, 3), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((8, 8), jnp.int32)] * 4
    text = RUN[("expert",)].lower(*arrays).as_text()
    assert "moe_lb_ragged_exchange" in text
    assert "output_operand_aliases" in text
    assert "has_side_effect = true" not in text

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb.core.custom_calls import is_built
from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels import grouped_matmul as op
from jax_moe_lb.kernels import operands
from jax_moe_lb.kernels.backends import _clear_empty
from jax_moe_lb.kernels.blocks import block_rows
from jax_moe_lb.kernels.operands import RowGroups, _clear_rest, _clear_tile
from tests.kernels.backend_cases import matmul_of, outer_of
from tests.layer_cases import make_mesh
from tests.marks import parametrize

SHAPES = {  # rows, their width, width of the result, sizes
    "uneven": (420, 33, 50, [5, 0, 17, 64, 1, 0, 300, 16]),
    "whole panels": (128, 64, 96, [64, 64]),
    "one group has all": (300, 16, 48, [0, 0, 300, 0]),
    "rows of no group": (40, 7, 5, [3, 0, 20, 1]),
    "one column": (9, 1, 1, [2, 7]),
    "deep": (20, 1100, 30, [9, 0, 11]),
    "nothing": (5, 16, 16, [0, 0]),
    "no groups": (6, 3, 4, []),
    "no rows": (0, 4, 4, [0, 0]),
    "no width": (4, 0, 3, [1, 2]),
}


def cleared(outer, clear):
    return lambda rows, others, groups: outer(clear(rows, groups.sizes), clear(others, groups.sizes), groups)


FORMS = {
    "op": (op.grouped_matmul, op.grouped_outer),
    "blocks": (matmul_of("blocks of rows"), outer_of("blocks of rows")),
    "ragged": (matmul_of("lax.ragged_dot"), cleared(outer_of("lax.ragged_dot"), _clear_rest)),
}
OTHERS = ("blocks", "ragged")
RELATIVE = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}


def case(shape, dtype="float32", seed=0):
    """Return operands, with NaN in rows outside the groups."""
    rng = np.random.default_rng(seed)
    num_rows, width, columns, sizes = shape
    rows, others = rng.normal(size=(num_rows, width)), rng.normal(size=(num_rows, columns))
    rows[sum(sizes) :] = others[sum(sizes) :] = np.nan
    weights = rng.normal(size=(len(sizes), width, columns))
    return (*(jnp.asarray(array, dtype) for array in (rows, others, weights)), jnp.asarray(sizes, jnp.int32))


def loops(rows, others, weights, sizes):
    """Return the products, the gradients of the rows and of the weights, in float64."""
    rows, others, weights = (np.asarray(array, np.float64) for array in (rows, others, weights))
    product, back, outer = np.zeros_like(others), np.zeros_like(rows), np.zeros_like(weights)
    start = 0
    for g, size in enumerate(np.asarray(sizes)):
        part = slice(start, start + size)
        product[part], back[part] = rows[part] @ weights[g], others[part] @ weights[g].T
        outer[g] = rows[part].T @ others[part]
        start += size
    return product, back, outer


def assert_close(got, want, relative, num_rows=None):
    """Compare arrays, ignoring the unspecified rows beyond `num_rows`."""
    got, want = got[:num_rows], want[:num_rows]
    scale = np.abs(want).max(initial=0)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=relative * scale)


def test_these_tests_run_the_custom_call():
    assert is_built("cpu")
    text = jax.jit(op.grouped_matmul).lower(*without_others(case(SHAPES["uneven"]))).as_text()
    assert "moe_lb_grouped_matmul" in text


def without_others(operands):
    return operands[0], operands[2], operands[3]


@pytest.mark.slow
@parametrize(
    "form, dtype, shape",
    [
        *itertools.product(["op"], RELATIVE, SHAPES),
        *itertools.product(OTHERS, ["float32"], SHAPES),
        *itertools.product(OTHERS, ["bfloat16"], ["uneven", "rows of no group", "no groups"]),
    ],
    itertools.product(OTHERS, ["bfloat16"], SHAPES),
)
def test_products_equal_one_group_at_a_time(form, dtype, shape, x64):
    matmul, outer = FORMS[form]
    rows, others, weights, sizes = case(SHAPES[shape], dtype)

    @jax.jit
    def run(rows, others, weights, sizes):
        return matmul(rows, weights, sizes), matmul(others, weights, sizes, True), outer(rows, others, RowGroups(sizes))

    product, back, sums = loops(rows, others, weights, sizes)
    used = int(sizes.sum())
    got_product, got_back, got_sums = run(rows, others, weights, sizes)
    assert_close(got_product, product, RELATIVE[dtype], used)
    assert_close(got_back, back, RELATIVE[dtype], used)
    assert got_sums.dtype == ("float64" if dtype == "float64" else "float32")
    assert_close(got_sums, sums, min(RELATIVE[dtype], 1e-5))


@pytest.mark.parametrize("has_call", [True, False])
def test_sums_are_added_to(has_call, monkeypatch):
    monkeypatch.setattr(grouped_kernels, "is_built", lambda platform: has_call)
    rows, others, _, sizes = case(SHAPES["rows of no group"])
    before = jnp.full((4, 7, 5), 3.0)
    got = jax.jit(lambda *args: op.grouped_outer(*args[:3], sums=args[3]))(rows, others, RowGroups(sizes), before)
    _, _, sums = loops(*case(SHAPES["rows of no group"]))
    assert_close(got, sums + 3, 1e-5)
    np.testing.assert_array_equal(got[1], before[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", RELATIVE)
def test_gradients_are_those_of_the_loops_and_the_tail_is_never_read(transposed, dtype, x64):
    rows, others, weights, sizes = case(SHAPES["rows of no group"], dtype)
    _, back, sums = loops(rows, others, weights, sizes)
    matrices = weights.swapaxes(1, 2) if transposed else weights
    _, pull_back = jax.vjp(lambda r, w: op.grouped_matmul(r, w, sizes, transposed), rows, matrices)
    row_gradients, gradients = pull_back(others)
    assert (row_gradients.dtype, gradients.dtype) == (rows.dtype, weights.dtype)
    assert_close(row_gradients, back, RELATIVE[dtype], int(sizes.sum()))
    assert_close(gradients, sums.swapaxes(1, 2) if transposed else sums, RELATIVE[dtype])


def test_the_same_bits_every_time():
    rows, others, weights, sizes = case((4096, 96, 200, [700, 0, 3000, 5, 300]))

    def run():
        matmul, outer = jax.jit(op.grouped_matmul), jax.jit(op.grouped_outer)
        return np.asarray(matmul(rows, weights, sizes)), np.asarray(outer(rows, others, RowGroups(sizes)))

    first = run()
    for _ in range(5):
        for again, before in zip(run(), first, strict=True):
            np.testing.assert_array_equal(again.view(np.int32), before.view(np.int32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([1, -2, 0], "group_sizes of group 1 is -2; expected at least 0"), ([3, 0, 3], "sum to 6; expected at most 4")],
)
def test_bad_sizes_stop_the_program(sizes, message):
    rows, others, weights = jnp.zeros((4, 3)), jnp.zeros((4, 2)), jnp.zeros((3, 3, 2))
    sizes = jnp.asarray(sizes, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"device 0: group_sizes.*{message.split('sizes')[-1]}"):
        jax.block_until_ready(jax.jit(op.grouped_matmul)(rows, weights, sizes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(op.grouped_outer)(rows, others, RowGroups(sizes)))


@pytest.mark.parametrize(("width", "dtype"), [(4, "float32"), (3, "bfloat16")])
def test_what_does_not_fit_is_refused_when_traced(width, dtype):
    with pytest.raises(ValueError, match="do not fit"):
        op.grouped_matmul(jnp.zeros((4, width), dtype), jnp.zeros((2, 3, 2)), jnp.zeros(2, jnp.int32))


def stacked(number):
    cases = [case((60, 8, 12, [7, 0, 20, 11]), seed=seed) for seed in range(number)]
    return tuple(jnp.stack(arrays) for arrays in zip(*cases, strict=True))


def loss(rows, weights, sizes):
    return (op.grouped_matmul(rows, weights, sizes) ** 2).sum()


def expected_gradients(operands):
    return [loops(r, 2 * loops(r, o, w, s)[0], w, s)[1:] for r, o, w, s in zip(*operands, strict=True)]


@pytest.mark.slow
def test_vmap_scan_and_remat_compute_each_for_itself():
    operands = stacked(3)
    want = expected_gradients(operands)
    gradients = jax.grad(jax.checkpoint(loss), argnums=(0, 1))
    mapped = jax.jit(jax.vmap(gradients))(*without_others(operands))

    def step(carry, one):
        return carry, gradients(*one)

    scanned = jax.jit(lambda *args: jax.lax.scan(step, 0, args)[1])(*without_others(operands))
    for got in (mapped, scanned):
        for i, (back, sums) in enumerate(want):
            assert_close(got[0][i], back, 1e-5)
            assert_close(got[1][i], sums, 1e-5)


@pytest.mark.slow
def test_vmap_over_rows_alone_keeps_the_weights():
    rows, _, weights, sizes = stacked(3)
    got = jax.jit(jax.vmap(op.grouped_matmul, in_axes=(0, None, None)))(rows, weights[0], sizes[0])
    for i in range(3):
        np.testing.assert_array_equal(got[i], op.grouped_matmul(rows[i], weights[0], sizes[0]))


@pytest.mark.slow
@parametrize("axis_type", [AxisType.Explicit], [AxisType.Auto])
def test_eight_devices_at_once(axis_type):
    mesh = make_mesh((8,), ("expert",), axis_type)
    spec = PartitionSpec("expert")
    operands = stacked(8)

    def one_device(rows, weights, sizes):
        gradients = jax.grad(loss, argnums=(0, 1))(rows[0], weights[0], sizes[0])
        return jax.tree.map(lambda g: g[None], gradients)

    run = jax.jit(jax.shard_map(one_device, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    args = jax.device_put(without_others(operands), NamedSharding(mesh, spec))
    for _ in range(5):
        row_gradients, gradients = jax.tree.map(np.asarray, run(*args))
    for i, (back, sums) in enumerate(expected_gradients(operands)):
        assert_close(row_gradients[i], back, 1e-5)
        assert_close(gradients[i], sums, 1e-5)


@pytest.mark.slow
def test_weights_that_all_devices_share_get_the_sum_of_their_gradients():
    mesh = make_mesh((8,), ("expert",))
    spec = PartitionSpec("expert")
    rows, _, weights, sizes = stacked(8)

    def one_device(rows, weights, sizes):
        return jax.grad(lambda w: loss(rows[0], w, sizes))(weights)

    specs = (spec, PartitionSpec(), PartitionSpec())
    whole = jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    want = sum(jax.grad(loss, argnums=1)(r, weights[0], sizes[0]) for r in rows)
    assert_close(jax.jit(whole)(rows, weights[0], sizes[0]), np.asarray(want, np.float64), 1e-5)


@pytest.mark.parametrize(("platform", "has_ragged_dot"), [("cuda", False), ("tpu", True), ("rocm", False)])
def test_other_platforms_have_no_custom_call_and_gpus_no_dense_expansion(platform, has_ragged_dot):
    args = without_others(case(SHAPES["uneven"]))
    text = jax.jit(op.grouped_matmul).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert "moe_lb_grouped_matmul" not in text
    assert ("ragged_dot" in text) == has_ragged_dot


@pytest.mark.parametrize(("num_rows", "num_groups"), [(34816, 16), (34816, 20), (420, 8), (64, 1), (7, 3)])
def test_blocks_multiply_at_most_a_quarter_more_rows(num_rows, num_groups):
    size = block_rows(num_rows, num_groups)
    assert (num_rows // size + num_groups) * size <= max(1.25 * num_rows, num_rows + num_groups)


@pytest.mark.parametrize("sizes", [[100, 30], [0, 0], [128, 172], [300, 0]])
def test_a_cleared_tile_has_zeros_where_kernels_read(sizes):
    used = sum(sizes)
    rows = jnp.where(jnp.arange(300)[:, None] < used, 1.0, jnp.nan) * jnp.ones((300, 2))
    got = np.asarray(_clear_tile(rows, jnp.asarray(sizes, jnp.int32)))
    assert (got[:used] == 1).all()
    # Kernels read whole tiles; the last tile contains the last used row.
    assert (got[used : min(-(-used // 128) * 128, 300)] == 0).all()


@pytest.mark.parametrize("sizes", [[100, 30], [0, 0], [128, 172], [300, 0], [299], []])
@pytest.mark.parametrize("at_once", [1, 64, 300, 1024])
def test_all_rows_beyond_the_groups_are_cleared(sizes, at_once, monkeypatch):
    monkeypatch.setattr(operands, "CLEARED_ROWS", at_once)
    rows = jnp.where(jnp.arange(300)[:, None] < sum(sizes), 1.0, jnp.nan) * jnp.ones((300, 2))
    got = np.asarray(_clear_rest(rows, jnp.asarray(sizes, jnp.int32)))
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(300)[:, None] < sum(sizes), (300, 2)))


@pytest.mark.parametrize("sizes", [[2, 0, 3, 0], [0, 0], [1, 4], [0], []])
def test_groups_without_rows_are_cleared(sizes):
    sums = jnp.full((len(sizes), 3, 2), jnp.nan).at[np.flatnonzero(sizes)].set(1.0)
    got = np.asarray(_clear_empty(sums, jnp.asarray(sizes, jnp.int32)))
    np.testing.assert_array_equal(got, np.broadcast_to(np.array(sizes)[:, None, None] > 0, sums.shape))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Experts
from jax_moe_lb.ops import grouped_ffn as op

SIZES = {
    "uneven": [5, 0, 17, 64, 1, 0, 300, 16],
    "empty": [0] * 8,
    "one group": [0, 0, 0, 420, 0, 0, 0, 0],
    "full": [60] * 7 + [0],
}
NUM_ROWS, WIDTH, INNER = 420, 12, 20


def case(dtype, gated=True):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM_ROWS, WIDTH))
    up, gate = 0.3 * rng.normal(size=(2, 8, WIDTH, INNER))
    down = 0.3 * rng.normal(size=(8, INNER, WIDTH))
    experts = Experts(*(jnp.asarray(w, dtype) for w in (up, down)), jnp.asarray(gate, dtype) if gated else None)
    return jnp.asarray(rows, dtype), experts, jnp.asarray(rng.normal(size=rows.shape), dtype)


def reference(rows, experts, sizes, upstream):
    """Group by group, each with its own expert and autodiff."""
    out, row_gradients = jnp.zeros_like(rows), jnp.zeros_like(rows)
    gradients = jax.tree.map(jnp.zeros_like, experts)
    start = 0
    for g, size in enumerate(sizes):
        if size:
            part = slice(start, start + size)
            expert = jax.tree.map(lambda w, g=g: w[g], experts)
            y, vjp = jax.vjp(op.dense_ffn, rows[part], expert)
            dx, dw = vjp(upstream[part])
            out, row_gradients = out.at[part].set(y), row_gradients.at[part].set(dx)
            gradients = jax.tree.map(lambda a, d, g=g: a.at[g].set(d), gradients, dw)
        start += size
    return out, row_gradients, gradients


def relative_error(got, want):
    scale = max(float(jnp.abs(want).max()), 1e-30)
    return float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max()) / scale


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [(op.per_group, op.per_group_gradients), (op.blocked, op.blocked_gradients), (op.ragged, op.ragged_gradients)],
    ids=["per_group", "blocked", "ragged"],
)
@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_all_implementations_equal_one_expert_at_a_time(forward, backward, sizes, gated, dtype, relative):
    rows, experts, upstream = case(dtype, gated)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    want = reference(
        *jax.tree.map(lambda a: a.astype(jnp.float32), (rows, experts)), sizes, upstream.astype(jnp.float32)
    )
    # Rows that nobody wrote: whatever they hold must reach nothing.
    beyond = jnp.arange(NUM_ROWS)[:, None] >= sum(sizes)
    rows, upstream = jnp.where(beyond, jnp.nan, rows), jnp.where(beyond, jnp.nan, upstream)
    y = jax.jit(forward)(rows, experts, group_sizes)
    row_gradients, expert_gradients = jax.jit(backward)(rows, experts, group_sizes, upstream)
    for got, expected in zip(jax.tree.leaves((y, row_gradients, expert_gradients)), jax.tree.leaves(want), strict=True):
        assert relative_error(got, expected) <= relative
    for gradient in jax.tree.leaves(expert_gradients):
        assert gradient.dtype == jnp.float32
        assert (gradient[group_sizes == 0] == 0).all()


@pytest.mark.slow
def test_the_op_is_differentiable_and_float64_stays_float64(x64):
    rows, experts, upstream = case("float64")
    sizes = SIZES["uneven"]
    want = reference(rows, experts, sizes, upstream)
    y, vjp = jax.vjp(lambda r, e: op.grouped_ffn(r, e, jnp.asarray(sizes, jnp.int32)), rows, experts)
    got = (y, *vjp(upstream))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.float64
        assert relative_error(a, b) < 1e-6
        assert float(jnp.abs(a - b).max()) < 1e-12


def test_temporaries_grow_with_rows_not_with_rows_times_groups():
    def temporaries_bytes(num_groups):
        experts = jax.eval_shape(lambda: Experts(jnp.zeros((num_groups, 64, 128)), jnp.zeros((num_groups, 128, 64))))
        args = (jax.ShapeDtypeStruct((2048, 64), jnp.float32), experts, jax.ShapeDtypeStruct((num_groups,), jnp.int32))
        return jax.jit(op.grouped_ffn).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries_bytes(64) < temporaries_bytes(4) + 2048 * 64 * 4
    assert temporaries_bytes(64) < 6 * 2048 * 64 * 4


@pytest.mark.slow
def test_without_the_custom_call_a_cpu_walks_in_blocks(monkeypatch):
    rows, experts, _ = case("float32")
    group_sizes = jnp.asarray(SIZES["uneven"], jnp.int32)

    def run():
        lowered = jax.jit(lambda *args: op.grouped_ffn(*args)).lower(rows, experts, group_sizes)
        return "moe_lb_grouped_matmul" in lowered.as_text(), lowered.compile()(rows, experts, group_sizes)

    has_call, with_call = run()
    monkeypatch.setattr(op, "is_built", lambda platform: False)
    jax.clear_caches()
    still_has_call, without_call = run()
    jax.clear_caches()
    assert has_call
    assert not still_has_call
    assert relative_error(without_call, with_call) < 1e-5


def test_accelerators_use_ragged_dot():
    args = case("float32")[:2]
    text = jax.jit(op.grouped_ffn).trace(*args, jnp.zeros(8, jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_dot" in text

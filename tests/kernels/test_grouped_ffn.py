import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Experts
from jax_moe_lb.core.experts import dense_ffn
from jax_moe_lb.kernels import ClampedSwiGLU, backends, geglu, operands, relu_squared, row_windows
from jax_moe_lb.kernels import grouped_ffn as op
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups, _clear_all, _clear_rest
from tests.adapters import adapters_of, merged, with_adapters
from tests.kernels.backend_cases import matmul_of, outer_of
from tests.marks import parametrize

SIZES = {
    "uneven": [5, 0, 17, 64, 1, 0, 300, 16],
    "empty": [0] * 8,
    "one group": [0, 0, 0, 420, 0, 0, 0, 0],
    "full": [60] * 7 + [0],
}
NUM_ROWS, WIDTH, INNER = 420, 12, 20


def case(dtype, gated=True, fused=False, biased=False, adapted=False):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM_ROWS, WIDTH))
    up, gate = 0.3 * rng.normal(size=(2, 8, WIDTH, INNER))
    down = 0.3 * rng.normal(size=(8, INNER, WIDTH))
    experts = Experts(*(jnp.asarray(w, dtype) for w in (up, down)), jnp.asarray(gate, dtype) if gated else None)
    if biased:
        up_bias, gate_bias = jnp.asarray(rng.normal(size=(2, 8, INNER)), dtype)
        down_bias = jnp.asarray(rng.normal(size=(8, WIDTH)), dtype)
        experts = replace(experts, up_bias=up_bias, gate_bias=gate_bias if gated else None, down_bias=down_bias)
    experts = experts.fused() if fused else experts
    experts = with_adapters(experts) if adapted else experts
    return jnp.asarray(rows, dtype), experts, jnp.asarray(rng.normal(size=rows.shape), dtype)


@jax.jit
def reference(rows, experts, group_sizes, upstream):
    """Return outputs and gradients of every expert on every row with a mask, so that one program fits all sizes."""
    trained = experts.trained
    ends, row = jnp.cumsum(group_sizes), jnp.arange(NUM_ROWS, dtype=group_sizes.dtype)
    of_group = (row[None] < ends[:, None]) & (row[None] >= (ends - group_sizes)[:, None])

    def forward(rows, trained):
        given = trained if trained.up is not None else replace(experts, **adapters_of(trained))
        every = jax.vmap(dense_ffn, (None, 0))(rows, merged(given).apart())
        return jnp.where(of_group[..., None], every, 0).sum(0)

    y, vjp = jax.vjp(forward, rows, trained)
    return y, *vjp(upstream)


def relative_error(got, want):
    got, want = (np.asarray(array, np.float64) for array in (got, want))
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)


def ragged_products(monkeypatch):
    """Use the products of TPUs on a CPU."""
    monkeypatch.setattr(op, "grouped_matmul", matmul_of("lax.ragged_dot"))
    monkeypatch.setattr(op, "grouped_outer", outer_of("lax.ragged_dot"))
    monkeypatch.setattr(
        op,
        "clear_tail",
        lambda rows, group_sizes, *, are_results=False, on=(): (_clear_all if are_results else _clear_rest)(
            rows, group_sizes
        ),
    )
    # Use several blocks for clearing.
    monkeypatch.setattr(operands, "CLEARED_ROWS", 32)


FORMS = {
    # The last of 7 windows is shifted back to fit.
    "custom call, in windows": lambda monkeypatch: monkeypatch.setattr(row_windows, "WINDOW_ROWS", 59),
    "blocks": lambda monkeypatch: monkeypatch.setattr(backends, "is_built", lambda platform: False),
    "ragged": ragged_products,
}


# gated, fused, biased, adapted
KINDS = {
    "swiglu": (True, False, False),
    "fused": (True, True, False),
    "gelu": (False, False, False),
    "biases": (True, False, True),
    "adapters": (True, False, True, True),
    "fused adapters": (True, True, False, True),
}
RELATIVE = {"float32": 1e-5, "bfloat16": 3e-2}
DEFAULT = [
    ("custom call, in windows", "biases", "float32"),
    ("ragged", "biases", "float32"),
    ("blocks", "biases", "float32"),
    ("custom call, in windows", "biases", "bfloat16"),
    ("blocks", "fused", "bfloat16"),
    ("ragged", "gelu", "bfloat16"),
    ("blocks", "adapters", "float32"),
    ("ragged", "adapters", "float32"),
    ("custom call, in windows", "fused adapters", "bfloat16"),
]
"""Every form with every dtype; every form and every dtype with gates; and every kind."""


@pytest.mark.slow
@parametrize("form, kind, dtype", DEFAULT, itertools.product(FORMS, KINDS, RELATIVE))
def test_all_forms_equal_one_expert_at_a_time(form, kind, dtype, monkeypatch):
    FORMS[form](monkeypatch)
    rows, experts, upstream = case(dtype, *KINDS[kind])
    # Include a weight of 0, whose own gradient is not 0.
    weights = (jnp.arange(NUM_ROWS, dtype=jnp.float32)[:, None] % 5) / 4
    wide_rows, wide_experts, wide_upstream = jax.tree.map(lambda a: a.astype(jnp.float32), (rows, experts, upstream))

    @jax.jit
    def run(rows, weights, experts, group_sizes, upstream):
        y = op.grouped_ffn(rows, experts, group_sizes)
        return y, *op.grouped_ffn_gradients(
            BackwardRows(rows, weights, upstream), experts, RowGroups(group_sizes), jnp.float32
        )

    for sizes in SIZES.values():
        group_sizes, used = jnp.asarray(sizes, jnp.int32), sum(sizes)
        want_y, want_rows, want_experts = reference(wide_rows, wide_experts, group_sizes, wide_upstream * weights)
        want_weights = (want_y * wide_upstream).sum(1, keepdims=True)
        # Uninitialized rows, whose values must not affect any result.
        beyond = jnp.arange(NUM_ROWS)[:, None] >= used
        clean = (rows, upstream, weights)
        dirty_rows, dirty_upstream, dirty_weights = (jnp.where(beyond, jnp.nan, array) for array in clean)
        dirty_experts = experts
        if form == "custom call, in windows":
            # Slots without rows are uninitialized on GPUs. On CPUs they are 0, and the other forms multiply by them.
            empty = np.flatnonzero(np.array(sizes) == 0)
            dirty_experts = jax.tree.map(lambda leaf, empty=empty: leaf.at[empty].set(jnp.nan), experts)
        y, of_rows, of_weights, of_experts = run(dirty_rows, dirty_weights, dirty_experts, group_sizes, dirty_upstream)
        got = (y[:used], of_rows[:used], of_weights[:used], of_experts)
        want = (want_y[:used], want_rows[:used], want_weights[:used], want_experts)
        for ours, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert ours.size == 0 or relative_error(ours, expected) <= RELATIVE[dtype]
        for gradient in jax.tree.leaves(of_experts):
            assert gradient.dtype == jnp.float32
            assert (gradient[group_sizes == 0] == 0).all()
    assert run._cache_size() == 1


@jax.jit
def differentiated(rows, experts, group_sizes, upstream):
    """Return outputs and gradients of the op by JAX's transformations."""
    y, vjp = jax.vjp(lambda rows, experts: op.grouped_ffn(rows, experts, group_sizes), rows, experts)
    return y, *vjp(upstream)


@pytest.mark.slow
@parametrize(
    "activation, dtype, relative, kind",
    [
        (None, "float64", 1e-13, {}),
        (geglu, "float32", 1e-5, {}),
        (ClampedSwiGLU(0.5), "float32", 1e-5, {"fused": True, "biased": True}),
    ],
    [(relu_squared, "float32", 1e-5, {"gated": False, "biased": True}), (jnp.tanh, "float32", 1e-5, {"gated": False})],
    ids=["in float64", "geglu", "clamped, with biases", "relu squared, with biases", "own"],
)
def test_the_op_is_differentiable_with_any_activation(activation, dtype, relative, kind, x64):
    rows, experts, upstream = case(dtype, **kind)
    experts, sizes, used = replace(experts, activation=activation), jnp.asarray(SIZES["uneven"], jnp.int32), 403
    want = reference(rows, experts, sizes, upstream)
    if activation is not None:
        usual = reference(rows, replace(experts, activation=None), sizes, upstream)
        assert not np.allclose(want[0], usual[0], atol=1e-2)
    y, row_gradients, gradients = differentiated(rows, experts, sizes, upstream)
    assert gradients.activation == activation
    got, want = (y[:used], row_gradients[:used], gradients), (want[0][:used], want[1][:used], want[2])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < relative


@pytest.mark.slow
def test_last_products_take_weights_that_are_made_again(monkeypatch):
    """They affect only gradients of rows, through `up` and `gate`."""
    monkeypatch.setattr(op, "products_are_by_group", lambda: False)
    rows, experts, upstream = case("float32")
    sizes, ones = jnp.asarray(SIZES["uneven"], jnp.int32), jnp.ones((NUM_ROWS, 1))

    @partial(jax.jit, static_argnums=0)
    def gradients(again):
        return op.grouped_ffn_gradients(
            BackwardRows(rows, ones, upstream), experts, RowGroups(sizes), jnp.float32, None, again
        )

    def twice(after):
        assert after.shape == (NUM_ROWS, INNER)
        return jax.tree.map(lambda w: 2 * w, experts)

    used = sum(SIZES["uneven"])
    of_rows, of_weights, of_experts = gradients(None)
    again_rows, *again = gradients(twice)
    np.testing.assert_allclose(again_rows[:used], 2 * of_rows[:used], rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, again, [of_weights, of_experts])


@pytest.mark.slow
@pytest.mark.parametrize("form", [op.grouped_ffn, op.grouped_ffn_gradients])
def test_temporaries_are_those_of_a_window_whatever_the_number_of_groups(form):
    def temporaries_bytes(num_groups):
        rows, weights, sizes = jnp.zeros((8192, 64)), jnp.zeros((8192, 1)), jnp.zeros(num_groups, jnp.int32)
        up = jnp.zeros((num_groups, 64, 128))
        experts = Experts(up, up.swapaxes(1, 2), up)
        args = (
            (rows, experts, sizes)
            if form is op.grouped_ffn
            else (BackwardRows(rows, weights, rows), experts, RowGroups(sizes))
        )
        run = jax.jit(form if form is op.grouped_ffn else partial(form, sums_dtype=jnp.float32))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    rows_bytes = 8192 * 64 * 4
    assert temporaries_bytes(64) < temporaries_bytes(4) + rows_bytes / 8
    assert temporaries_bytes(64) < 1.25 * rows_bytes


@pytest.mark.slow
@parametrize(
    "form, kind",
    [("custom call, in windows", "biases"), ("blocks", "fused"), ("ragged", "adapters")],
    [("custom call, in windows", "gelu")],
)
def test_products_of_the_forward_pass_give_the_same_gradients(form, kind, monkeypatch):
    FORMS[form](monkeypatch)
    rows, experts, upstream = case("float32", *KINDS[kind])
    sizes, weights = jnp.asarray(SIZES["uneven"], jnp.int32), jnp.linspace(0, 1, NUM_ROWS)[:, None]

    @jax.jit
    def run(rows, upstream):
        y, products = op.grouped_ffn_with_products(rows, experts, sizes)
        batch, args = BackwardRows(rows, weights, upstream), (experts, RowGroups(sizes), jnp.float32)
        saved = batch._replace(products=products)
        return y, products, op.grouped_ffn_gradients(batch, *args), op.grouped_ffn_gradients(saved, *args)

    used = sum(SIZES["uneven"])
    beyond = jnp.arange(NUM_ROWS)[:, None] >= used
    y, products, want, got = run(*(jnp.where(beyond, jnp.nan, array) for array in (rows, upstream)))
    np.testing.assert_array_equal(y[:used], op.grouped_ffn(rows, experts, sizes)[:used])
    assert [part.shape for part in products] == [
        (NUM_ROWS, w.shape[2]) for w in (experts.up, experts.gate) if w is not None
    ]
    for of_saved, of_computed in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True):
        np.testing.assert_array_equal(of_saved, of_computed)
    for of_saved, of_computed in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(of_saved[:used], of_computed[:used])


@pytest.mark.slow
def test_separate_products_fit_experts_with_the_gate_in_up():
    """A backward pass may fuse the gate although the forward pass did not."""
    rows, experts, upstream = case("float32", biased=True)
    sizes, ones = jnp.asarray(SIZES["uneven"], jnp.int32), jnp.ones((NUM_ROWS, 1))
    _, products = op.grouped_ffn_with_products(rows, experts, sizes)
    batches = BackwardRows(rows, ones, upstream), BackwardRows(rows, ones, upstream, products)
    want, got = (op.grouped_ffn_gradients(one, experts.fused(), RowGroups(sizes), jnp.float32) for one in batches)
    used = sum(SIZES["uneven"])
    got, want = ((of[0][:used], of[1][:used], of[2]) for of in (got, want))
    for of_saved, of_computed in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(of_saved, of_computed) < 1e-5


def test_experts_are_put_together_and_apart():
    _, experts, _ = case("float32")
    fused = experts.fused()
    assert (fused.is_fused, experts.is_fused, fused.up.shape, fused.gate) == (True, False, (8, WIDTH, 2 * INNER), None)
    jax.tree.map(np.testing.assert_array_equal, fused.apart(), experts)
    assert fused.nbytes == experts.nbytes
    assert fused.fused() is fused
    assert experts.apart() is experts
    # Without a gate, fusing has no effect.
    _, gelu, _ = case("float32", gated=False)
    assert gelu.fused() is gelu
    assert not gelu.is_fused


def test_only_adapters_are_trained_if_there_are_some():
    _, experts, _ = case("float32", biased=True)
    assert experts.trained is experts
    adapted = with_adapters(experts)
    assert adapted.fused() is adapted
    assert adapted.trained.nbytes == adapted.nbytes - experts.nbytes
    with pytest.raises(ValueError, match="Experts has adapters for only some matrices; expected adapters for all"):
        replace(adapted, gate_b=None)
    with pytest.raises(ValueError, match="Experts has adapters for only some matrices"):
        replace(adapted, gate=None, gate_bias=None)

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Buffers, System, Topology, greedy
from jax_moe_lb.balancers import Greedy, RailS
from jax_moe_lb.transport import Direct, MultiRailDispatch, QuantizedTransfer, TwoPhase
from tests.layer_cases import Case, make_mesh, sharded_moe

E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (INT8, 1 / 254)])
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
def test_a_number_is_off_by_a_rounding_of_its_block(dtype, error, rows_dtype):
    """fp8 has 3 fraction bits, so rounding is up to 1/16 of the number. int8 is uniform over the block's range."""
    rows = jax.random.normal(jax.random.key(0), (64, 256)) * jnp.exp(jax.random.normal(jax.random.key(1), (64, 1)) * 8)
    rows = rows.at[3].set(0).astype(rows_dtype)
    wire = QuantizedTransfer(dtype, block=64)
    words = jax.jit(wire.encode)(rows)
    assert words.dtype == jnp.float32
    assert words.size * 4 == 64 * wire.row_bytes(256)
    got, want = (np.asarray(a, np.float64).reshape(64, 4, 64) for a in (wire.decode(words, rows.dtype), rows))
    largest = np.abs(want).max(-1, keepdims=True)
    # fp8 has subnormal numbers near 0, with the absolute error of the smallest.
    bound = error * np.maximum(np.abs(want), largest * 2**-6 if dtype == E4M3 else largest)
    assert (np.abs(got - want) <= bound * 1.01 + np.abs(want) * (2**-8 if rows_dtype == "bfloat16" else 1e-6)).all()
    assert np.abs(got - want).max() > 0


@pytest.mark.slow
def test_numbers_that_are_not_finite_stay_so():
    rows = jnp.ones((2, 64)).at[0, 5].set(jnp.nan).at[1, 7].set(jnp.inf)
    got = QuantizedTransfer(E4M3, block=32).decode(QuantizedTransfer(E4M3, block=32).encode(rows), jnp.float32)
    assert jnp.isnan(got[0, :32]).any()
    assert not jnp.isfinite(got[1, 7])
    np.testing.assert_array_equal(got[:, 32:], 1)


def test_no_rows():
    wire = QuantizedTransfer(INT8, block=32)
    words = wire.encode(jnp.zeros((0, 64)))
    assert words.shape == (0, wire.row_bytes(64) // 4)
    assert wire.decode(words, jnp.float32).shape == (0, 64)


DIRECT = Direct(Buffers(0.6), transfer=QuantizedTransfer(E4M3, 4))
SPRAY = MultiRailDispatch(Buffers(3.0), transfer=QuantizedTransfer(INT8, 4))


@functools.cache
def run(system, with_gradients):
    """Return outputs and rounds, and optionally gradients of tokens and experts."""
    mesh = make_mesh((2, 2), ("node", "expert"))
    topology = Topology.from_mesh(mesh, ("node", "expert"), rails_per_node=2)
    case = Case(num_tokens=24, num_experts=8)
    kernel, experts = case.params(jnp.float32)
    x, mask = case.tokens(WORKLOADS[1], 4, jnp.float32)
    layer = sharded_moe(mesh, topology, system)

    def loss(x, experts):
        y, stats = layer(x, mask, kernel, experts)
        return jnp.square(y).mean(), (y, stats.rounds)

    if not with_gradients:
        return jax.jit(loss)(x, experts)[1], ()
    (_, aux), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, experts)
    return aux, gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "with_gradients"),
    [
        (DIRECT, True),
        (SPRAY, False),
        (SPRAY, True),
    ],
    ids=["direct", "outputs of spray", "spray"],
)
@pytest.mark.thorough
def test_a_layer_with_it_is_one_whose_tokens_and_outputs_are_rounded(dispatch, with_gradients):
    """Compared with float32, the error is the rounding of tokens and outputs. Gradients pass through, also in several
    rounds.
    """
    if isinstance(dispatch, MultiRailDispatch):
        system = System(RailS(), dispatch=dispatch)
    else:
        system = System(Greedy(min_tokens=2), dispatch=dispatch, replica_slots=1)
    (y, rounds), gradients = run(system, with_gradients)
    (want, _), want_gradients = run(greedy(1), True)
    assert (rounds.max() > 1) == (dispatch.buffers.headroom < 1)
    pairs = [(y, want)]
    if with_gradients:
        pairs += zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True)
    for got, exact in pairs:
        error = float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
        assert 0 < error < (0.02 if dispatch.transfer.dtype == INT8 else 0.1)


def test_what_cannot_travel_so_is_refused():
    with pytest.raises(ValueError, match=r"QuantizedTransfer.dtype is float16; expected float8_e4m3fn or int8"):
        QuantizedTransfer(jnp.float16)
    with pytest.raises(ValueError, match=r"QuantizedTransfer.block is 6; expected a multiple of 4"):
        QuantizedTransfer(block=6)
    with pytest.raises(ValueError, match=r"QuantizedTransfer.block is 128; expected a divisor of the width, 64"):
        QuantizedTransfer().encode(jnp.ones((2, 64)))
    with pytest.raises(ValueError, match="expected None, as peer copies do not quantize rows"):
        TwoPhase(Buffers(1.5), transfer=QuantizedTransfer())


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-37])
def test_the_smallest_numbers_become_no_nan(dtype, largest):
    rows = jnp.full((1, 32), largest)
    got = QuantizedTransfer(dtype, block=32).decode(QuantizedTransfer(dtype, block=32).encode(rows), jnp.float32)
    np.testing.assert_allclose(got, rows, atol=1.2e-38)

"""Kernels for Hopper in the interpreter of Mosaic GPU, which detects races; compiled, they run on Hopper only."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu

from jax_moe_lb.kernels import backends, mosaic_api, mosaic_outer
from jax_moe_lb.kernels import grouped_matmul as op
from jax_moe_lb.kernels.backends import HOPPER, Product, choose_backend, prefer_backend
from jax_moe_lb.kernels.operands import RowGroups
from tests.kernels.backend_cases import (
    assert_products,
    check_gradients,
    make_operands,
    matmul_of,
    on_platform,
    outer_of,
    sums_by_group,
)
from tests.marks import parametrize

KERNEL = "Hopper kernel"
NUM_ROWS, WIDTHS = 264, (128, 128)
PARTS = (3, 2)
SIZES = {
    "uneven": (100, 0, 83, 3, 61),
    "no rows": (0, 0, 0, 0, 0),
    "one hot": (0, 0, NUM_ROWS, 0, 0),
    "few": (1, 2, 3, 4, 5),
    "ends beside tiles": (127, 1, 128, 0, 8),
}
DEVICE = SimpleNamespace(platform="gpu", compute_capability=HOPPER, core_count=2)


def interpreter(detect_races):
    return mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=detect_races))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for module in (backends, mosaic_api):
        monkeypatch.setattr(module, "get_default_device", lambda: DEVICE)
    # The effects of the interpreter do not pass this primitive, which has none.
    monkeypatch.setattr(backends, "unvarying_call", lambda function, *operands: function(*operands))
    with interpreter(detect_races=True), prefer_backend(KERNEL):
        yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def run(function, *args):
    """Run a function compiled, and compare the bits of two calls."""
    compiled = jax.jit(function)
    first, second = (jax.tree.map(np.asarray, compiled(*args)) for _ in range(2))
    assert all(jax.tree.leaves(jax.tree.map(lambda one, other: one.tobytes() == other.tobytes(), first, second)))
    return first


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@parametrize("sizes", ["uneven"], SIZES)
def test_products_of_parts(sizes, transposed):
    sizes = SIZES[sizes]
    rows, matrices = make_operands(sizes, num_rows=NUM_ROWS)
    weights = matrices.mT if transposed else matrices
    multiply = partial(matmul_of(KERNEL, "cuda"), transposed=transposed)
    operands = rows, (weights[:3], weights[3:]), jnp.array(sizes, jnp.int32)
    got = run(multiply, *operands)
    assert_products(got, rows, matrices, sizes)
    # Rows of no group are not written; the interpreter fills memory with NaN.
    assert np.isnan(np.asarray(got[sum(sizes) :], np.float32)).all()
    assert "concatenate" not in str(jax.make_jaxpr(multiply)(*operands))


@pytest.mark.slow
@parametrize("dtype", [jnp.bfloat16], [jnp.float32])
@parametrize("sizes", ["uneven"], SIZES)
def test_sums_of_parts(sizes, dtype):
    sizes = SIZES[sizes]
    rows, _ = make_operands(sizes, num_rows=NUM_ROWS)
    others = make_operands(sizes, WIDTHS[::-1], NUM_ROWS)[0]
    groups = RowGroups(jnp.array(sizes, jnp.int32))
    got = run(partial(outer_of(KERNEL, "cuda"), dtype=dtype, parts=PARTS), rows, others, groups)
    assert tuple(len(part) for part in got) == PARTS
    want = sums_by_group(rows, others, sizes)
    rtol = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.concatenate(got).astype(np.float64), want, rtol=rtol, atol=1e-4)


@pytest.mark.slow
def test_sums_that_nobody_reads_are_not_written():
    sizes = (*SIZES["uneven"][:3], 0, 61)
    rows, _ = make_operands(sizes, num_rows=NUM_ROWS)

    groups = RowGroups(jnp.array(sizes, jnp.int32), jnp.array([True, True, True, False, False]))
    home, replicas = run(partial(mosaic_outer.outer, parts=PARTS, dtype=jnp.float32), rows, rows, groups)
    want = sums_by_group(rows, rows, sizes)
    np.testing.assert_allclose(home, want[:3], rtol=1e-5, atol=1e-4)
    assert not home[1].any()
    assert np.isnan(replicas[0]).all()
    np.testing.assert_allclose(replicas[1], want[4], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@parametrize("widths", [(192, 320)], [(320, 192)])
def test_widths_are_no_multiples_of_tiles(widths):
    """The last tiles of columns overlap the previous ones, and both store the same values, which are no race."""
    sizes = SIZES["few"]
    group_sizes = jnp.array(sizes, jnp.int32)
    rows, matrices = make_operands(sizes, widths, num_rows=128)
    others = make_operands(sizes, widths[::-1], num_rows=128)[0]
    with interpreter(detect_races=False):
        got = run(matmul_of(KERNEL, "cuda"), rows, matrices, group_sizes)
        sums = run(outer_of(KERNEL, "cuda"), rows, others, RowGroups(group_sizes))
    assert_products(got, rows, matrices, sizes)
    np.testing.assert_allclose(sums, sums_by_group(rows, others, sizes), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_narrow_operands_are_padded():
    sizes = SIZES["few"]
    rows, matrices = make_operands(sizes, (16, 8), num_rows=128)
    got = run(matmul_of(KERNEL, "cuda"), rows, matrices, jnp.array(sizes, jnp.int32))
    assert_products(got, rows, matrices, sizes)


@pytest.mark.slow
def test_gradients(monkeypatch):
    monkeypatch.setattr(op, "_by_platform", on_platform(KERNEL))
    check_gradients(SIZES["uneven"], NUM_ROWS, run)


def make_product(widths=WIDTHS, num_rows=NUM_ROWS, dtype=jnp.bfloat16, kind="product"):
    return Product(kind, num_rows, widths, PARTS, (jnp.dtype(dtype),) * 2, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (make_product(dtype=jnp.float32), "operands are float32 and float32; expected bfloat16 or float16"),
        (make_product(widths=(200, 128)), "widths are 200 and 128; expected multiples of 64"),
        (make_product(num_rows=260), "260 rows; expected a multiple of 8, at least 128"),
        (make_product(num_rows=120), "120 rows; expected a multiple of 8, at least 128"),
    ],
)
def test_what_does_not_fit_is_left_to_others(product, why):
    choice = choose_backend(product, "cuda")
    assert choice.backend.name != KERNEL
    assert choice.rejected[KERNEL] == why


def test_only_a_recorded_rate_or_a_preference_chooses_it(monkeypatch):
    assert choose_backend(make_product(), "cuda").why == "it is preferred"
    token = backends._preferred.set(None)
    choice = choose_backend(make_product(), "cuda")
    assert choice.backend.name == "Triton kernel"
    assert choice.rejected[KERNEL] == "no rate is recorded on gpu 9.0"
    measured = backends.recorded_tflops
    monkeypatch.setattr(backends, "recorded_tflops", lambda *of: 700.0 if of[2] == "Hopper" else measured(*of))
    for kind in backends.KINDS:
        choice = choose_backend(make_product(kind=kind), "cuda")
        assert choice.backend.name == KERNEL
        assert "recorded at 700 TFLOP/s" in choice.why
    backends._preferred.reset(token)


def test_an_unknown_backend_is_refused():
    with (
        pytest.raises(ValueError, match=r"name is 'hopper'; expected one of .*Hopper kernel"),
        prefer_backend("hopper"),
    ):
        pass


def test_other_architectures_have_other_kernels(monkeypatch):
    for capability in ("8.0", "10.0"):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(backends, "get_default_device", lambda device=device: device)
        why = choose_backend(make_product(), "cuda").rejected[KERNEL]
        assert why == f"the default device is gpu {capability}; expected compute capability 9.0"


def test_an_older_jax_has_other_kernels(monkeypatch):
    monkeypatch.setattr(backends, "OLDEST_JAX_FOR_HOPPER", (99, 0, 0))
    choice = choose_backend(make_product(), "cuda")
    assert choice.backend.name == "Triton kernel"
    assert choice.rejected[KERNEL] == f"JAX is {jax.__version__}; expected at least 99.0.0"

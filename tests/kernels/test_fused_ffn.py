"""Networks of experts by kernels with activations inside, for Hopper and for TPUs, in interpreters."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu
from jax.experimental.pallas import tpu as pltpu

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.experts import ClampedSwiGLU, Experts, dense_ffn, geglu, gelu_exact, relu_squared
from jax_moe_lb.core.tpu_vectors import OLDEST_JAX
from jax_moe_lb.kernels import backends, fused_ffn, grouped_ffn, grouped_matmul, mosaic_api, tpu_products
from jax_moe_lb.kernels.backends import HOPPER, prefer_backend
from jax_moe_lb.kernels.fused_ffn import can_activate
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups
from tests.kernels.backend_cases import draw, on_platform, split_experts
from tests.marks import parametrize

NUM_ROWS, HIDDEN = 136, 128
PARTS = (slice(2), slice(2, 4))
apart = partial(split_experts, parts=PARTS)
SIZES = {"uneven": (40, 0, 0, 63), "one hot": (0, 0, 128, 0), "no rows": (0, 0, 0, 0)}
HOPPER_GPU = SimpleNamespace(platform="gpu", compute_capability=HOPPER, core_count=2)
TPU = SimpleNamespace(platform="tpu")
KERNELS = {"Hopper kernel": ("cuda", HOPPER_GPU)}
KERNELS |= {} if why_older_jax(OLDEST_JAX) else {"Pallas kernel": ("tpu", TPU)}


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request, monkeypatch):
    platform, device = KERNELS[request.param]
    for module in (backends, mosaic_api, fused_ffn):
        monkeypatch.setattr(module, "get_default_device", lambda: device)
    for module in (backends, fused_ffn):
        # The effects of the interpreter do not pass this primitive, which has none.
        monkeypatch.setattr(module, "unvarying_call", lambda function, *operands: function(*operands))
    monkeypatch.setattr(grouped_ffn, "_on_device", lambda fused, other, *operands: fused(*operands))
    monkeypatch.setattr(grouped_matmul, "_by_platform", on_platform(request.param, platform))
    if platform == "tpu":
        chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
        monkeypatch.setattr(tpu_products, "_chip", lambda: chip)
        monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
        yield request.param
        return
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()), prefer_backend(request.param):
        yield request.param
    gpu_callbacks.reset_gpu_interpret_mode_state()


def make_experts(gated=True, fused=False, activation=None, inner=128, dtype=jnp.bfloat16):
    up, gate = (draw(4, HIDDEN, inner, seed=seed, dtype=dtype) for seed in (0, 1))
    experts = Experts(up, draw(4, inner, HIDDEN, seed=2, dtype=dtype), gate if gated else None, activation)
    return experts.fused() if fused else experts


def reference(rows, weights, experts, group_sizes, upstream):
    """Outputs and gradients of a dense layer in float32; rows of no group are left out."""
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (rows[: len(group)], experts, upstream[: len(group)]))

    def outputs(rows, weights, experts):
        mine = jax.tree.map(lambda leaf: leaf[group], experts)
        return weights * jax.vmap(dense_ffn)(rows, mine)

    y, pull_back = jax.vjp(outputs, wide[0], weights[: len(group)], wide[1])
    return y, *pull_back(wide[2])


def assert_near(got, want, bound=2**-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.abs(one - other).max(initial=0) <= bound * max(np.abs(other).max(initial=0), 1e-3)


@pytest.mark.slow
@parametrize(
    "sizes, saved, options",
    [("uneven", False, {})],
    [
        ("uneven", True, {}),
        ("uneven", True, {"fused": True, "activation": ClampedSwiGLU()}),
        # The last tiles of columns overlap the previous ones.
        ("uneven", False, {"inner": 192}),
        ("uneven", False, {"gated": False}),
        ("uneven", False, {"activation": geglu}),
        ("one hot", False, {}),
        ("no rows", False, {}),
    ],
)
def test_values_and_gradients(sizes, saved, options):
    """Against a dense layer in float32; rows of no group are NaN, and two calls have equal bits."""
    used, group_sizes = sum(SIZES[sizes]), jnp.array(SIZES[sizes], jnp.int32)
    experts = make_experts(**options)
    rows, upstream = (draw(NUM_ROWS, HIDDEN, seed=seed).at[used:].set(jnp.nan) for seed in (8, 9))
    weights = draw(NUM_ROWS, 1, seed=10, dtype=jnp.float32)

    def both(rows, experts, weights, upstream):
        y, products = grouped_ffn.grouped_ffn_with_products(rows, experts, group_sizes)
        gradients = partial(grouped_ffn.grouped_ffn_gradients, sums_dtype=jnp.float32)
        batch = BackwardRows(rows, weights, upstream, products if saved else None)
        return y, gradients(batch, experts, RowGroups(group_sizes))

    assert grouped_ffn.fuses(rows, apart(experts))
    operands = rows, apart(experts), weights, upstream
    compiled = jax.jit(both)
    got, again = (jax.tree.map(np.asarray, compiled(*operands)) for _ in range(2))
    assert jax.tree.all(jax.tree.map(lambda one, other: one.tobytes() == other.tobytes(), got, again))
    y, (of_rows, of_weights, of_experts) = got
    want, *of_want = reference(rows, weights, experts, SIZES[sizes], upstream)
    assert_near(weights[:used] * y[:used].astype(jnp.float32), want)
    assert_near((of_rows[:used], of_weights[:used]), of_want[:2])
    assert_near(of_experts, apart(of_want[2]))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, True),
        ({"gated": False}, True),
        ({"activation": ClampedSwiGLU()}, True),
        ({"gated": False, "activation": relu_squared}, True),
        # `erfc` has no form inside a kernel.
        ({"gated": False, "activation": gelu_exact}, False),
        ({"activation": lambda gate, up: gate * up * np.ones((1, up.shape[-1]), np.float32)}, False),
    ],
)
def test_activations_inside_kernels(options, want):
    assert can_activate(make_experts(**options)) == want


def test_what_is_not_fused(kernel):
    rows = draw(NUM_ROWS, HIDDEN, seed=0)
    assert not grouped_ffn.fuses(rows, make_experts(gated=False, activation=gelu_exact))
    assert not grouped_ffn.fuses(rows.astype(jnp.float32), make_experts(dtype=jnp.float32))
    assert grouped_ffn.fuses(rows[:132], make_experts()) == (kernel == "Pallas kernel")

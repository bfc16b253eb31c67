"""On a GPU, products read home experts and replicas in two arrays: the kernels in the Pallas interpreter, on CPUs."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from jax_moe_lb import Buffers, Experts, TopK, Topology, exact
from jax_moe_lb.kernels import backends, grouped_ffn
from jax_moe_lb.kernels import grouped_matmul as products
from jax_moe_lb.kernels.grouped_ffn import takes_parts
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups
from jax_moe_lb.transport import slot_weights
from tests.adapters import with_adapters
from tests.kernels.backend_cases import draw, on_platform, split_experts
from tests.layer_cases import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

NUM_ROWS, WIDTH, INNER = 160, 128, 136
PARTS = (slice(3), slice(3, 5))
apart = partial(split_experts, parts=PARTS)
SIZES = {
    "uneven": (60, 0, 3, 50, 20),
    "one hot": (0, 0, 0, 0, 130),
    "all at home": (0, 90, 0, 0, 0),
    "no rows": (0,) * 5,
}


def on_gpu(monkeypatch, **device):
    """Pretend that a GPU is the default device."""
    monkeypatch.setattr(backends, "get_default_device", lambda: SimpleNamespace(platform="gpu", **device))


def with_kernels_of_gpus(monkeypatch):
    """Use the products of an NVIDIA GPU, in the interpreter."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(products, "_by_platform", on_platform("Triton kernel"))


def make_experts(fused=False, biased=False, widths=(WIDTH, INNER), dtype=jnp.bfloat16):
    width, inner = widths
    shapes = [(width, inner), (inner, width), (width, inner)]
    biases = [(inner,), (width,), (inner,)] if biased else []
    up, down, gate, *rest = (draw(5, *shape, seed=i, dtype=dtype) for i, shape in enumerate([*shapes, *biases]))
    experts = Experts(up, down, gate, None, *rest)
    return experts.fused() if fused else experts


@pytest.mark.slow
@parametrize(
    "sizes, fused, biased, adapted",
    [("uneven", True, False, False)],
    [
        *((name, True, False, False) for name in SIZES),
        ("uneven", False, True, False),
        ("uneven", False, False, True),
    ],
)
def test_parts_equal_one_array_bitwise(sizes, fused, biased, adapted, monkeypatch):
    """Outputs, gradients of rows and experts, and sums over two rounds; rows of no group are NaN."""
    with_kernels_of_gpus(monkeypatch)
    used, group_sizes = sum(SIZES[sizes]), jnp.array(SIZES[sizes], jnp.int32)
    experts = with_adapters(make_experts(fused, biased)) if adapted else make_experts(fused, biased)
    rows, upstream = (draw(NUM_ROWS, WIDTH, seed=seed).at[used:].set(jnp.nan) for seed in (8, 9))
    weights = draw(NUM_ROWS, 1, seed=10, dtype=jnp.float32)

    @jax.jit
    def both(experts):
        y = grouped_ffn.grouped_ffn(rows, experts, group_sizes)
        batch = BackwardRows(rows, weights, upstream)
        step = partial(grouped_ffn.grouped_ffn_gradients, batch, experts, RowGroups(group_sizes), jnp.float32)
        once = step()
        *of_rows, sums = step(once[2], lambda after: experts)
        return tuple(array[:used] for array in (y, *of_rows)), once[2], sums

    want, *want_sums = both(experts)
    got, *sums = both(apart(experts))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves((got, sums)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for mine, others in zip(sums, want_sums, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, apart(others))
    # The second round adds to the sums of the first.
    assert_close(sums[1], jax.tree.map(lambda leaf: 2 * leaf, sums[0]), 1e-5)


@pytest.mark.slow
@parametrize("max_rounds", [1], [2])
def test_a_layer_on_a_gpu_reads_parts_by_default(max_rounds, monkeypatch):
    """It equals the joined form bitwise, and the dense layer; gradients of replicas come home."""
    with_kernels_of_gpus(monkeypatch)
    monkeypatch.setattr(slot_weights, "traced_platform", lambda: "gpu")
    mesh, case = make_mesh((2,), ("expert",)), Case(num_tokens=24, features=124, mlp_dim=128, num_experts=4)
    x, mask, kernel, experts, target = case.arguments("zipf", 2, "bfloat16")
    # Fused beforehand, so that both forms multiply by gate and up together.
    args = x, mask, kernel, experts.fused(), target
    system = exact(1, Buffers(1.5 / max_rounds, max_rounds))

    def layer():
        return with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system, TopK(2)))

    in_parts = layer()
    one_array = f"bf16[3,{case.width},{2 * case.mlp_dim}]"
    assert one_array not in str(in_parts.run.trace(*args).jaxpr)
    (y, stats), gradients = in_parts(*args)
    assert int(stats.weight_bytes_moved.sum()) > 0
    monkeypatch.setattr(slot_weights, "takes_parts", lambda parts: False)
    joined = layer()
    assert one_array in str(joined.run.trace(*args).jaxpr)
    (want, _), want_gradients = joined(*args)
    jax.tree.map(np.testing.assert_array_equal, (y, gradients), (want, want_gradients))
    x, kernel, experts = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, kernel, experts))
    (dense, _), of_dense = dense_with_gradients(TopK(2))(x, mask, kernel, experts, target)
    assert_close((y, *gradients[:2], gradients[2].apart()), (dense, *of_dense), 5e-2)


@pytest.mark.parametrize(
    ("device", "experts", "want"),
    [
        ({"compute_capability": "9.0"}, make_experts(), True),
        ({"compute_capability": "8.0"}, make_experts(), True),
        # Too little shared memory for the kernels.
        ({"compute_capability": "8.9"}, make_experts(), False),
        ({"compute_capability": "9.0"}, make_experts(dtype=jnp.float32), False),
        ({"compute_capability": "9.0"}, make_experts(widths=(128, 64)), False),
    ],
    ids=["Hopper", "Ampere", "little memory", "float32", "narrow"],
)
def test_devices_dtypes_and_widths_with_parts(device, experts, want, monkeypatch):
    on_gpu(monkeypatch, **device)
    assert takes_parts(apart(experts)) == want


def test_cpus_and_kernels_recorded_as_faster_take_one_array(monkeypatch):
    assert not takes_parts(apart(make_experts()))
    on_gpu(monkeypatch, compute_capability="10.0")
    # Products of whole tiles, as its kernel requires.
    experts = apart(make_experts(widths=(128, 256)))
    assert takes_parts(experts)
    monkeypatch.setattr(backends, "has_tokamax", lambda: True)
    monkeypatch.setattr(backends, "_tokamax", lambda product, left, *others: left)
    assert not takes_parts(experts)

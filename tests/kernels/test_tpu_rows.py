"""Kernels of row copies on TPUs, interpreted on the CPU, against NumPy and against the forms of other platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Buffers, System, TopK, Topology
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.kernels import slot_places, tpu_rows
from jax_moe_lb.kernels.slot_places import RowOwners, sum_rows
from jax_moe_lb.kernels.tpu_rows import gather_rows, sum_rows_of_entries, why_not_gather, why_not_sum
from jax_moe_lb.transport import Forward, Once, lists, once_rounds
from tests.layer_cases import Case, assert_close, make_mesh, sharded_moe, with_gradients


def owned_rows(seed: int, num_rows: int, width: int, num_entries: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Return rows, their entries and weights; a fourth of the rows has no entry, and is NaN like its weight."""
    rng = np.random.default_rng(seed)
    entry = rng.integers(0, num_entries, num_rows).astype(np.int32)
    entry[rng.random(num_rows) < 0.25] = num_entries
    rows, weights = rng.normal(size=(num_rows, width)), rng.random(num_rows)
    rows[entry == num_entries], weights[entry == num_entries] = np.nan, np.nan
    return jnp.asarray(rows, jnp.bfloat16), entry, weights.astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "width", "num_entries"),
    # Batches on borders of blocks, blocks without rows, entries of several batches, and more rows than are in flight.
    [
        (200, 2048, 150),
        (96, 256, 64),
        (131, 512, 3),
        (1, 256, 70),
        (128, 256, 128),
        (1, 256, 270),
        (40, 256, 700),
        (300, 256, 290),
    ],
)
@pytest.mark.parametrize("is_weighted", [True, False])
def test_sums_equal_numpy_rounded_once(num_rows, width, num_entries, is_weighted):
    rows, entry, weights = owned_rows(num_rows, num_rows, width, num_entries)
    want = np.zeros((num_entries + 1, width), np.float32)
    np.add.at(want, entry, np.asarray(rows, np.float32) * (weights[:, None] if is_weighted else 1))
    of_rows = jnp.asarray(weights) if is_weighted else None
    got = sum_rows_of_entries(rows, jnp.asarray(entry), of_rows, num_entries, interpret=True)
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last place, and sums in another order.
    np.testing.assert_allclose(np.asarray(got, np.float32), want[:num_entries], rtol=2**-8, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [5, 140])
def test_all_rows_may_have_one_entry_or_none(entry):
    rows = jnp.full((24, 256), 0.5, jnp.bfloat16)
    got = sum_rows_of_entries(rows, jnp.full(24, entry, jnp.int32), None, 140, interpret=True)
    want = np.zeros((140, 256))
    want[entry : entry + 1] = 12
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.slow
def test_a_nan_stays_in_its_entry():
    rows = jnp.ones((8, 256), jnp.bfloat16).at[3].set(jnp.nan)
    entry = jnp.asarray([0, 0, 1, 2, 2, 3, 3, 3], jnp.int32)
    got = np.asarray(sum_rows_of_entries(rows, entry, None, 4, interpret=True), np.float32)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(got[[0, 1, 3], 0], [2, 1, 3])


@pytest.mark.parametrize("num_entries", [300, 2**30])
def test_rows_are_in_the_order_of_entries(num_entries):
    """Both forms of the sort: keys of one word, and of two."""
    entry = np.random.default_rng(0).integers(0, 5, 200).astype(np.int32)
    order, of_order = tpu_rows._by_entry(jnp.asarray(entry), num_entries)
    np.testing.assert_array_equal(order, np.argsort(entry, kind="stable"))
    np.testing.assert_array_equal(of_order, np.sort(entry))


@pytest.mark.parametrize(
    ("num_rows", "width", "num_taken"), [(200, 2048, 700), (130, 4096, 128), (50, 2048, 1), (40, 12288, 300)]
)
def test_gathered_rows_are_equal(num_rows, width, num_taken):
    rng = np.random.default_rng(num_taken)
    rows = jnp.asarray(rng.normal(size=(num_rows, width)), jnp.bfloat16)
    at = jnp.asarray(rng.integers(0, num_rows, num_taken), jnp.int32)
    np.testing.assert_array_equal(gather_rows(rows, at, interpret=True), rows[at])


@pytest.mark.parametrize(
    ("shape", "dtype", "part"),
    [((64, 256), "float32", "bfloat16"), ((64, 384), "bfloat16", "256"), ((100_000, 256), "bfloat16", "bytes")],
)
def test_other_rows_have_another_form(shape, dtype, part):
    rows = jnp.zeros(shape, dtype)
    assert part in why_not_sum(rows, True)
    assert why_not_gather(rows, jnp.zeros(64, jnp.int32)) is not None


def test_tpus_alone_have_the_kernels(monkeypatch):
    rows, entry, _ = owned_rows(0, 64, 256, 8)
    place = jnp.zeros((8, 2), jnp.int32)

    def text_of(platform):
        run = jax.jit(lambda rows, place, entry: sum_rows(rows, place, None, RowOwners(entry)))
        return run.trace(rows, place, jnp.asarray(entry)).lower(lowering_platforms=(platform,)).as_text()

    assert "tpu_custom_call" not in text_of("tpu") + text_of("cpu")
    monkeypatch.setattr(slot_places, "_is_on_tpu", lambda: True)
    assert "moe_sum_rows" in text_of("tpu")
    assert "moe_sum_rows" not in text_of("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("dispatch", [Once(Buffers(0.6)), Forward()], ids=["once", "forward"])
def test_a_layer_has_the_same_values_and_gradients_with_the_kernels(dispatch, monkeypatch):
    mesh = make_mesh((2, 2), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, mesh.axis_names)
    case = Case(num_tokens=12, features=2048 - 16, mlp_dim=8, per_tok=4)
    system = System(Greedy(), dispatch=dispatch, replica_slots=2)
    args = case.arguments("zipf", 4, "bfloat16")

    def run():
        return with_gradients(sharded_moe(mesh, topology, system, TopK(4), check_vma=False))(*args)

    want = run()
    sums = []

    def with_kernel(rows, place, weights=None, owners=None):
        sums.append(rows.shape)
        return sum_rows_of_entries(rows, *owners, place.shape[0], interpret=True).astype(jnp.float32)

    for module in (lists, once_rounds):
        monkeypatch.setattr(module, "sum_rows", with_kernel)
    monkeypatch.setattr(once_rounds, "take_rows", lambda rows, at, _: gather_rows(rows, at, interpret=True))
    assert_close(run(), want, 2e-2)
    assert sums

"""The load of a layer has the rows of every exchange, product and replica, as the program sends them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Buffers, Precision, exact, feplb, plain
from jax_moe_lb.aot import LayerSizes, Target
from jax_moe_lb.aot.load import LayerLoad, counts_of, zipf_counts
from jax_moe_lb.balancers import Balancer
from jax_moe_lb.core.file_limits import LimitError
from jax_moe_lb.core.topology import Topology
from tests.aot.scheduled import even_counts, load_of, skewed_counts
from tests.layer_cases import make_layer, make_mesh

SIZES = LayerSizes(hidden=64, inner=32, experts=16, tokens=256, per_token=2)
TOPOLOGY = Topology.flat(8)


def test_a_zipf_load_has_distinct_experts_of_every_token(monkeypatch):
    counts = counts_of("zipf:1.2", SIZES, 8)
    assert (counts.sum(1) == 512).all()
    assert counts.max() <= 256
    flat, steep = (counts_of(f"zipf:{power}", SIZES, 8).sum(0) for power in ("0", "1.2"))
    assert steep.max() / steep.mean() > 1.5 > flat.max() / flat.mean()
    assert (counts == zipf_counts(SIZES, 8, 1.2)).all()
    assert (counts != zipf_counts(SIZES, 8, 1.2, seed=1)).any()
    # In parts, so that many tokens need no more memory.
    monkeypatch.setattr("jax_moe_lb.aot.load.MOST_ENTRIES", 3 * SIZES.experts)
    assert (counts == zipf_counts(SIZES, 8, 1.2)).all()


def test_a_uniform_load_is_equal_on_all_ranks():
    counts = counts_of("uniform", LayerSizes(experts=5, tokens=4, per_token=2), 2)
    assert counts.tolist() == [[2, 2, 2, 1, 1]] * 2


def test_a_load_from_a_file(tmp_path):
    np.save(tmp_path / "counts.npy", np.stack([even_counts(), skewed_counts()]))
    assert (counts_of(str(tmp_path / "counts.npy"), SIZES, 8) == even_counts()).all()


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "zipf:1e9", "zipf:nan", "Uniform", "x" * 10**6])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"^load is .*; expected uniform, zipf:EXPONENT such as zipf:1.0, or a file"):
        counts_of(text, SIZES, 8)


def test_a_missing_file_names_the_load(tmp_path):
    with pytest.raises(ValueError, match=r"^load is .*none.npy: No such file or directory; expected a .npy or .npz"):
        counts_of(str(tmp_path / "none.npy"), SIZES, 8)


def test_a_load_beyond_the_limits_has_a_remedy_without_an_option(tmp_path):
    """`compile` and `tune` have no `--file-limits`."""
    with (tmp_path / "counts.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (2**28, 16)})
    problem = r"^load .*counts.npy: arrays of 17179869184 bytes; expected at most \d+"
    with pytest.raises(LimitError, match=rf"{problem}\. Save the counts of one layer, \[R, E\]\.$"):
        counts_of(str(tmp_path / "counts.npy"), SIZES, 8)


@pytest.mark.parametrize("counts", [np.ones((8, 8), np.int32), np.full((8, 16), 33, np.int32)])
def test_counts_of_another_layer_are_refused(counts):
    with pytest.raises(ValueError, match=r"^counts has shape .* expected shape \(8, 16\) and at most 512$"):
        LayerLoad.of(plain(), SIZES, TOPOLOGY, counts)


@pytest.mark.parametrize("by_rank", [False, True])
def test_rounds_are_windows_on_the_stream_of_a_receiver(by_rank):
    counts = zipf_counts(SIZES, 8, 1.2)
    load = load_of(counts, capacity=384)
    assert load.rounds == -(-load.waves[0].sum((0, 2)).max() // 384) > 1
    rounds = [load.sent(0, i, by_rank=by_rank) for i in range(load.rounds)]
    assert (sum(rounds) == load.waves[0]).all()
    assert max(one.sum((0, 2)).max() for one in rounds) == 384
    for receiver in range(8):
        whole = load.waves[0][:, receiver]
        slots, sources = np.meshgrid(np.arange(2), np.arange(8), indexing="ij")
        order = [(s, j) for j, s in zip(slots.flat, sources.flat, strict=True)]
        order = sorted(order) if by_rank else order
        stream = [pair for pair in order for _ in range(whole[pair])]
        first = np.zeros((8, 2), int)
        for pair in stream[:384]:
            first[pair] += 1
        assert (rounds[0][:, receiver] == first).all()


def test_an_exact_plan_serves_the_mean_and_copies_its_replicas():
    counts = zipf_counts(SIZES, 8, 1.2)
    before, after = (LayerLoad.of(system, SIZES, TOPOLOGY, counts) for system in (plain(), exact()))
    assert before.imbalance > 1.3
    assert after.imbalance < 1.05
    assert after.rounds == 1
    # A copied expert has rows, and its home is not its taker.
    assert after.replicas.sum() > 0 == before.replicas.sum()
    assert np.einsum("iis->", after.replicas) == 0
    assert after.rows(0).sum() == before.waves[0].sum() == counts.sum()


@pytest.mark.slow
def test_two_phases_serve_every_row_once():
    counts = zipf_counts(SIZES, 8, 0.6)
    load = LayerLoad.of(feplb().replace(buffers=Buffers(3.0)), SIZES, TOPOLOGY, counts)
    home, onward = load.waves
    assert (home.sum((0, 2)) == LayerLoad.of(plain(), SIZES, TOPOLOGY, counts).waves[0].sum((0, 2))).all()
    assert 0 < onward.sum() - np.einsum("iis->", onward) < home.sum()
    assert load.rounds == 1
    parts = {part: load.rows(0, part).sum() for part in ("moved_wave", "home_wave")}
    assert parts["home_wave"] + parts["moved_wave"] == load.rows(0).sum() == counts.sum()
    assert parts["moved_wave"] > 0


@pytest.mark.slow
def test_rounds_of_two_phases_serve_every_row_once():
    """Rows that move are the last ones of the streams, and no home gets more than its buffer in a round."""
    counts = zipf_counts(SIZES, 8, 1.2)
    whole, load = (LayerLoad.of(feplb().replace(buffers=Buffers(room)), SIZES, TOPOLOGY, counts) for room in (8.0, 1.0))
    assert whole.rounds == 1 < load.rounds
    for part in ("home_wave", "moved_wave", "all"):
        of_rounds = [load.rows(i, part) for i in range(load.rounds)]
        assert (sum(of_rounds) == whole.rows(0, part)).all()
    for wave in (0, 1):
        assert (sum(load.sent(wave, i) for i in range(load.rounds)) == whole.sent(wave, 0)).all()
    at_home = load.rows(0, "home_wave").sum(1) + load.sent(1, 0).sum((1, 2))
    assert at_home.max() <= load.capacity
    stay_later = sum(load.rows(i, "home_wave").sum(1) for i in range(1, load.rounds))
    assert not (load.sent(1, 0).any((1, 2)) & (stay_later > 0)).any()
    assert stay_later.any()


@pytest.mark.parametrize(("skew", "balances"), [("zipf:0.05", False), ("zipf:1.0", True)])
def test_a_load_is_planned_by_the_rates_of_its_device(skew, balances):
    """By the rates of an H100 replicas of a nearly even load take longer than they save, so the program has none."""
    sizes, topology = LayerSizes(), Target.parse("h100:1x8").topology()
    counts = counts_of(skew, sizes, topology.num_ranks)
    found = LayerLoad.of(exact(2), sizes, topology, counts, skew)
    assert bool(found.replicas.any()) == balances
    assert LayerLoad.of(exact(2), sizes, replace(topology, device_kind=None), counts, skew).replicas.any()


FACTS = []


@dataclass(frozen=True)
class Recording(Balancer):
    """Balancer that records the sizes of its layer."""

    def sized(self, facts):
        FACTS.append(facts)
        return self

    def rebalance(self, counts, plan, topology, state):
        return plan, state


@pytest.mark.slow
def test_a_load_has_the_sizes_of_the_layer():
    sizes = LayerSizes(hidden=128, inner=64, experts=16, tokens=32, per_token=2)
    system = replace(exact(2, Buffers(1.3, max_rounds=3)), balancer=Recording())
    mesh, precision = make_mesh((8,), ("expert",)), Precision(None, jnp.bfloat16)
    layer = make_layer(mesh, system, (128, 16, 64), precision=precision)
    FACTS.clear()
    jax.eval_shape(layer, jax.ShapeDtypeStruct((8 * 32, 128), jnp.bfloat16))
    of_layer = FACTS[-1]
    LayerLoad.of(system, sizes, layer.topology, counts_of("uniform", sizes, 8))
    assert FACTS[-1] == of_layer

"""Operations that only move bytes in a rank's memory take time if its rate is known."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, feplb
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape, Step, simulate
from jax_moe_lb.sim.hbm import traffic_of
from jax_moe_lb.sim.memory import memory_of
from jax_moe_lb.sim.work import _arriving

MODEL = ModelShape(layers=2, hidden=64, inner=128, experts=8, per_token=2, tokens=256)
WIDE = replace(MODEL, hidden=128)
CLUSTER = Cluster((Links("gpu", 4, 1e9),))
SLOW = replace(CLUSTER, hbm_bytes_per_s=1e6)
SKEWED = np.repeat([[200, 120, 64, 64, 16, 16, 16, 16]], 4, 0).astype(np.int32)
COPIES, TOKENS = 256 * 2 * 128, 256 * 128


def simulated(system, cluster, model=MODEL):
    return simulate(system, model, cluster, SKEWED)


@pytest.mark.slow
@pytest.mark.parametrize("system", [systems.plain(), feplb(1)], ids=["plain", "feplb"])
def test_permutations_and_sums_take_the_time_of_their_bytes(system):
    """Every round gathers its copies, backward with their gradients; sums read them and write tokens."""
    found = simulated(system, SLOW)
    stages, rounds = found.stages, found.rounds
    expected = {"permutation": rounds * 2 * COPIES, "permutation (backward)": rounds * 4 * COPIES}
    expected["sums of copies"] = COPIES + TOKENS
    for name, num_bytes in expected.items():
        assert stages[name].busy_s == pytest.approx(2 * num_bytes / 1e6), name
    assert stages["sums of copies (backward)"].busy_s == pytest.approx(stages["sums of copies"].busy_s)


def test_weights_of_replicas_are_joined_where_kernels_take_one_array():
    """CPUs and TPUs do so; NVIDIA GPUs with narrow experts, as here, or in float32."""
    for cluster, model in ((SLOW, MODEL), (SLOW, replace(WIDE, itemsize=4)), (replace(SLOW, joins_weights=True), WIDE)):
        stages = simulated(systems.exact(1), cluster, model).stages
        for name in ("joined weights", "joined weights (backward)"):
            assert stages[name].busy_s == pytest.approx(2 * 2 * 3 * model.expert_bytes / 1e6)
        # In two phases, rows at home and moved rows have products of their own.
        for others in (systems.plain(), feplb(1)):
            assert "joined weights" not in simulated(others, cluster, model).stages
    assert "joined weights" not in simulated(systems.exact(1), SLOW, WIDE).stages


def test_gradients_of_replicas_and_of_overflow_rounds_are_added_in_memory():
    """Joined gradients are split even if no replica exists; each further round adds the gradients of all slots."""
    even, name = np.full_like(SKEWED, 64), "sums of replicas (backward)"
    for slots in (1, 2):
        copied, added = (simulate(systems.exact(slots), MODEL, SLOW, counts).stages[name] for counts in (even, SKEWED))
        # Two layers; two home experts, whose gradients are read and written, too.
        assert copied.busy_s == pytest.approx(2 * 2 * (2 + slots) * MODEL.expert_bytes / 1e6)
        assert added.busy_s > copied.busy_s
    assert name not in simulate(systems.exact(1), WIDE, SLOW, even).stages
    # Rank 0 sends one gradient; rank 1 gets three, the most, and has two copied slots.
    gradients = np.array([[0, 1, 0], [0, 0, 1], [0, 2, 0]])
    assert _arriving(gradients, 2, MODEL) == (2 * 2 + 1 + 3 + 3 * (3 + 2 * 2)) * MODEL.expert_bytes
    found = simulated(systems.plain(), SLOW)
    rounds, home_bytes = found.rounds, MODEL.experts // 4 * MODEL.expert_bytes
    assert rounds > 1
    assert found.stages["sums of rounds (backward)"].busy_s == pytest.approx(2 * (rounds - 1) * 8 * home_bytes / 1e6)
    assert "sums of rounds (backward)" not in simulate(systems.plain(), MODEL, SLOW, even).stages


def test_products_skip_empty_rows_of_a_buffer_and_activations_do_not():
    even = np.full_like(SKEWED, 64)
    buffers = (Buffers(headroom, max_rounds=1) for headroom in (1.05, 4.0))
    narrow, wide = (simulate(systems.plain(one), MODEL, SLOW, even).stages for one in buffers)
    rows = [Buffers(headroom).rows(512) for headroom in (1.05, 4.0)]
    row_bytes = 3 * MODEL.inner * MODEL.itemsize + MODEL.row_bytes
    more_s = wide["experts"].busy_s - narrow["experts"].busy_s
    assert more_s == pytest.approx(2 * (rows[1] - rows[0]) * row_bytes / 1e6)


def test_small_operations_take_their_time_in_every_round():
    found = simulated(systems.plain(), replace(CLUSTER, round_s=3e-3))
    both = [found.stages["small operations" + mark].busy_s for mark in ("", " (backward)")]
    assert both == pytest.approx([2 * found.rounds * 1e-3, 2 * found.rounds * 2e-3])


def test_without_a_rate_they_are_left_out():
    before, after = (simulated(systems.exact(1), one) for one in (CLUSTER, replace(CLUSTER, hbm_bytes_per_s=1e30)))
    assert before.step_s == pytest.approx(after.step_s)
    assert not {"permutation", "sums of copies", "joined weights"} & set(before.stages)


def test_the_traffic_of_a_layer_has_what_takes_time_and_more():
    """Compared with manual calculation, for a buffer of exactly the mean load and one round."""
    system = systems.plain(Buffers(headroom=1.0, max_rounds=1))
    hidden, kind = 256 * 2 * 256, 2 * 64 * 128 * 2
    found = asdict(traffic_of(system, MODEL, CLUSTER, backward=False))
    assert found == {
        "permutation": 2 * COPIES,
        "sums": COPIES + TOKENS,
        "joined": 0,
        "exchanges": 4 * COPIES,
        "products": 2 * COPIES + 3 * hidden + 3 * kind,
        "activations": 3 * hidden,
        "carried": 0,
        "arriving": 0,
    }
    both = traffic_of(system, MODEL, CLUSTER)
    assert both.permutation == 3 * found["permutation"]
    assert both.sums == 2 * found["sums"]
    assert both.total > 3 * sum(found.values())


def test_gradients_of_weights_in_parts_are_not_split():
    clusters = (replace(CLUSTER, joins_weights=joins) for joins in (True, False))
    joined, in_parts = (traffic_of(systems.exact(1), WIDE, cluster) for cluster in clusters)
    assert (joined.joined, in_parts.joined) == (2 * 2 * 3 * WIDE.expert_bytes, 0)
    assert joined.arriving - in_parts.arriving == (2 + 2 * 2) * WIDE.expert_bytes
    assert replace(joined, joined=0.0, arriving=in_parts.arriving) == in_parts


def test_no_rank_has_more_slots_than_experts():
    """A default system on one rank has no replicas; two experts on two ranks have one slot each."""
    alone, pair = Cluster((Links("gpu", 1, 1e9),), hbm_bytes_per_s=1e6), Cluster((Links("gpu", 2, 1e9),))
    counts = np.full((1, 8), 64, np.int32)
    assert not {"joined weights", "sums of replicas"} & set(simulate(systems.exact(), MODEL, alone, counts).stages)
    two = replace(MODEL, experts=2)
    for model, cluster, slots in ((MODEL, alone, 0), (two, pair, 1)):
        assert traffic_of(systems.exact(2), model, cluster) == traffic_of(systems.exact(slots), model, cluster)
        found = [memory_of(systems.exact(n), model, cluster, Migration(), Step()) for n in (2, slots)]
        assert found[0] == found[1]


def test_loops_carry_outputs_and_wide_sums():
    loop, once = (traffic_of(systems.exact(1, Buffers(max_rounds=n)), MODEL, CLUSTER) for n in (None, 1))
    assert replace(loop, carried=0.0) == once
    # Weights of two bytes, sums of four: read and written, the half that is wider, and rounded at the end.
    assert loop.carried == COPIES + (4 + 1 + 2 + 1) * 3 * MODEL.expert_bytes


def test_replicas_come_and_their_gradients_go_home():
    """One slot, two home experts: fetched twice, concatenated, sent, added to a wide sum, and split from the rest."""
    exact, plain = (traffic_of(system, MODEL, CLUSTER) for system in (systems.exact(1), systems.plain()))
    assert exact.exchanges - plain.exchanges == 2 * 2 * MODEL.expert_bytes
    assert exact.arriving == (2 + 2 + 7 + 2 * 2) * MODEL.expert_bytes
    assert (plain.arriving, traffic_of(systems.exact(1), MODEL, CLUSTER, backward=False).arriving) == (0, 0)

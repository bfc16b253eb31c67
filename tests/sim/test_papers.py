"""Statements of the papers' tables about domains and limits hold in the simulator, as run by the benchmarks."""

import numpy as np
import pytest

from benchmarks.papers import sim_feplb as feplb
from benchmarks.papers import sim_hybridep as hybridep
from benchmarks.papers import sim_ultraep
from benchmarks.papers import ultraep_rack as ultraep
from benchmarks.papers.hybridep_clusters import fitted
from jax_moe_lb.sim import simulate_uniform


@pytest.fixture(scope="module")
def setting():
    return fitted()


@pytest.mark.slow
def test_the_rate_fitted_to_tutels_rows_is_one_that_the_line_can_have(setting):
    assert 0.5 * 10e9 / 8 < setting.line_bytes_per_s <= 10e9 / 8


@pytest.mark.slow
def test_rows_of_table_v_that_nothing_was_fitted_to_are_predicted_within_15_percent(setting):
    tutel, predicted, _ = hybridep.table_v(setting)
    assert max(abs(row.deviation) for row in predicted.rows) < 15
    encoded, _, whole, *_ = hybridep.table_v_forms(setting).rows
    assert predicted.mean_deviation == pytest.approx(encoded.simulated)
    assert predicted.mean_deviation < tutel.mean_deviation < whole.simulated


@pytest.mark.slow
def test_whole_gradients_that_go_home_explain_table_vi_at_24_and_8_mb(setting):
    for name, (alone_s, both_s, sizes) in hybridep.ABLATION[24, 8].items():
        if name == "S":
            continue
        machine = setting.cluster(hybridep.DATACENTERS[name])
        shape = setting.model(24 * hybridep.MIB, 8 * hybridep.MIB, machine.num_ranks, hybridep.DATACENTERS[name])
        assert hybridep.table_vi_steps(shape, machine, sizes) == pytest.approx((alone_s, both_s), rel=0.1)


@pytest.mark.slow
def test_more_datacenters_gain_less_from_domains_of_a_fixed_size():
    for rate in hybridep.GBIT_PER_S:
        found = [hybridep.speedup(number, 50, rate, 768) for number in (100, 200, 500, 1000)]
        assert (np.diff(found) < 0).all()


@pytest.mark.slow
def test_no_speedup_is_above_what_the_share_of_tokens_that_cross_allows():
    for size in (50, 250, 500):
        share = (1000 - size) / 999
        assert all(1 <= hybridep.speedup(1000, size, rate, 768) <= 1 / share for rate in hybridep.GBIT_PER_S)


def test_traffic_between_datacenters_grows_with_tokens_in_plain_expert_parallelism_alone(setting):
    layers = [hybridep.layer_of(setting, "L", size, experts=hybridep.EXPERTS) for size in (6, 24, 96)]
    plain = np.array([hybridep.step(*one).level_bytes["dc"] for one in layers])
    chosen = [hybridep.migration(*one, hybridep.SR) for one in layers]
    hybrid = [hybridep.step(*one, its).level_bytes["dc"] for one, its in zip(layers, chosen, strict=True)]
    np.testing.assert_allclose(plain / plain[0], [1, 4, 16], rtol=1e-3)
    np.testing.assert_allclose(hybrid, hybrid[0])


def test_ultraeps_rates_give_the_sum_of_its_ideal_column():
    ideal = simulate_uniform(ultraep.QWEN3, ultraep.fitted(), step=ultraep.STEP)
    published_ms = sum(map(sum, ultraep.IDEAL.values()))
    assert 1e3 * ideal.step_s / ultraep.QWEN3.layers == pytest.approx(published_ms, rel=0.005)


@pytest.mark.thorough
def test_ultraep_gains_throughput_in_the_tables_of_its_paper():
    tables = {table.name: table for table in sim_ultraep.tables(32)}
    gains = tables["figure_11_gains"].rows
    assert len(gains) == 6
    assert all(row.simulated > 0 for row in gains)
    after = {row.name: row.simulated for row in tables["table_3"].rows}
    assert 1 <= after["Exact, imbalance"] <= after["UltraEP, imbalance"] < after["EPLB+, imbalance"]


@pytest.mark.slow
def test_rates_fitted_to_feplbs_times_before_balancing_are_ones_that_an_h100_can_have():
    best = feplb.fitted(10)[0]
    assert 0.4 * 989e12 < best.peak_flops_per_s < 989e12
    # Balance point of 3.35 TB/s and the datasheet's rate: 295.
    assert 150 < best.half_rows < 600
    assert best.rest_s > 0

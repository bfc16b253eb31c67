"""The simulator gives the times measured on an H100, from rates derived from its tables."""

import pytest
import yaml

from benchmarks.compiled.sim_gpu import rows_of
from benchmarks.gpu.measured_rates import measured, tables
from jax_moe_lb import exact
from jax_moe_lb.core import device_rates as rates
from jax_moe_lb.layer.facts import _round_s
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.work import layer_facts

WITHIN = 10.0
"""Largest deviation of a layer in percent."""


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["even", "1", "2", "4"])
@pytest.mark.parametrize("layer", ["qwen3", "mixtral"])
def test_layers_take_the_time_measured_on_an_h100(layer, skew):
    rows = list(rows_of(layer, (skew,)))
    assert {row[2] for row in rows} >= {"plain, in rounds", "exact", "exact, one round, own kernels"}
    assert max(abs(row[-1]) for row in rows) < WITHIN, rows


def test_a_replica_slot_costs_time_at_an_even_load():
    """The measured ratio is 1.20 for Mixtral-8x7B; without the cost of slots it is 1.00."""
    times = {row[2]: row[5] for row in rows_of("mixtral", ("even",))}
    assert 1.1 < times["exact, one round, own kernels"] / times["plain, in rounds"] < 1.2


@pytest.mark.parametrize("preset", ["mixtral_8x7b", "qwen3_30b", "deepseek_v3"])
def test_a_layer_prices_a_further_round_as_the_simulator(preset):
    model = load_config("model", preset, "model").model.build()
    cluster = load_config("cluster", "h100_node", "cluster").cluster.build()
    simulated = layer_facts(exact(2), model, cluster).round_s
    copies, parameters = model.tokens * model.per_token, model.expert_bytes // 2
    rows_bytes = copies * (model.hidden + model.inner) * model.itemsize
    slots = model.experts // cluster.num_ranks + 2
    priced = _round_s(slots * parameters, rows_bytes, None, rates.device_rates("h100", "cuda"))
    assert 0.8 < priced / simulated < 1.25
    assert _round_s(parameters, rows_bytes, None, None) is None


def test_the_file_of_the_device_has_the_measured_rates():
    found = rates.device_rates("h100", "cuda")
    for name, value in measured(tables()).items():
        assert getattr(found, name) == (pytest.approx(value, rel=2e-3)), name


def test_rates_of_other_devices_that_were_not_measured_say_so():
    files = rates._files()
    for name in ("nvidia", "a100", "b200", "gb200", "tpu"):
        of_tables = {key: figure for key, figure in files[name].items() if "gpu.md" in yaml.safe_dump(figure)}
        assert not of_tables, name
    assert {figure["basis"] for key, figure in files["h100"].items() if key in measured(tables())} == {"measured"}

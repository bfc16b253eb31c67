"""The simulator gives the times measured on an H100, from rates that are derived from its tables."""

import pytest
import yaml

from benchmarks.bench_sim_gpu import rows_of
from benchmarks.gpu.measured_rates import measured, tables
from jax_moe_lb.core import device_rates as rates

WITHIN = 10.0
"""Largest deviation of a layer in percent."""


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

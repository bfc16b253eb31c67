"""Errors of the validation table match manual calculation, and predictions for real networks use no fit."""

import numpy as np
import pytest

from benchmarks.validation import Check, assumptions_table, mean_off, ratios, table, worst_off
from benchmarks.validation_networks import rails


def test_errors_are_relative_to_what_was_measured():
    pairs = [(1.1, 1.0), (1.6, 2.0)]
    assert mean_off(pairs) == pytest.approx(15)
    assert worst_off(pairs) == pytest.approx(-20)
    # Predicted: twice as fast as a baseline of 2.2; measured: 3 times as fast as a baseline of 3.
    assert ratios([(1.1, 1.0)], [(2.2, 3.0)]) == [(2.0, 3.0)]


def test_a_line_has_the_speed_up_and_the_sensitivity_beside_the_time():
    under = {"slow": [(1.5, 1.0)], "fast": [(0.95, 1.0)]}
    check = Check("them", "seconds", "nothing", [(1.1, 1.0)], "plain", [(2.0, 4.0)], under)
    *words, spread, most = check.line
    assert words[:4] == ["them", "seconds", "nothing", 1]
    assert words[-3:] == ["plain", pytest.approx(50), pytest.approx(-50)]
    assert spread == pytest.approx([10, 5, 50])
    assert most == "slow"
    assert len(table([check]).rows) == 1
    assert [row[2] for row in assumptions_table([check]).rows] == ["as assumed", "slow", "fast"]


def test_links_of_the_simulator_take_as_long_as_flows_that_share_them():
    flows, links = rails()
    np.testing.assert_allclose(np.array(flows.values), np.array(links.values), rtol=2e-3)
    assert mean_off(links.values) < 2

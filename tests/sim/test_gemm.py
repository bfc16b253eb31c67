"""Times of grouped FFNs follow their weights or a measured curve."""

import numpy as np
import pytest

from jax_moe_lb.sim import AnalyticGemm, MeasuredGemm


def test_an_expert_of_few_rows_takes_as_long_as_its_weights():
    gemm = AnalyticGemm(1e12, 100.0, 1e-6)
    rows = np.array([[100, 0], [300, 0], [0, 0], [100, 100]])
    np.testing.assert_allclose(gemm.seconds(rows, 1e6), [200e-6 + 1e-6, 400e-6 + 1e-6, 0, 400e-6 + 1e-6])
    # At half_rows it runs at half the peak.
    assert gemm.seconds(rows[:1], 1e6)[0] - 1e-6 == pytest.approx(2 * 100 * 1e6 / 1e12)


def test_a_measured_curve_goes_through_its_points():
    gemm = MeasuredGemm((10.0, 100.0), (1e9, 4e9))
    rows = np.array([[10], [100], [55], [1000], [1]])
    seconds = gemm.seconds(rows, 1e3)
    np.testing.assert_allclose(seconds, [1e-5, 2.5e-5, 1.75e-5, 2.5e-4, 1e-5])
    assert gemm.peak_flops_per_s == 4e9

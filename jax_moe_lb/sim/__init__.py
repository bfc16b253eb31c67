"""Simulator: run a `System` and its `Plan` against a model of a cluster, without devices."""

from jax_moe_lb.sim import installed as installed
from jax_moe_lb.sim.cluster import AnalyticGemm, Cluster, Collective, Communication, Links, MeasuredGemm
from jax_moe_lb.sim.drift import Drift, fitted_drift
from jax_moe_lb.sim.loads import LoadShape, drifting_counts, skewed_counts
from jax_moe_lb.sim.measure import benchmark_seconds
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Parallel, Peers, Step
from jax_moe_lb.sim.run import Report, mean_report, replay, simulate, simulate_uniform
from jax_moe_lb.sim.stream_model import ExpertDomainChoice, Work, choose_expert_domains

__all__ = [
    "AnalyticGemm",
    "benchmark_seconds",
    "choose_expert_domains",
    "Cluster",
    "Collective",
    "Communication",
    "Drift",
    "drifting_counts",
    "ExpertDomainChoice",
    "fitted_drift",
    "Links",
    "LoadShape",
    "mean_report",
    "MeasuredGemm",
    "Migration",
    "ModelShape",
    "Parallel",
    "Peers",
    "replay",
    "Report",
    "simulate",
    "simulate_uniform",
    "skewed_counts",
    "Step",
    "Work",
]


def __dir__() -> list[str]:
    return __all__

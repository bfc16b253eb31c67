"""The simulator runs the same `System` and `Plan` with a clock instead of devices.

Use it to see what a system would do on a machine that you do not have; `docs/simulator.md` says what it counts.
"""

from jax_moe_lb.sim.cluster import Cluster as Cluster
from jax_moe_lb.sim.cluster import Links as Links
from jax_moe_lb.sim.communication import Collective as Collective
from jax_moe_lb.sim.communication import Communication as Communication
from jax_moe_lb.sim.drift import Drift as Drift
from jax_moe_lb.sim.drift import fitted_drift as fitted_drift
from jax_moe_lb.sim.gemm import AnalyticGemm as AnalyticGemm
from jax_moe_lb.sim.gemm import MeasuredGemm as MeasuredGemm
from jax_moe_lb.sim.loads import LoadShape as LoadShape
from jax_moe_lb.sim.loads import drifting_counts as drifting_counts
from jax_moe_lb.sim.loads import skewed_counts as skewed_counts
from jax_moe_lb.sim.model import ModelShape as ModelShape
from jax_moe_lb.sim.parallel import Parallel as Parallel
from jax_moe_lb.sim.parallel import Peers as Peers
from jax_moe_lb.sim.run import Report as Report
from jax_moe_lb.sim.run import mean_report as mean_report
from jax_moe_lb.sim.run import replay as replay
from jax_moe_lb.sim.run import simulate as simulate
from jax_moe_lb.sim.run import simulate_uniform as simulate_uniform
from jax_moe_lb.sim.schedule import Step as Step
from jax_moe_lb.sim.work import Migration as Migration

"""HybridEP's clusters and layers (arXiv 2510.19470) for the simulator, with the necessary assumptions."""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import least_squares

from jax_moe_lb.advise.advise import chosen_migration
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape, Report, Step, simulate_uniform
from jax_moe_lb.transport import Codec, CodecBase

MIB = 2**20
GPUS = 8
BLOCKS, HIDDEN, SEQUENCE = 12, 768, 256
EXPERTS, EXPERT_MB = 32, 18
"""Expert size of Table V in float32; a fiftieth of it is the paper's 0.36 MB."""

NO_CODEC, SR = Codec(), Codec(50.0, CodecBase.SHARED, gradient_ratio=1.0)
"""No compression, and that of the paper, which has no word on gradients."""

DATACENTERS = {"S": 1, "M": 2, "L": 4}
STEP = Step(recompute=False, exchange_counts=False)
"""PyTorch keeps the residuals; with even gates no counts are exchanged."""

TUTEL = {
    "M": {6: 2.52, 12: 4.26, 24: 5.82, 48: 7.62, 96: 12.65, 192: 20.35},
    "L": {6: 3.74, 12: 7.30, 24: 10.69, 48: 13.54, 96: 18.59, 192: 28.46},
}
"""Table V: seconds of a step, by MB of tokens."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions for values not given by the paper, the same for all rows.

    `K` in the token bytes `D = K T H` is the largest of Table III leaving 1024 tokens or more. Latency is 0, as the
    paper's clusters are in one room.
    """

    blocks_per_moe: int = 2
    flops_per_s: float = 0.8 * 19.5e12
    pcie_bytes_per_s: float = 0.8 * 16e9


@dataclass(frozen=True)
class Setting:
    """Assumptions and the two values fitted to the Tutel rows of Table V."""

    line_bytes_per_s: float
    reduced_bytes: float = 0.0
    assumed: Assumed = field(default_factory=Assumed)

    def cluster(self, datacenters: int) -> Cluster:
        """Return nodes of 8 GPUs, each representing a datacenter with one line."""
        inside = Links("gpu", GPUS, self.assumed.pcie_bytes_per_s)
        levels = (inside,) if datacenters == 1 else (Links("dc", datacenters, self.line_bytes_per_s), inside)
        flops = self.assumed.flops_per_s
        return Cluster(levels, AnalyticGemm(flops, 0.0, 0.0), flops)

    def other_s(self, datacenters: int) -> float:
        """Return the time of the all-reduce, inside datacenters and then between them, in seconds."""
        across = 2 * (datacenters - 1) / datacenters / self.line_bytes_per_s
        return self.reduced_bytes * (2 * (GPUS - 1) / GPUS / self.assumed.pcie_bytes_per_s + across)

    def model(self, token_bytes: float, expert_bytes: float, experts: int, datacenters: int) -> ModelShape:
        """Return the MoE layers."""
        copies = round(token_bytes / (4 * HIDDEN))
        per_token = max(k for k in (1, 2, 4) if k == 1 or copies // k >= 1024)
        tokens, blocks = copies // per_token, self.assumed.blocks_per_moe
        attention, dense = tokens * (8 * HIDDEN**2 + 2 * HIDDEN * SEQUENCE), tokens * 16 * HIDDEN**2
        sizes = BLOCKS // blocks, HIDDEN, round(expert_bytes / (8 * HIDDEN)), experts, per_token, tokens
        before_s = (blocks * attention + (blocks - 1) * dense) / self.assumed.flops_per_s
        outside = {"pre_expert_s": before_s, "other_s": self.other_s(datacenters)}
        return ModelShape(*sizes, itemsize=4, gated=False, **outside)


def layer_of(
    setting: Setting, name: str, token_mb: float, expert_mb: float = EXPERT_MB, experts: int | None = None
) -> tuple[ModelShape, Cluster]:
    """Return the MoE layers and the cluster of a row of a table; one expert per rank by default."""
    machine = setting.cluster(DATACENTERS[name])
    shape = setting.model(token_mb * MIB, expert_mb * MIB, experts or machine.num_ranks, DATACENTERS[name])
    return shape, machine


def step(shape: ModelShape, machine: Cluster, migration: Migration = Migration()) -> Report:
    """Simulate a step with even gates, as assumed in the paper."""
    return simulate_uniform(shape, machine, migration=migration, step=STEP)


def migration(shape: ModelShape, machine: Cluster, codec: Codec, sizes: tuple[int, ...] = ()) -> Migration:
    """Return the migration with the paper's accounting: no gradients of gathered experts on the links."""
    sizes = sizes or chosen_migration(shape, machine, codec, Step(backward=False)).domain_sizes
    return Migration(sizes, codec, gradients_home=False, mean_travels=False)


def in_library(migration: Migration) -> Migration:
    """Return a migration of the paper's codec in this library: gradients encoded as experts, and the mean first."""
    codec = replace(migration.codec, gradient_ratio=migration.codec.ratio)
    return Migration(migration.domain_sizes, codec)


def fitted(assumed: Assumed = Assumed(), relative: bool = True, names: str = "ML") -> Setting:
    """Fit the two values by least squares of relative deviations over the Tutel rows."""
    points = []
    for name in names:
        rows = TUTEL[name]
        unit, datacenters = Setting(1e9, 0.0, assumed), DATACENTERS[name]
        for size, published_s in rows.items():
            report = step(*layer_of(unit, name, size, experts=EXPERTS))
            # The line is slow enough to determine the exchange time alone.
            line_s = sum(report.stages[stage].busy_s for stage in report.stages if stage.startswith(("disp", "comb")))
            points.append((datacenters, report.step_s - line_s, line_s * 1e9, published_s))

    def deviations(parameters: np.ndarray) -> np.ndarray:
        setting = Setting(1e9 * parameters[0], 1e9 * parameters[1], assumed)
        times = [rest + line / setting.line_bytes_per_s + setting.other_s(n) for n, rest, line, _ in points]
        published = np.array([published for *_, published in points])
        return (times - published) / (published if relative else 1.0)

    rate, reduced = least_squares(deviations, [1.0, 1.0], bounds=(1e-3, 100.0)).x.tolist()
    return Setting(1e9 * rate, 1e9 * reduced, assumed)

"""UltraEP's rack and models (arXiv 2606.04101) for the simulator, and the numbers of its figures.

Three rates are fitted, only to the column "Ideal" of figure 13: of products, of token links and of all work before the
experts. Other values are not given by the paper and assumed for all rows: 8192 tokens per rank in one sequence, as in
the released recipe for Qwen3; hidden and inner sizes of the public model cards; routing sampled by the generator of the
authors' tests (`popular_ranks.py`), fitted to the published imbalance before balancing.
"""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.plans.popular_ranks import PER_TOK, TOKENS_PER_RANK, Case, counts
from jax_moe_lb import Buffers, System
from jax_moe_lb.balancers import EPLBPlus, Exact
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.layer import systems
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.sim import AnalyticGemm, Cluster, Collective, Communication, Links, ModelShape, Step
from jax_moe_lb.transport import Direct, Gather, Relay

IDEAL = {"MoE": (1.89, 4.32), "a2a": (1.68, 1.62), "others": (2.83, 4.49)}
MEASURED = {
    "Megatron": {"MoE": (5.95, 10.41), "a2a": (6.94, 4.75), "others": (2.88, 4.52)},
    "UltraEP": {"MoE": (2.11, 4.43), "a2a": (2.24, 1.79), "others": (3.16, 4.58)},
}
"""Figure 13: ms of a layer of Qwen3, forward and backward."""

RANKS, DOMAIN = 64, 8
HALF_ROWS = 310.0
"""Rows at which a GPU of this class is equally bound by memory and by products; negligible for experts of 32768
rows.
"""

WEIGHTS_BYTES_PER_S = 710e9
"""Rate of one rank, from the times for copies from home in the authors' README."""

PLANNER_S = 94e-6
"""Time to plan and to build tasks in their trace, for all planners; `Exact` takes 52 us for 64 x 256, on a CPU."""

LATENCY_S = 3e-6
TOLD_DIRECTLY = Communication(Collective.DIRECT)
"""UltraEP's counts are sent with DeepEP's kernels to all ranks at once; XLA would use a ring."""

STEP = Step(recompute=False)
ROOM = float(RANKS)
"""Headroom large enough that no receive buffer overflows."""

SYSTEMS = {
    "plain": systems.plain(Buffers(ROOM)),
    "EPLB+": System(EPLBPlus(), Relay(), Direct(Buffers(ROOM)), 2),
    "UltraEP": systems.ultraep(2, Buffers(ROOM)),
    "Exact": System(Exact(), Gather(), Direct(Buffers(ROOM)), 2),
    "Exact, relays": System(Exact(), Relay(), Direct(Buffers(ROOM)), 2),
}


@dataclass(frozen=True)
class Training:
    shape: ModelShape
    ideal: float
    throughput: tuple[float, float, float]
    imbalance: tuple[float, float, float]

    @property
    def case(self) -> Case:
        return Case(self.shape.experts, RANKS, 2, self.imbalance[0])

    def loads(self, tokens: int) -> np.ndarray:
        """Return counts `[2, R, E]` of two samples."""
        return np.stack([drawn(self.case, seed, tokens) for seed in range(2)])


def layer(hidden: int, inner: int, experts: int, layers: int = 2) -> ModelShape:
    """Return equal layers in bfloat16 with float32 gradients."""
    return ModelShape(layers, hidden, inner, experts, PER_TOK, TOKENS_PER_RANK, sequence=TOKENS_PER_RANK)


QWEN3 = layer(4096, 1536, 128)
FIGURE_11 = {
    "GLM4.5": Training(layer(4096, 1408, 128), 785.4, (545, 695, 757), (2.23, 1.10, 1.02)),
    "Qwen3": Training(QWEN3, 574.7, (315, 474, 524), (2.86, 1.17, 1.03)),
    "DSV3": Training(layer(7168, 2048, 256), 637.6, (509, 553, 613), (1.30, 1.18, 1.01)),
}
FIGURE_12 = {
    "Qwen3, STEM": (Case(128, 64, 2, 3.68), 1.11, 1.04),
    "Qwen3, Mixed": (Case(128, 64, 2, 4.01), 1.11, 1.03),
    "GLM4.7, STEM": (Case(160, 40, 4, 3.09), 1.08, 1.01),
    "GLM4.7, Mixed": (Case(160, 40, 4, 2.06), 1.06, 1.01),
}
"""Imbalance of EPLB+ and UltraEP."""

TABLE_3 = {"EPLB+": (1.19, 107, 8.5), "UltraEP": (1.03, 45, 6.8)}
FIGURE_15 = {("EPLB+", 6.0): 1.40, ("EPLB+", 8.0): 1.40, ("UltraEP", 6.0): 1.07, ("UltraEP", 8.0): 1.09}
FIGURE_16 = {1.5: (0.22, 0.24), 2.0: (0.27, 0.28), 4.0: (0.37, 0.29), 6.0: (0.47, 0.28), 8.0: (0.52, 0.28)}
"""ms to distribute weights, by imbalance before balancing: from home alone, and with relays."""


def fitted() -> Cluster:
    """Return a rack whose rates give the sums of the ideal column: products, exchanges, the rest."""
    sums = {name: 1e-3 * sum(times) for name, times in IDEAL.items()}
    copies = QWEN3.tokens * QWEN3.per_token
    padded = copies + HALF_ROWS * QWEN3.experts / RANKS
    peak = 3 * padded * QWEN3.row_flops / sums["MoE"]
    sent = copies * QWEN3.row_bytes * (RANKS - 1) / RANKS
    rate = 4 * sent / (sums["a2a"] - 4 * LATENCY_S)
    once = Cluster((Links("gpu", RANKS, 1.0),), flops_per_s=1.0)
    flops = 3 * QWEN3.before_experts_s(once) / sums["others"]
    links = (Links("gpu", RANKS, rate, latency_s=LATENCY_S),)
    gemm = AnalyticGemm(peak, HALF_ROWS, 0.0)
    return Cluster(links, gemm, flops, planner_s=PLANNER_S, communication=TOLD_DIRECTLY)


def in_domains(cluster: Cluster) -> Cluster:
    """Return the same links with weights moving only inside 8 domains of 8."""
    (links,) = cluster.levels
    inside = replace(links, size=DOMAIN)
    levels = (replace(links, name="node", size=RANKS // DOMAIN, links=DOMAIN), inside)
    return replace(cluster, levels=levels)


def drawn(case: Case, seed: int, tokens: int) -> np.ndarray:
    """Return sampled counts `[R, E]`, scaled to 8192 tokens per rank."""
    return counts(case, seed, tokens) * (TOKENS_PER_RANK // tokens)


def planned(system: System, cluster: Cluster, loads: np.ndarray) -> Plan:
    return plan_on_host(system, loads, cluster.topology()).plan

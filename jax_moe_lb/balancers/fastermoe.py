"""FasterMoE (PPoPP 2022): copies of hot experts on every rank, if a time model predicts a gain."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import min_saved, slowest_bytes_per_s
from jax_moe_lb.core.checks import Positive, checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.fastermoe import fastermoe

GLM5_WIDTH, GLM5_NUMBERS = 6144, 3 * 6144 * 2048
"""Model width of GLM-5, and number of parameters of one of the experts."""

NVLINK_BYTES_PER_S, H100_FLOPS_PER_S = 360e9, 500e12


@dataclass(frozen=True)
@checked_fields
class FasterMoE(Balancer):
    """FasterMoE: replicas of hot experts on every rank of the domain, each serving its own tokens.

    Use it as FEPLB's baseline, or if few experts are hot on all ranks and dispatch is slow: tokens of a replicated
    expert stay on the rank. In a layer it takes the sizes of the experts and the rates of the topology.

    It copies the busiest expert of the busiest rank as long as this saves time. In the model of FasterMoE, a step takes
    the time of the rank with the highest load. Its tokens take three grouped FFNs (one forward, two backward) and four
    exchanges (dispatch and combine, forward and backward). A copy adds the time to send the weights and to return the
    gradients, independent of the number of ranks. It is made if the tokens saved on the busiest rank are worth more
    than this time.

    The paper describes one expert per rank, so the busiest expert is on the busiest rank. Its code sorts experts and
    stops at the first without gain. This class generalizes the rule to several experts per rank. Times are those of the
    microbatch itself, without prediction.

    Only experts served at home are copied; replicas of another balancer (`Chain`) are kept. A copy needs an empty slot
    on every other rank of the domain. Tokens from other domains are served at home.

    Unset sizes are those of the layer. Outside a layer they are those of GLM-5: experts of 6144 x 2048 in bfloat16 with
    float32 gradients. Unset rates are those of the topology. If it has none, rates of H100 are assumed: 500 TFLOP/s in
    the grouped FFN, and four fifths of NVLink's one-way 450 GB/s.

    Args:
        expert_bytes: bytes of the weights of one expert; `None` (default) as above, also for all others.
        gradient_bytes: bytes of the gradients of one expert.
        token_bytes: bytes of one transferred token copy: the model width times the bytes of a number.
        token_flops: forward floating-point operations per token copy in the expert, twice the parameters of the expert.
        bytes_per_s: one-way rate of a rank, in bytes per second.
        flops_per_s: floating-point operations per second of a rank in the grouped FFN, usually well below its peak.

    Raises:
        ValueError: a value is not positive and finite.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import FasterMoE
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.tile(np.array([4000, 800, 700, 500], np.int32), (4, 1))
        >>> topology = Topology.flat(num_ranks=4)
        >>> FasterMoE().min_saved(topology, 4)  # token copies that one replica must save in a domain of 4
        1068
        >>> plan, _ = FasterMoE().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 16000, 3200, 2800 and 2000
        [4000 7200 6800 6000]
    """

    expert_bytes: Positive | None = None
    gradient_bytes: Positive | None = None
    token_bytes: Positive | None = None
    token_flops: Positive | None = None
    bytes_per_s: Positive | None = None
    flops_per_s: Positive | None = None

    def sized(self, facts: LayerCost) -> "FasterMoE":
        """Return the balancer with unset sizes taken from the layer."""
        return replace(
            self,
            expert_bytes=_first(self.expert_bytes, facts.expert_bytes),
            gradient_bytes=_first(self.gradient_bytes, facts.gradient_bytes),
            token_bytes=_first(self.token_bytes, facts.token_bytes),
            token_flops=_first(self.token_flops, facts.token_flops),
        )

    def copy_s(self, topology: Topology, domain: int) -> float:
        """Return the seconds per copy, for sending its weights and returning its gradients.

        Args:
            topology: topology with the default rates.
            domain: ranks per domain.
        """
        weights = 2 * GLM5_NUMBERS if self.expert_bytes is None else self.expert_bytes
        gradients = 4 * GLM5_NUMBERS if self.gradient_bytes is None else self.gradient_bytes
        return (weights + gradients) / self._bytes_per_s(topology, domain)

    def token_s(self, topology: Topology, domain: int) -> float:
        """Return the seconds per token copy on the serving rank, forward and backward; see `copy_s`."""
        flops = 2 * GLM5_NUMBERS if self.token_flops is None else self.token_flops
        nbytes = 2 * GLM5_WIDTH if self.token_bytes is None else self.token_bytes
        flops_per_s = _first(self.flops_per_s, topology.flops_per_s) or H100_FLOPS_PER_S
        return 3 * flops / flops_per_s + 4 * nbytes / self._bytes_per_s(topology, domain)

    def min_saved(self, topology: Topology, domain: int) -> int:
        """Return the minimum number of token copies worth more than a copy, within int32; see `copy_s`."""
        return min_saved(self.copy_s(topology, domain), self.token_s(topology, domain))

    def _bytes_per_s(self, topology: Topology, domain: int) -> float:
        if self.bytes_per_s is not None:
            return self.bytes_per_s
        known = all(level.bytes_per_s is not None for level in topology.levels)
        return slowest_bytes_per_s(topology, domain) if known else NVLINK_BYTES_PER_S

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately; see `Balancer.rebalance`."""
        least = self.min_saved(topology, plan.domain)
        placement, quota = fastermoe(plan.placement, plan.quota, counts, plan.domain, least)
        return replace(plan, placement=placement, quota=quota), state


def _first(given: float | None, derived: float | int | None) -> float | None:
    value = derived if given is None else given
    return None if value is None else float(value)

"""FasterMoE (PPoPP 2022): hot experts are copied to every rank, where a model of time says that it pays."""

import math
from dataclasses import dataclass, fields, replace

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import min_saved, slowest_bytes_per_s
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.fastermoe import fastermoe

GLM5_WIDTH, GLM5_NUMBERS = 6144, 3 * 6144 * 2048
"""The model width of GLM-5, and the parameters of one of its experts."""

NVLINK_BYTES_PER_S, H100_FLOPS_PER_S = 360e9, 500e12


@dataclass(frozen=True)
class FasterMoE(Balancer):
    """Shadows hot experts: every rank of the domain gets a replica and serves its own tokens of it.

    Use it as FEPLB's baseline, or where few experts are hot on all ranks alike and dispatch is dear, since tokens of a
    copied expert do not travel. In a layer it takes the sizes of its experts, and the rates of its topology.

    As long as it pays, the busiest expert of the busiest rank is copied. A step takes the time of the rank with the
    highest load, in the model of FasterMoE: three grouped FFNs (one forward, two backward) and four exchanges of its
    tokens (there and back, forward and backward). A copy adds the time in which weights go out and gradients come back,
    once, however many ranks there are. It pays if the highest load falls by more tokens than that time is worth.

    FasterMoE describes one expert on each rank, of which the busiest is on the busiest rank; its code sorts experts,
    and stops at the first that does not pay. This is the same rule for ranks of several experts. Times are those of the
    microbatch itself: nothing is predicted.

    Only experts that their home serves alone are copied; replicas of another balancer (`Chain`) stay as they are. A
    copy needs an empty slot on every other rank of the domain. Tokens of other domains are served at home.

    Sizes that are left out are those of the layer, and off any layer GLM-5's: experts of 6144 x 2048 in bfloat16 with
    float32 gradients. Rates that are left out are those of the topology, and where it has none H100's: 500 TFLOP/s in
    the grouped FFN, and four fifths of NVLink's 450 GB/s in one direction. Both are assumptions.

    Args:
        expert_bytes: the weights of one expert, in bytes; `None`, the usual choice, see above, as in what follows.
        gradient_bytes: the gradients of one expert, in bytes.
        token_bytes: one token copy as it travels, in bytes: the model width times the size of a number.
        token_flops: what one token copy costs in its expert forward, in floating-point operations: twice the expert's
            parameters.
        bytes_per_s: what a rank sends, in bytes per second.
        flops_per_s: what a rank computes in the grouped FFN, in floating-point operations per second; well below its
            peak.

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

    expert_bytes: float | None = None
    gradient_bytes: float | None = None
    token_bytes: float | None = None
    token_flops: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}; expected a finite number above 0")

    def sized(self, facts: LayerCost) -> "FasterMoE":
        """Returns it with the sizes of a layer, where none were given."""
        return replace(
            self,
            expert_bytes=_first(self.expert_bytes, facts.expert_bytes),
            gradient_bytes=_first(self.gradient_bytes, facts.gradient_bytes),
            token_bytes=_first(self.token_bytes, facts.token_bytes),
            token_flops=_first(self.token_flops, facts.token_flops),
        )

    def copy_s(self, topology: Topology, domain: int) -> float:
        """Returns the seconds that a copy costs: its weights go out, and its gradients come back.

        Args:
            topology: its rates count where none were given.
            domain: how many ranks a domain has.
        """
        weights = 2 * GLM5_NUMBERS if self.expert_bytes is None else self.expert_bytes
        gradients = 4 * GLM5_NUMBERS if self.gradient_bytes is None else self.gradient_bytes
        return (weights + gradients) / self._bytes_per_s(topology, domain)

    def token_s(self, topology: Topology, domain: int) -> float:
        """Returns the seconds that a token copy costs the rank that serves it, forward and backward; see `copy_s`."""
        flops = 2 * GLM5_NUMBERS if self.token_flops is None else self.token_flops
        nbytes = 2 * GLM5_WIDTH if self.token_bytes is None else self.token_bytes
        flops_per_s = _first(self.flops_per_s, topology.flops_per_s) or H100_FLOPS_PER_S
        return 3 * flops / flops_per_s + 4 * nbytes / self._bytes_per_s(topology, domain)

    def min_saved(self, topology: Topology, domain: int) -> int:
        """Returns the fewest token copies that are worth more than a copy, as a number of int32; see `copy_s`."""
        return min_saved(self.copy_s(topology, domain), self.token_s(topology, domain))

    def _bytes_per_s(self, topology: Topology, domain: int) -> float:
        if self.bytes_per_s is not None:
            return self.bytes_per_s
        known = all(level.bytes_per_s is not None for level in topology.levels)
        return slowest_bytes_per_s(topology, domain) if known else NVLINK_BYTES_PER_S

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        least = self.min_saved(topology, plan.domain)
        placement, quota = fastermoe(plan.placement, plan.quota, counts, plan.domain, least)
        return replace(plan, placement=placement, quota=quota), state


def _first(given: float | None, derived: float | int | None) -> float | None:
    value = derived if given is None else given
    return None if value is None else float(value)

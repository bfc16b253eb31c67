"""FasterMoE (PPoPP 2022): hot experts are copied to every rank, where a model of time says that it pays."""

import math
from dataclasses import dataclass, fields, replace

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.balancers.cost import min_saved
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.fastermoe import fastermoe
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class FasterMoE(Balancer):
    """Shadows hot experts: every rank of the domain gets a replica and serves its own tokens of it.

    Use it as FEPLB's baseline, or where few experts are hot on all ranks alike and dispatch is dear, since tokens of a
    copied expert do not travel. Give it the sizes and rates of your own experts and machine.

    As long as it pays, the busiest expert of the busiest rank is copied. A step takes the time of the rank with the
    highest load, in the model of FasterMoE: three grouped FFNs (one forward, two backward) and four exchanges of its
    tokens (there and back, forward and backward). A copy adds the time in which weights go out and gradients come back,
    once, however many ranks there are. It pays if the highest load falls by more tokens than that time is worth.

    FasterMoE describes one expert on each rank, of which the busiest is on the busiest rank; its code sorts experts,
    and stops at the first that does not pay. This is the same rule for ranks of several experts. Times are those of the
    microbatch itself: nothing is predicted.

    Only experts that their home serves alone are copied; replicas of another balancer (`Chain`) stay as they are. A
    copy needs an empty slot on every other rank of the domain. Tokens of other domains are served at home.

    The defaults are GLM-5's experts (6144 x 2048) in bfloat16 with float32 gradients on H100: 500 TFLOP/s in the
    grouped FFN, and four fifths of NVLink's 450 GB/s in one direction. Both rates are assumptions.

    Args:
        expert_bytes: the weights of one expert, in bytes; 72 MiB for GLM-5's in bfloat16.
        gradient_bytes: the gradients of one expert, in bytes; twice that in float32.
        token_bytes: one token copy as it travels, in bytes: the model width times the size of a number.
        token_flops: what one token copy costs in its expert forward, in floating-point operations: twice the expert's
            parameters.
        bytes_per_s: what a rank sends, in bytes per second.
        flops_per_s: what a rank computes in the grouped FFN, in floating-point operations per second; well below its
            peak.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import FasterMoE, Topology, load, plain_plan
        >>> counts = np.tile(np.array([4000, 800, 700, 500], np.int32), (4, 1))
        >>> topology = Topology.flat(num_ranks=4)
        >>> FasterMoE().min_saved  # token copies that one replica must save
        1068
        >>> plan, _ = FasterMoE().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 16000, 3200, 2800 and 2000
        [4000 7200 6800 6000]
    """

    expert_bytes: float = 3 * 6144 * 2048 * 2
    gradient_bytes: float = 3 * 6144 * 2048 * 4
    token_bytes: float = 6144 * 2
    token_flops: float = 2 * 3 * 6144 * 2048
    bytes_per_s: float = 360e9
    flops_per_s: float = 500e12

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}; expected a finite number above 0")

    @property
    def copy_s(self) -> float:
        """Seconds that a copy costs: its weights go out, and its gradients come back."""
        return (self.expert_bytes + self.gradient_bytes) / self.bytes_per_s

    @property
    def token_s(self) -> float:
        """Seconds that a token copy costs the rank that serves it, forward and backward."""
        return 3 * self.token_flops / self.flops_per_s + 4 * self.token_bytes / self.bytes_per_s

    @property
    def min_saved(self) -> int:
        """The fewest token copies that are worth more than a copy, as a number of int32."""
        return min_saved(self.copy_s, self.token_s)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        del topology
        placement, quota = fastermoe(plan.placement, plan.quota, counts, plan.domain, self.min_saved)
        return replace(plan, placement=placement, quota=quota), state

"""Sizes of a layer, and rates of its device, from which a balancer derives the time of plans."""

from jax import ShapeDtypeStruct

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.device_rates import GpuRates, TpuRates, device_named, device_rates
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Tokens
from jax_moe_lb.layer.systems import System
from jax_moe_lb.transport.exchange import RoutingWeights

SLOT_COPIES = 256
"""Token copies whose products take as long as reading an expert's weights in bfloat16: the ratio of operations to bytes
of memory, about 180 to 300 on GPUs and TPUs."""


SUM_BYTES = 16
"""Bytes read and written per parameter of a slot to add the gradients of a round to float32 sums."""

ROW_ACCESSES = 9
"""Reads and writes of rows of both widths by a round: permutations, and operations on empty rows between products."""


def _round_s(
    num_parameters: int, rows_bytes: int, flops_per_s: float | None, rates: GpuRates | TpuRates | None
) -> float | None:
    """Return the seconds of a further round in training, beyond its products; None without a rate."""
    # `num_parameters` counts all slots, and `rows_bytes` all copies, in the model's and the inner width.
    # Products of `SLOT_COPIES` copies take as long as reading the weights.
    if isinstance(rates, GpuRates):
        flops_per_s = flops_per_s or rates.experts_speed
    if flops_per_s is None:
        return None
    moved_s = (SUM_BYTES * num_parameters + ROW_ACCESSES * rows_bytes) * SLOT_COPIES / flops_per_s
    return moved_s + (rates.small_operations if isinstance(rates, GpuRates) else 0.0)


def layer_facts(
    x: Tokens | ShapeDtypeStruct,
    weights: RoutingWeights | ShapeDtypeStruct,
    experts: Experts,
    slots: int,
    system: System,
    topology: Topology,
) -> LayerCost:
    """Return the sizes and rates by which a balancer weighs plans: static values, of shapes and dtypes."""
    buffers = system.dispatch.buffers
    expert_bytes, (num_tokens, hidden) = experts.nbytes // experts.up.shape[0], x.shape
    num_parameters, itemsize = expert_bytes // experts.up.dtype.itemsize, x.dtype.itemsize
    # Plans on CPUs and TPUs are not weighed: their rates have not been measured.
    kind = topology.device_kind if topology.platform == "cuda" else None
    device = None if kind is None else device_named(kind)
    rates = None if device is None else device_rates(device, "cuda")
    rows_bytes = weights.size * (hidden + experts.up.shape[-1]) * itemsize
    # The layer does not see the attention before the next one, so assume its four projections alone.
    between_flops = 8.0 * num_tokens * hidden**2
    return LayerCost(
        num_copies=weights.size,
        expert_bytes=expert_bytes,
        gradient_bytes=experts.trained.nbytes // experts.up.shape[0],
        token_bytes=hidden * itemsize,
        token_flops=2 * num_parameters,
        between_s=None if topology.flops_per_s is None else between_flops / topology.flops_per_s,
        slot_copies=SLOT_COPIES,
        max_rows=None if buffers.max_rounds is None else buffers.max_rounds * buffers.rows(weights.size),
        round_rows=buffers.rows(weights.size),
        round_s=_round_s(slots * num_parameters, rows_bytes, topology.flops_per_s, rates),
        relays=system.replicate.relay_options,
        device=device,
    )

"""What a layer tells its balancer about itself, so that costs need not be typed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFacts:
    """These are facts of a layer, from which a balancer derives what the user left to it.

    `moe` makes one from its arguments and gives it to `Balancer.sized`; do so yourself where you plan for a layer that
    is not there. `None` stands for what is not known.

    Args:
        num_copies: `T * K`, the token copies of a rank.
        expert_bytes: the weights of one expert as they travel, in bytes.
        gradient_bytes: its gradients, in bytes.
        token_bytes: one token copy as it travels, in bytes.
        token_flops: what one token copy costs in its expert forward, in floating-point operations: twice the expert's
            parameters.

    Examples:
        >>> from jax_moe_lb import LayerFacts, UltraEP
        >>> UltraEP().sized(LayerFacts(num_copies=8192 * 8)).min_tokens
        1024
    """

    num_copies: int
    expert_bytes: int | None = None
    gradient_bytes: int | None = None
    token_bytes: int | None = None
    token_flops: int | None = None

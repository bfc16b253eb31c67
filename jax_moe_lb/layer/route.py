"""Routing of one rank: properties of the tokens, logits, and the experts per token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Tokens, as_int32, iota, wide_dtype
from jax_moe_lb.layer.arguments import check_routing
from jax_moe_lb.routing.logits import router_logits
from jax_moe_lb.routing.routers import (
    NO_EXPERT,
    ROUTING_NAME,
    Logits,
    RouterFunction,
    Routing,
    TokenInfo,
    mask_tokens,
)


def rank_tokens(tokens: TokenInfo, num_tokens: int, topology: Topology) -> TokenInfo:
    """Return the properties of this rank's tokens for the router."""
    key, position = tokens.key, tokens.position
    rank = jax.lax.axis_index(topology.data_axes + topology.expert_axes)
    if key is not None:
        # Fold in the rank index so that each rank samples different noise.
        key = jax.random.fold_in(key, rank)
    if position is None:
        position = rank * num_tokens + iota(num_tokens)
    return replace(tokens, key=key, position=as_int32(position))


@jax.named_scope("route")
def route(
    x: Tokens,
    kernel: Float[Array, "H E"],
    router: RouterFunction,
    info: TokenInfo,
    bias: Float[Array, "E"] | None = None,
    logit_bias: Float[Array, "E"] | None = None,
) -> Routing:
    """Compute the experts and weights of this rank's tokens, with logits in float32 or float64."""
    if info.mask is not None:
        # Padding may contain NaN, and NaN times a zero logit gradient is NaN in the gradient of the kernel.
        x = jnp.where(info.mask[:, None], x, 0)
    logits = router_logits(x, kernel)
    if logit_bias is not None:
        logits += logit_bias.astype(logits.dtype)[None]
    routing = router(logits, bias, info)
    check_routing(routing, logits)
    # Sums over copies and tokens have these dtypes, so none may be narrower than the logits.
    floats = {name: getattr(routing, name) for name in ("weights", "logits", "scores")}
    floats = {name: value.astype(np.promote_types(wide_dtype(value), logits.dtype)) for name, value in floats.items()}
    routing = replace(routing, experts=as_int32(routing.experts), **floats)
    if info.weights is not None and info.experts is None:
        raise ValueError("tokens.experts is None; expected an array with tokens.weights")
    if info.experts is not None:
        routing = with_given(router, routing, logits, as_int32(info.experts), info.weights)
    # A router may return constants, which vary over no mesh axis.
    routing = vary_like(routing, logits)
    routing = routing if info.mask is None else mask_tokens(routing, info.mask)
    return checkpoint_name(routing, ROUTING_NAME)


def with_given(
    router: RouterFunction,
    routing: Routing,
    logits: Logits,
    given: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
) -> Routing:
    """Return the routing with the given experts, if a token has some."""
    for name, value in (("experts", given), ("weights", weights)):
        if value is not None and value.shape[1] != routing.experts.shape[1]:
            raise ValueError(f"{name} has K = {value.shape[1]}; expected {routing.experts.shape[1]}, as the router")
    is_given = jnp.any(given != NO_EXPERT, 1, keepdims=True)
    experts = jnp.where(is_given, given, routing.experts)
    is_copy = experts != NO_EXPERT
    if weights is not None:
        weights = jnp.where(is_given, weights.astype(routing.weights.dtype), routing.weights)
        return replace(routing, experts=experts, weights=jnp.where(is_copy, weights, 0))
    if not hasattr(router, "with_experts"):
        raise TypeError(f"weights is None; expected an array, as {router} has no method with_experts")
    # Padding may have no expert at all, and a sum of weights over none is NaN.
    counted = is_copy | ~is_copy.any(1, keepdims=True)
    live = router.with_experts(logits, jnp.where(is_copy, experts, 0), counted)
    # An expert out of range keeps its number, for the fault.
    return replace(live, experts=experts, weights=jnp.where(is_copy, live.weights, 0))

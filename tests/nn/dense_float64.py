"""A dense float64 form of `MoE`: every expert on every token, rank by rank for routers that read positions or keys."""

import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from jax_moe_lb import TokenInfo
from jax_moe_lb.kernels import ClampedSwiGLU, geglu, gelu_exact, relu_squared, swiglu
from jax_moe_lb.nn import SharedMix
from jax_moe_lb.routing.more_routers import capacity, within_capacity
from jax_moe_lb.routing.routers import router_options


def silu(z):
    return z / (1 + jnp.exp(-z))


def gelu_tanh(z):
    return 0.5 * z * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (z + 0.044715 * z**3)))


FORMULAS = {
    None: lambda gate, up: silu(gate) * up,
    swiglu: lambda gate, up: silu(gate) * up,
    geglu: lambda gate, up: gelu_tanh(gate) * up,
    gelu_exact: lambda up: 0.5 * up * (1 + erf(up / jnp.sqrt(2))),
    relu_squared: lambda up: jnp.where(up > 0, up, 0) ** 2,
    ClampedSwiGLU(): lambda gate, up: (
        (jnp.clip(up, -7, 7) + 1) * jnp.minimum(gate, 7) / (1 + jnp.exp(-1.702 * jnp.minimum(gate, 7)))
    ),
}
"""Formula of each activation; others are their own."""


def ffn(layer, rows, up, down, gate):
    activation = layer.expert_config.activation
    formula = FORMULAS.get(activation, activation)
    return formula(*([] if gate is None else [rows @ gate]), rows @ up) @ down


def dense(layer, x, mask=None, token_ids=None, key=None):
    """Return the outputs of tokens `[T, H]`, which may be NaN where the mask is False."""
    num_ranks = layer.topology.num_ranks
    x = x if mask is None else jnp.where(mask[:, None], x, 0)

    def part(array, rank):
        return None if array is None else jnp.split(array, num_ranks)[rank]

    def one_rank(rank):
        info = TokenInfo(
            part(mask, rank), part(token_ids, rank), None if key is None else jax.random.fold_in(key, rank)
        )
        return routed(layer, part(x, rank), info, rank)

    y = with_shared(layer, x, jnp.concatenate([one_rank(rank) for rank in range(num_ranks)]))
    return y if mask is None else jnp.where(mask[:, None], y, 0)


def routed(layer, x, info, rank):
    options, (num_tokens, num_experts) = router_options(layer.router), (x.shape[0], layer.kernel.shape[1])
    logits = x @ layer.kernel[...] + (layer.kernel_bias[...][None] if options.logit_bias else 0)
    position = rank * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    info = TokenInfo(info.mask, info.ids, info.key, position=position)
    routing = layer.router(logits, layer.bias[...] if options.selection_bias else None, info)
    experts = routing.experts if info.mask is None else jnp.where(info.mask[:, None], routing.experts, -1)
    if options.capacity_factor is not None:
        size = capacity(options.capacity_factor, experts.size, num_experts)
        experts = within_capacity(experts, num_experts, size)
    weights = jnp.where(experts >= 0, routing.weights, 0)
    # `[T, E]`, the weight of each expert; a token has an expert at most once.
    by_expert = (weights[:, :, None] * jax.nn.one_hot(experts, num_experts, dtype=x.dtype)).sum(1)
    up, down, gate = (None if w is None else w[...] for w in (layer.up, layer.down, layer.gate))
    rows, factors = (x * weights, (by_expert != 0).astype(x.dtype)) if options.scale_inputs else (x, by_expert)
    outputs = jax.vmap(lambda *matrices: ffn(layer, rows, *matrices), out_axes=1)(up, down, gate)
    return (outputs * factors[:, :, None]).sum(1)


def with_shared(layer, x, y):
    if layer.shared_expert is None:
        return y
    gate = None if layer.shared_gate is None else layer.shared_gate[...]
    shared, mix = ffn(layer, x, layer.shared_up[...], layer.shared_down[...], gate), layer.shared_expert.mix
    if mix is SharedMix.SUM:
        return y + shared
    logits = x @ layer.shared_kernel[...]
    if mix is SharedMix.SIGMOID:
        return y + shared / (1 + jnp.exp(-logits))
    weights = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    return weights[:, :1] * y + weights[:, 1:] * shared

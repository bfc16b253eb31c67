"""Plain reference implementations, without collectives or sorting."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb import Experts, TokenInfo


def dense_moe(x, kernel, experts: Experts, router, mask=None, bias=None):
    """Apply every expert to every token; `[T, H]` tokens of all ranks, `[E, ...]` experts of all ranks."""
    wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
    logits = jnp.matmul(x.astype(wide), kernel.astype(wide), precision="highest")
    routing = router(logits, bias, TokenInfo(mask=mask, position=jnp.arange(logits.shape[0])))
    up = biased(jnp.einsum("th,ehf->etf", x, experts.up), experts.up_bias)
    gate = None if experts.gate is None else biased(jnp.einsum("th,ehf->etf", x, experts.gate), experts.gate_bias)
    hidden = jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up
    by_expert = biased(jnp.einsum("etf,efh->eth", hidden, experts.down), experts.down_bias).swapaxes(0, 1)
    chosen = jnp.take_along_axis(by_expert, routing.experts[:, :, None], axis=1)
    y = (chosen.astype(wide) * routing.weights[:, :, None]).sum(1).astype(x.dtype)
    return y if mask is None else jnp.where(mask[:, None], y, 0)


def biased(products, bias):
    """Add the bias of each expert to products `[E, T, F]`."""
    return products if bias is None else products + bias[:, None]


def split(counts, quota, domain):
    """Return the split token by token, `[R, E, R]`: copies of an expert by source and serving rank."""
    num_ranks, num_experts = counts.shape
    left, room = counts.astype(int).copy(), quota.astype(int).copy()
    out = np.zeros((num_ranks, num_experts, num_ranks), int)
    nearness = (
        lambda r, t: r == t,
        lambda r, t: r // domain == t // domain,
        lambda r, t: r % domain == t % domain,
        lambda r, t: True,
    )
    for near in nearness:
        for e in range(num_experts):
            for r in range(num_ranks):
                for t in range(num_ranks):
                    if near(r, t):
                        take = min(left[r, e], room[e, t])
                        out[r, e, t] += take
                        left[r, e] -= take
                        room[e, t] -= take
    return out


def random_plan(rng, counts, slots, domain):
    """Return a random legal plan `(placement, quota)`."""
    num_ranks, num_experts = counts.shape
    home = num_experts // num_ranks
    placement = np.full((num_ranks, slots), -1, np.int32)
    placement[:, :home] = np.arange(num_experts).reshape(num_ranks, home)
    for rank in range(num_ranks):
        block = rank // domain * domain
        inside = np.arange(block * home, (block + domain) * home)
        others = rng.permutation(inside[inside // home != rank])
        for slot in range(home, slots):
            if len(others) and rng.random() < 0.7:
                placement[rank, slot], others = others[0], others[1:]
    quota = np.zeros((num_experts, num_ranks), np.int32)
    for e, total in enumerate(counts.sum(0)):
        holders = np.flatnonzero((placement == e).any(1))
        quota[e, holders] = rng.multinomial(total, rng.dirichlet(np.ones(len(holders))))
    return placement, quota

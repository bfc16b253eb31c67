"""Experts with adapters, and the same experts with the adapters merged into the matrices."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_moe_lb.core.experts import ADAPTERS

RANK = 3


def with_adapters(experts, rank=RANK):
    """Add adapters of random numbers to experts `[G, ...]`."""

    def factors(at, name):
        *groups, inner, outer = getattr(experts, name[:-2]).shape
        shape = (*groups, inner, rank) if name.endswith("_a") else (*groups, rank, outer)
        return 0.3 * jax.random.normal(jax.random.key(at), shape, experts.up.dtype)

    names = [name for name in ADAPTERS if getattr(experts, name[:-2]) is not None]
    return replace(experts, **{name: factors(at, name) for at, name in enumerate(names)})


def adapters_of(experts):
    """Return the adapters of experts by name."""
    return {name: getattr(experts, name) for name in ADAPTERS}


def merged(experts):
    """Return the experts without adapters, whose products the matrices contain."""
    if not experts.has_adapters:
        return experts

    def product(name):
        return jnp.matmul(getattr(experts, f"{name}_a"), getattr(experts, f"{name}_b"))

    names = ("up", "down") if experts.gate is None else ("up", "down", "gate")
    sums = {name: getattr(experts, name) + product(name) for name in names}
    return replace(experts, **dict.fromkeys(ADAPTERS), **sums)

"""Balanced execution of the MoE blocks of other Flax NNX libraries: MaxText, EasyDeL and Tunix."""

from jax_moe_lb.integrations.balance import balance

__all__ = ["balance"]


def __dir__() -> list[str]:
    return __all__

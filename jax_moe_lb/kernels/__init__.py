"""Expert weights, activations and the grouped products of expert feed-forward networks."""

from jax_moe_lb.core.experts import ClampedSwiGLU, Experts, geglu, gelu_exact, relu_squared, swiglu

__all__ = [
    "ClampedSwiGLU",
    "Experts",
    "geglu",
    "gelu_exact",
    "relu_squared",
    "swiglu",
]


def __dir__() -> list[str]:
    return __all__

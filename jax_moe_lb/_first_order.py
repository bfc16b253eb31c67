"""Backward passes that are written by hand have no derivatives of their own, and say so."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, which refuses to be differentiated in one line.

    Without it a gradient of a gradient ends at whatever operation comes first, such as a custom call that the user
    never heard of.

    Args:
        backward: computes gradients, from arguments that are pytrees of arrays.
    """

    def refuse(*args: Any) -> NoReturn:
        del args
        raise NotImplementedError("moe has no second derivatives; expected a gradient of it, not a gradient of that")

    function = jax.custom_vjp(backward)
    function.defvjp(refuse, refuse)
    return function

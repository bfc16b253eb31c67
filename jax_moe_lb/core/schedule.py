"""Order of operations in compiled programs.

XLA runs the exchanges of a program one after another. `after_on_cuda` decides which one comes first, and so which
products remain to run beside it.
"""

from typing import Any, TypeVar

import jax

TreeT = TypeVar("TreeT")


def after_on_cuda(first: Any, then: TreeT) -> TreeT:
    """Return `then`, in programs for NVIDIA GPUs behind an optimization barrier after `first`.

    Other programs are unchanged. TPU compilers find an order of their own, and CPUs process few rows at a time.

    Args:
        first: pytree of arrays.
        then: pytree of arrays; operations that use the result run after `first` is computed.

    Returns:
        `then`, with equal values.
    """

    def barrier(first: Any, then: TreeT) -> TreeT:
        return jax.lax.optimization_barrier((first, then))[1]

    def as_it_is(first: Any, then: TreeT) -> TreeT:
        del first
        return then

    return jax.lax.platform_dependent(first, then, cuda=barrier, default=as_it_is)

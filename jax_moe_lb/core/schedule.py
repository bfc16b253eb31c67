"""Order of operations in compiled programs.

XLA runs the exchanges of a program one after another. `in_order_on_cuda` decides which one comes first, and so which
products remain to run beside it.
"""

from typing import TypeVar

import jax

FirstT = TypeVar("FirstT")
ThenT = TypeVar("ThenT")


def in_order_on_cuda(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    """Return both arguments; in programs for NVIDIA GPUs, operations that use `then` run after `first` is computed."""
    # Use the returned arrays instead of the arguments. An argument used otherwise, too, is copied before an operation
    # updates it in place, since the optimization barrier still reads it.
    # Other programs are unchanged. TPU compilers find an order of their own, and CPUs process few rows at a time.

    def barrier(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
        return jax.lax.optimization_barrier((first, then))

    def as_they_are(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
        return first, then

    return jax.lax.platform_dependent(first, then, cuda=barrier, default=as_they_are)

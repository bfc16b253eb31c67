"""Order of operations in compiled programs.

XLA runs the exchanges of a program one after another. `in_order` decides which one comes first, and so which products
remain to run beside it.
"""

from typing import TypeVar

import jax

FirstT = TypeVar("FirstT")
ThenT = TypeVar("ThenT")


def in_order(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    """Return both arguments; in programs for accelerators, operations that use `then` run after `first` is computed."""
    # Use the returned arrays instead of the arguments. An argument used otherwise, too, is copied before an operation
    # updates it in place, since the optimization barrier still reads it.
    # Programs for CPUs are unchanged, as these process few rows at a time.
    return jax.lax.platform_dependent(first, then, cuda=_barrier, tpu=_barrier, default=_as_they_are)


def in_order_on_cuda(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    """Return both arguments, in order as by `in_order`, in programs for NVIDIA GPUs."""
    # Use it if the compiler of TPUs finds a better order of its own.
    return jax.lax.platform_dependent(first, then, cuda=_barrier, default=_as_they_are)


def in_order_on_tpu(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    """Return both arguments, in order as by `in_order`, in programs for TPUs."""
    # Use it for memory: their compiler starts exchanges as early as it can, and buffers of several live at a time.
    return jax.lax.platform_dependent(first, then, tpu=_barrier, default=_as_they_are)


def _barrier(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    return jax.lax.optimization_barrier((first, then))


def _as_they_are(first: FirstT, then: ThenT) -> tuple[FirstT, ThenT]:
    return first, then

"""Finds the lowest maximum load that the slots allow, by a search, and then the fewest replicas within it."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb._custom_calls import MODULES, is_built
from jax_moe_lb.checks import check_domain, home_experts_per_rank
from jax_moe_lb.planners.native import Refused, is_on_host, run_planner
from jax_moe_lb.types import AnyArray, Counts, Placement, Quota

UNBOUNDED = 2**63 - 1
"""The `max_fan_out` that is no bound: the largest int64, as the custom call takes no `None`."""


def exact(
    counts: Counts,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
) -> tuple[Placement, Quota]:
    """Makes a plan for these counts from nothing; `ffi/planning/exact.h` has the rule.

    `Exact` calls it. It exists in C++ alone: a search of thousands of steps has no form in jnp that would be worth
    compiling. In a program that is lowered for a platform without its custom call, JAX stops the compilation.

    Args:
        counts: `[R, E]` integers, the token copies that each rank routes to each expert, at least 0; their sum must
            stay below `2**31`.
        num_slots: `S`, the slots of a rank, home experts included; at least `E / R`, and two more are usual.
        domain: how many ranks a domain has; each domain is planned for itself.
        eps: the fraction by which the maximum load may exceed the lowest one found where that saves replicas; at least
            0, 0.01 by default.
        max_fan_out: how many replicas may be made of the experts of one home rank; `None`, the default, is any number.
        localize: whether replicas change places so that more tokens are served on the rank where they start.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. Counts that break the
        rules above stop the program on a CPU; on a GPU all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
        RuntimeError: this installation lacks the custom call of JAX's default backend; the message says how to get it.
    """
    check_shapes(counts, num_slots, domain)
    check_exact(eps, max_fan_out)
    num_ranks, num_experts = counts.shape
    if not is_on_host(counts):
        # Refused here as well as when it is lowered: the traceback then points at the caller.
        _require_built(jax.default_backend())
    placement, quota = run_planner(
        "exact",
        ((num_ranks, num_slots), (num_experts, num_ranks)),
        counts,
        reference=Refused(_needs),
        # The custom call sees the slots in the shape of its result; a function of arrays must be told.
        host_options={"num_slots": num_slots},
        domain=domain,
        # NumPy's number keeps its 64 bits as an attribute, which the C++ reads as a double.
        eps=np.float64(eps),
        max_fan_out=UNBOUNDED if max_fan_out is None else max_fan_out,
        localize=localize,
    )
    return placement, quota


def check_exact(eps: float, max_fan_out: int | None) -> None:
    """Refuses options of `exact` that are out of range.

    Args:
        eps: the fraction above the lowest maximum load; at least 0 and finite.
        max_fan_out: the bound on replicas of one home rank's experts; at least 0, or `None` for no bound.

    Raises:
        ValueError: names the option, and says what was expected.
    """
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; expected a finite number, at least 0")
    if max_fan_out is not None and not 0 <= max_fan_out <= UNBOUNDED:
        raise ValueError(f"max_fan_out is {max_fan_out}; expected 0 to {UNBOUNDED}, or None")


def check_shapes(counts: AnyArray, num_slots: int, domain: int) -> None:
    """Refuses counts that are no `[R, E]` of integers, and slots and domains that do not fit them.

    Args:
        counts: what should be `[R, E]`; only shape and dtype are read.
        num_slots: `S`, the slots of a rank.
        domain: how many ranks a domain has.

    Raises:
        ValueError: names the argument, and says what was expected.
    """
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E], both at least 1")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts has dtype {counts.dtype}; expected integers")
    num_ranks, num_experts = counts.shape
    home = home_experts_per_rank(num_experts, num_ranks, "counts")
    if num_slots < home:
        raise ValueError(f"num_slots is {num_slots}; expected at least the {home} home experts")
    check_domain(domain, num_ranks)


def _require_built(backend: str) -> None:
    # JAX says "gpu" for a backend where it says "cuda" for the platform of a custom call.
    platform = "cuda" if backend == "gpu" else backend
    if platform not in MODULES or not is_built(platform):
        raise RuntimeError(_needs(platform))


def _needs(platform: str) -> str:
    """Says in one line what `exact` lacks on a platform, and what to use there."""
    platform = "cuda" if platform == "gpu" else platform
    head = "the planner of Exact exists in C++ alone, for CPUs and NVIDIA GPUs"
    if platform not in MODULES:
        return f"{head}, and not for {platform}: use greedy or ultraep there, which plan in jnp"
    toolkit = " and the CUDA toolkit" if platform == "cuda" else ""
    return (
        f"{head}, and {MODULES[platform]} was not built: in a checkout, run `pip install .` where there is a C++17 "
        f"compiler{toolkit}; or use greedy or ultraep, which plan in jnp"
    )

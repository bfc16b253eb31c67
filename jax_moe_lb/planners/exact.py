"""The lowest maximum load that the slots allow, by a search, then the fewest replicas within it."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb._custom_calls import MODULES, is_built
from jax_moe_lb.checks import check_domain, home_experts_per_rank
from jax_moe_lb.planners.native import Refused, is_on_host, run_planner
from jax_moe_lb.types import AnyArray, Counts, Placement, Quota

UNBOUNDED = 2**63 - 1
"""The fan-out without a bound."""


def exact(
    counts: Counts,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
) -> tuple[Placement, Quota]:
    """A plan for these counts, made from nothing; see `Exact`, and `ffi/planning/exact.h` for the rule.

    It exists in C++ alone: a search of thousands of steps has no form in jnp that would be worth compiling. In a
    program that is lowered for a platform without its custom call, JAX stops the compilation.

    Args:
        counts: tokens that each rank routes to each expert, at least 0; their sum must stay below `2**31`.
        num_slots: `S` of the plan, at least `E / R`.
        domain: ranks of a domain. Each is planned for itself.
        eps: the maximum load may exceed the lowest one found by this fraction, where that saves replicas. At least 0.
        max_fan_out: replicas that may be made of the experts of one home rank; `None`: any number.
        localize: whether replicas change places so that more tokens are served on the rank where they start.

    Returns:
        Placement `[R, S]` and quota `[E, R]`, int32; of NumPy arrays, NumPy arrays. Counts that break the
        rules above stop the program on a CPU; on a GPU all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
        RuntimeError: this installation lacks the custom call of JAX's default backend; the message says how to get it.
    """
    check_shapes(counts, num_slots, domain)
    check_exact(eps, max_fan_out)
    num_ranks, num_experts = counts.shape
    if not is_on_host(counts):
        _require_built(jax.default_backend())
    placement, quota = run_planner(
        "exact",
        ((num_ranks, num_slots), (num_experts, num_ranks)),
        counts,
        reference=Refused(_needs),
        # The custom call sees the slots in the shape of its result.
        host_options={"num_slots": num_slots},
        domain=domain,
        eps=np.float64(eps),
        max_fan_out=UNBOUNDED if max_fan_out is None else max_fan_out,
        localize=localize,
    )
    return placement, quota


def check_exact(eps: float, max_fan_out: int | None) -> None:
    """Refuses options out of range."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; expected a finite number, at least 0")
    if max_fan_out is not None and not 0 <= max_fan_out <= UNBOUNDED:
        raise ValueError(f"max_fan_out is {max_fan_out}; expected 0 to {UNBOUNDED}, or None")


def check_shapes(counts: AnyArray, num_slots: int, domain: int) -> None:
    """Refuses what is no `[R, E]` of integers, and slots and domains that do not fit it."""
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
    platform = "cuda" if backend == "gpu" else backend
    if platform not in MODULES or not is_built(platform):
        raise RuntimeError(_needs(platform))


def _needs(platform: str) -> str:
    """What `exact` lacks on a platform, and what to use there."""
    platform = "cuda" if platform == "gpu" else platform
    head = "the planner of Exact exists in C++ alone, for CPUs and NVIDIA GPUs"
    if platform not in MODULES:
        return f"{head}, and not for {platform}: use greedy or ultraep there, which plan in jnp"
    toolkit = " and the CUDA toolkit" if platform == "cuda" else ""
    return (
        f"{head}, and {MODULES[platform]} was not built: in a checkout, run `pip install .` where there is a C++17 "
        f"compiler{toolkit}; or use greedy or ultraep, which plan in jnp"
    )

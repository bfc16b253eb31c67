"""Sizes that many places check are checked here, each with one message."""

from typing import Any

import numpy as np

INT32_MAX = np.iinfo(np.int32).max


def home_experts_per_rank(num_experts: int, num_ranks: int, holder: str | None = None) -> int:
    """Returns `L = E / R`, the number of experts that are at home on every rank, and refuses others.

    Args:
        num_experts: `E`, the number of experts of a layer.
        num_ranks: `R`, the number of ranks in the expert-parallel group.
        holder: what the message calls the argument that has so many experts; `None`: they are `num_experts` themselves.

    Raises:
        ValueError: `E` is not a positive multiple of `R`.

    Examples:
        >>> home_experts_per_rank(128, 8)
        16
    """
    if num_experts < 1 or num_experts % num_ranks:
        found = f"num_experts is {num_experts}" if holder is None else f"{holder} has {num_experts} experts"
        raise ValueError(f"{found}; expected a positive multiple of the {num_ranks} ranks")
    return num_experts // num_ranks


def check_domain(domain: int, num_ranks: int, argument: str = "domain") -> None:
    """Refuses domains that do not cut the ranks into equal blocks.

    Args:
        domain: how many ranks a domain has.
        num_ranks: `R`, the number of ranks in the expert-parallel group.
        argument: what the message calls the domain.

    Raises:
        ValueError: it is not a divisor of the ranks.
    """
    if domain < 1 or num_ranks % domain:
        raise ValueError(f"{argument} is {domain}; expected a divisor of the {num_ranks} ranks")


def check_total(counts: Any) -> None:
    """Refuses counts on a host whose sum does not fit int32, planning's integer type; what is traced passes.

    Args:
        counts: integers of any shape.

    Raises:
        ValueError: the sum is larger; a sum in int32 would wrap round to another number.
    """
    # A sum of unsigned 64-bit counts could wrap round too; float64 is exact far beyond int32.
    if isinstance(counts, np.ndarray) and (total := counts.sum(dtype=np.float64)) > INT32_MAX:
        raise ValueError(f"counts sum to {total:.0f} tokens; expected at most {INT32_MAX}")

"""Checks of sizes that many places make, each with one message."""


def home_experts_per_rank(num_experts: int, num_ranks: int, holder: str | None = None) -> int:
    """The `L = E / R` experts that are at home on every rank.

    Args:
        num_experts: `E`.
        num_ranks: `R`.
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
        domain: ranks of a domain.
        num_ranks: `R`.
        argument: what the message calls the domain.

    Raises:
        ValueError: it is not a divisor of the ranks.
    """
    if domain < 1 or num_ranks % domain:
        raise ValueError(f"{argument} is {domain}; expected a divisor of the {num_ranks} ranks")

"""Transfers that overlap share links fairly: each gets as much of what it needs as the others do."""

from collections.abc import Sequence
from dataclasses import dataclass

TINY = 1e-300
"""Below the seconds of any byte."""

FULL = 1 - 1e-9
"""A level counts as full from here on, and a transfer as at its own speed: sums are off by rounding errors."""


@dataclass(frozen=True)
class Transfer:
    """A transfer is what an exchange needs of links that it shares with others.

    Args:
        latency_s: the seconds before its bytes move.
        busy_s: the seconds in which they move if it has the links for itself.
        level_s: for each level the seconds that its busiest link needs of these.
    """

    latency_s: float
    busy_s: float
    level_s: tuple[float, ...]


def fair_parts(transfers: Sequence[Transfer]) -> list[float]:
    """Returns the part of its own speed that each transfer gets: all rise together until a level of theirs is full.

    Args:
        transfers: those that move bytes at the same time, of the same levels.

    Examples:
        >>> alone, both = Transfer(0.0, 1.0, (1.0, 0.0)), Transfer(0.0, 1.0, (1.0, 0.25))
        >>> fair_parts([alone]), fair_parts([alone, both])
        ([1.0], [0.5, 0.5])
    """
    # What a transfer at full speed takes of each level; one without bytes takes nothing.
    needs = [[level / max(one.busy_s, TINY) for level in one.level_s] for one in transfers]
    parts, rising = [0.0] * len(needs), set(range(len(needs)))
    while rising:
        wanted = [sum(needs[one][level] for one in rising) for level in range(len(needs[0]))]
        room = [(1 - taken) / want for taken, want in zip(_taken(parts, needs), wanted, strict=True) if want]
        more = max(min([*room, *(1 - parts[one] for one in rising)]), 0.0)
        for one in rising:
            parts[one] += more
        full = [taken >= FULL for taken in _taken(parts, needs)]
        rising = {one for one in rising if parts[one] < FULL and not _uses(needs[one], full)}
    return parts


def _taken(parts: list[float], needs: list[list[float]]) -> list[float]:
    """Sums up what is taken of each level."""
    return [sum(part * need[level] for part, need in zip(parts, needs, strict=True)) for level in range(len(needs[0]))]


def _uses(need: list[float], full: list[bool]) -> bool:
    return any(level and is_full for level, is_full in zip(need, full, strict=True))

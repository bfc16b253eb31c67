"""Files state quantities with their unit, as in `400 Gbit/s`, `50 GB/s`, `5 us`, `600 TFLOP/s`.

Bits and bytes are told apart by their names, and a number without a unit is refused: nothing is guessed. Prefixes are
decimal; `KiB`, `MiB` and `GiB` are binary.
"""

import math
import re
from fractions import Fraction
from typing import Any

from jax_moe_lb.sim.limits import shown

DECIMAL = {prefix: Fraction(1000) ** power for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
"""They are exact, so that `10 us` is the number nearest to it."""

BYTES = {f"{prefix}B": factor for prefix, factor in DECIMAL.items()} | {
    f"{prefix}iB": Fraction(1024) ** power for power, prefix in enumerate("KMG", 1)
}
BITS = {f"{prefix}bit": factor / 8 for prefix, factor in DECIMAL.items()}

RATES = {f"{unit}/s": factor for unit, factor in (BYTES | BITS).items()}
"""These units are in bytes per second."""

SIZES = BYTES
"""These units are in bytes."""

TIMES = {unit: Fraction(1, 1000**power) for power, unit in enumerate(("s", "ms", "us", "ns"))}
"""These units are in seconds."""

SPEEDS = {f"{prefix}FLOP/s": factor for prefix, factor in DECIMAL.items()}
"""These units are in floating-point operations per second."""


NUMBER = r"[-+]?[\d.]{1,40}(?:[eE][-+]?\d{1,3})?"
"""A number has no more digits than this: a power of a Fraction is computed in full, however large it is."""

LEAST, MOST = 1e-15, 1e30
"""In base units, quantities other than 0 lie between these, so that sums and quotients of them stay finite."""


def rate(value: Any) -> float:
    """Parses a rate, into bytes per second; it raises `ValueError` like all of these."""
    return _parsed(value, RATES, "a rate above 0 with its unit, such as '400 Gbit/s' or '50 GB/s'", least=0.0)


def size(value: Any) -> float:
    """Parses a size, into bytes."""
    return _parsed(value, SIZES, "a size above 0 with its unit, such as '80 GB'", least=0.0)


def time(value: Any) -> float:
    """Parses a time, into seconds."""
    return _parsed(value, TIMES, "a time with its unit, such as '5 us'")


def speed(value: Any) -> float:
    """Parses a speed, into floating-point operations per second."""
    return _parsed(value, SPEEDS, "a speed above 0 with its unit, such as '600 TFLOP/s'", least=0.0)


def _parsed(value: Any, units: dict[str, Fraction], expected: str, least: float | None = None) -> float:
    """Parses a number into the base unit; it is above `least`, or at least 0.

    Raises:
        ValueError: there is no number or no unit, or one of another kind.
    """
    # -1 stands for what cannot be read, so that all mistakes end in the one message below.
    found = re.fullmatch(rf"\s*({NUMBER})\s*([A-Za-z/]{{1,10}})\s*", value) if isinstance(value, str) else None
    try:
        number = float(Fraction(found[1]) * units[found[2]]) if found else -1.0
    except (ValueError, KeyError):
        number = -1.0
    except OverflowError:
        number = math.inf
    if number < 0 or (least is not None and number <= least):
        raise ValueError(f"is {shown(value)}; expected {expected}")
    if number and not LEAST <= number <= MOST:
        between = f"from {LEAST:g} to {MOST:g} in units without a prefix"
        raise ValueError(f"is {shown(value)}; expected {expected}, {between}")
    return number

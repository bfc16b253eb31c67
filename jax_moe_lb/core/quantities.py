"""Quantities with units in files, such as `400 Gbit/s`, `50 GB/s`, `5 us` or `600 TFLOP/s`.

A number without a unit is an error. Prefixes are decimal, except the binary `KiB`, `MiB` and `GiB`.
"""

import math
import re
from fractions import Fraction

from jax_moe_lb.core.checks import shown

DECIMAL = {prefix: Fraction(1000) ** power for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
"""Factor per decimal prefix. Fractions are exact, so `10 us` parses to the float nearest to it."""

BYTES = {f"{prefix}B": factor for prefix, factor in DECIMAL.items()} | {
    f"{prefix}iB": Fraction(1024) ** power for power, prefix in enumerate("KMG", 1)
}
BITS = {f"{prefix}bit": factor / 8 for prefix, factor in DECIMAL.items()}

RATES = {f"{unit}/s": factor for unit, factor in (BYTES | BITS).items()}
"""Bytes per second per unit of a rate."""

SIZES = BYTES
"""Bytes per unit of a size."""

TIMES = {unit: Fraction(1, 1000**power) for power, unit in enumerate(("s", "ms", "us", "ns"))}
"""Seconds per unit of time."""

SPEEDS = {f"{prefix}FLOP/s": factor for prefix, factor in DECIMAL.items()}
"""Floating-point operations per second per unit of speed."""


NUMBER = r"[-+]?[\d.]{1,40}(?:[eE][-+]?\d{1,3})?"
"""Pattern of a number. It bounds the digits, because the power of a `Fraction` is computed in full."""

LEAST, MOST = 1e-15, 1e30
"""Bounds of nonzero quantities in base units, so that their sums and quotients stay finite."""


def rate(value: object) -> float:
    """Parse a rate such as `400 Gbit/s` into bytes per second; raise `ValueError` if it is invalid."""
    return _parsed(value, RATES, "a rate above 0 with its unit, such as '400 Gbit/s' or '50 GB/s'", least=0.0)


def size(value: object) -> float:
    """Parse a size such as `80 GB` into bytes; raise `ValueError` if it is invalid."""
    return _parsed(value, SIZES, "a size above 0 with its unit, such as '80 GB'", least=0.0)


def time(value: object) -> float:
    """Parse a time such as `5 us` into seconds; raise `ValueError` if it is invalid."""
    return _parsed(value, TIMES, "a time with its unit, such as '5 us'")


def speed(value: object) -> float:
    """Parse a speed such as `600 TFLOP/s` into operations per second; raise `ValueError` if it is invalid."""
    return _parsed(value, SPEEDS, "a speed above 0 with its unit, such as '600 TFLOP/s'", least=0.0)


def _parsed(value: object, units: dict[str, Fraction], expected: str, least: float | None = None) -> float:
    # It must be above `least`, or at least 0 if `least` is None.
    # -1 marks unreadable values, so that all mistakes end in the one message below.
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

"""Quantities with their unit, as files state them: `400 Gbit/s`, `50 GB/s`, `5 us`, `600 TFLOP/s`.

Bits and bytes are told apart by their names, and a number without a unit is refused: nothing is guessed. Prefixes are
decimal; `KiB`, `MiB` and `GiB` are binary.
"""

import math
import re
from typing import Any

DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BYTES = {f"{prefix}B": factor for prefix, factor in DECIMAL.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMG", 1)
}
BITS = {f"{prefix}bit": factor / 8 for prefix, factor in DECIMAL.items()}

RATES = {f"{unit}/s": factor for unit, factor in (BYTES | BITS).items()}
"""In bytes per second."""

SIZES = BYTES
"""In bytes."""

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""In seconds."""

SPEEDS = {f"{prefix}FLOP/s": factor for prefix, factor in DECIMAL.items()}
"""In floating-point operations per second."""


def rate(value: Any) -> float:
    """Bytes per second."""
    return _parsed(value, RATES, "a rate above 0 with its unit, such as '400 Gbit/s' or '50 GB/s'", least=0.0)


def size(value: Any) -> float:
    """Bytes."""
    return _parsed(value, SIZES, "a size above 0 with its unit, such as '80 GB'", least=0.0)


def time(value: Any) -> float:
    """Seconds."""
    return _parsed(value, TIMES, "a time with its unit, such as '5 us'")


def speed(value: Any) -> float:
    """Floating-point operations per second."""
    return _parsed(value, SPEEDS, "a speed above 0 with its unit, such as '600 TFLOP/s'", least=0.0)


def _parsed(value: Any, units: dict[str, float], expected: str, least: float | None = None) -> float:
    """The number in the base unit; above `least`, or at least 0.

    Raises:
        ValueError: no number, no unit, or one of another kind.
    """
    found = re.fullmatch(r"\s*([-+.\deE]+)\s*([A-Za-z/]+)\s*", value) if isinstance(value, str) else None
    try:
        number = float(found[1]) * units[found[2]] if found else math.nan
    except (ValueError, KeyError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (least is not None and number <= least):
        raise ValueError(f"is {value!r}; expected {expected}")
    return number

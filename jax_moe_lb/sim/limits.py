"""Limits of what a file or an argument may ask for.

They are far above what is usual, and low enough for the memory of one machine: whoever asks for more is told so at
once, and not after minutes. `simulate_uniform` holds no counts and takes more ranks and experts than the others do.
"""

from typing import Any

from jax_moe_lb.checks import INT32_MAX

MOST_LAYERS = 1000
"""A model has at most so many layers; the presets have up to 94."""

MOST_WIDTH = 2**17
"""A model's `hidden` and `inner` are at most this; the presets have up to 14336."""

MOST_POINTS = 1000
"""A curve of measured GEMMs has at most so many points; `calibrate` measures 6."""

MOST_ENTRIES = 2**24
"""The counts of a layer have at most so many entries, one for each rank and expert: 4096 of both."""

MOST_COUNTS = 2**28
"""The counts of all layers that are planned apart have at most so many entries together, which take 1 GiB."""

MOST_RANK_LAYERS = 2**21
"""A timeline has a start and an end of every task for each rank, in all layers; at most so many pairs of the two."""

MOST_PLANNED_RANKS = 256
"""`advise` draws counts for at most so many ranks; larger machines are judged by a sample, see `sample.py`."""

PLAN_S, PLAN_RANKS, PLAN_POWER = 0.03, 128, 2.5
"""A plan takes about so many seconds on so many ranks, and grows with this power of them: measured for 128 to 1024."""

TOLD_S, TOLD_BYTES = 30.0, 2**30
"""What takes less is done without a word before it."""

MOST_SHOWN = 60
"""A message shows so many characters of a value."""


def shown(value: Any) -> str:
    """Returns a value as messages have it: what Python calls it, without the middle if that is long.

    Args:
        value: what a user gave.

    Examples:
        >>> shown("400 Gbps"), shown("9" * 1000)
        ("'400 Gbps'", "'99999999999999999999999999999999999999999999 ... 999999999'")
    """
    # Python refuses to write out integers of thousands of digits.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 10000 else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 15]} ... {text[-10:]}"


def check_entries(layers: int, num_ranks: int, num_experts: int) -> None:
    """Refuses counts that memory would not hold, before anybody makes them.

    Args:
        layers: the layers that are planned apart.
        num_ranks: `R`.
        num_experts: `E`, at least `R`.

    Raises:
        ValueError: there are more than `MOST_ENTRIES` in a layer, or `MOST_COUNTS` in all.
    """
    entries = num_ranks * num_experts
    if entries > MOST_ENTRIES or layers * entries > MOST_COUNTS:
        raise ValueError(
            f"counts of {layers} layers, {num_ranks} ranks and {num_experts} experts are too many; expected at most "
            f"{MOST_ENTRIES} entries in a layer and {MOST_COUNTS} in all (simulate_uniform needs none)"
        )


def check_tokens(tokens: int, per_token: int, num_ranks: int) -> None:
    """Refuses tokens whose copies, over all ranks of a layer, are more than planners count in int32.

    Args:
        tokens: `T`, the tokens of each rank.
        per_token: `K`.
        num_ranks: `R`.

    Raises:
        ValueError: there are more.
    """
    most = INT32_MAX // (per_token * num_ranks)
    if tokens > most:
        raise ValueError(
            f"tokens is {shown(tokens)}; expected at most {most} with {per_token} experts per token on {num_ranks} "
            f"ranks, as the copies of a layer are counted in int32"
        )


def check_timeline(layers: int, num_ranks: int) -> None:
    """Refuses timelines that memory would not hold.

    Args:
        layers: the layers of the model.
        num_ranks: `R`.

    Raises:
        ValueError: there are more than `MOST_RANK_LAYERS` pairs of both.
    """
    if layers * num_ranks > MOST_RANK_LAYERS:
        raise ValueError(
            f"layers is {shown(layers)} on {num_ranks} ranks; expected at most {MOST_RANK_LAYERS // num_ranks} layers "
            f"on so many"
        )


def forecast(plans: int, layers: int, num_ranks: int, num_experts: int) -> str | None:
    """Says what a large simulation will need; `None` for a small one. It is rough: machines and planners differ.

    Args:
        plans: how many layers are planned, over all steps and systems.
        layers: how many layers of counts are held.
        num_ranks: `R`.
        num_experts: `E`.

    Examples:
        >>> forecast(plans=4, layers=4, num_ranks=1024, num_experts=1024)
        >>> forecast(plans=4, layers=4, num_ranks=2048, num_experts=2048)
        '2048 ranks and 2048 experts: 4 plans take about 2 min, and counts and exchanges take 0.5 GB'
    """
    plan_s = plans * PLAN_S * (num_ranks / PLAN_RANKS) ** PLAN_POWER
    # Counts in four bytes, and some matrices between ranks in eight.
    num_bytes = 4 * layers * num_ranks * num_experts + 12 * 8 * num_ranks**2
    if plan_s < TOLD_S and num_bytes < TOLD_BYTES:
        return None
    took = f"{plan_s / 60:.0f} min" if plan_s > 90 else f"{plan_s:.0f} s"
    planning = f"{plans} plans take about {took}, and " if plans else ""
    return f"{num_ranks} ranks and {num_experts} experts: {planning}counts and exchanges take {num_bytes / 1e9:.1f} GB"

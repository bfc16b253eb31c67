"""Limits of what a file or an argument may ask for.

They are far above what is usual, and low enough for the memory of one machine: whoever asks for more is told so at
once, and not after minutes. `simulate_uniform` holds no counts and takes more ranks and experts than the others.
"""

from typing import Any

from jax_moe_lb.legality import INT32_MAX

MOST_LAYERS = 1000
"""A model has at most so many layers; the presets have up to 94."""

MOST_WIDTH = 2**17
"""A model's `hidden` and `inner` are at most this; the presets have up to 14336."""

MOST_POINTS = 1000
"""A curve of measured GEMMs has at most so many points; `calibrate` measures 6."""

MOST_ENTRIES = 2**24
"""A step holds counts of at most so many pairs of ranks and experts, over all layers that are planned apart."""

MOST_RANK_LAYERS = 2**21
"""A timeline has a start and an end of every task for each rank, in all layers; at most so many pairs of the two."""

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
        ValueError: there are more than `MOST_ENTRIES` of them.
    """
    if layers * num_ranks * num_experts > MOST_ENTRIES:
        raise ValueError(
            f"counts would be [{layers}, {num_ranks}, {num_experts}], layers, ranks and experts; expected at most "
            f"{MOST_ENTRIES} entries (simulate_uniform takes any number of ranks)"
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

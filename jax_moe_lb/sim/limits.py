"""Size limits of arguments of the simulator, and forecasts of its time and memory.

The limits are far above usual sizes and fit into the memory of one machine; larger requests are rejected immediately.
`simulate_uniform` stores no counts and accepts more ranks and experts.
"""

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.recordings.counts_files import MOST_ENTRIES

MOST_LAYERS = 1000
"""Maximum number of layers of a model; the presets have up to 94."""

MOST_WIDTH = 2**17
"""Maximum of a model's `hidden` and `inner`; the presets have up to 14336."""

MOST_POINTS = 1000
"""Maximum number of points of a measured GEMM curve; `calibrate` measures 6."""

MOST_COUNTS = 2**28
"""Maximum number of counts of all separately planned layers; they take 1 GiB."""

MOST_RANK_LAYERS = 2**21
"""Maximum product of ranks and layers of a timeline, which stores the start and end of every task per rank."""

MOST_PLANNED_RANKS = 256
"""Maximum number of ranks for which `advise` samples all counts; larger machines use `sample_of`."""

PLAN_S, PLAN_RANKS, PLAN_POWER = 0.03, 128, 2.5
"""Model of the planning time: seconds for this number of ranks, growing with this power of it; measured for 128 to 1024
ranks.
"""

TOLD_S, TOLD_BYTES = 30.0, 2**30
"""Thresholds in seconds and bytes for announcing the cost of a simulation."""


def check_entries(layers: int, num_ranks: int, num_experts: int) -> None:
    """Check the number of counts against the memory limit, before allocating them."""
    entries = num_ranks * num_experts
    if entries > MOST_ENTRIES or layers * entries > MOST_COUNTS:
        raise ValueError(
            f"counts of {layers} layers, {num_ranks} ranks and {num_experts} experts are too many; expected at most "
            f"{MOST_ENTRIES} entries in a layer and {MOST_COUNTS} in all (simulate_uniform needs none)"
        )


def check_tokens(tokens: int, per_token: int, num_ranks: int) -> None:
    """Check that the token copies of all ranks of a layer fit int32."""
    most = INT32_MAX // (per_token * num_ranks)
    if tokens > most:
        raise ValueError(
            f"tokens is {shown(tokens)}; expected at most {most} with {per_token} experts per token on {num_ranks} "
            f"ranks, as the copies of a layer are counted in int32"
        )


def check_timeline(layers: int, num_ranks: int) -> None:
    """Check the size of a timeline against the memory limit."""
    if layers * num_ranks > MOST_RANK_LAYERS:
        raise ValueError(
            f"layers is {shown(layers)} on {num_ranks} ranks; expected at most {MOST_RANK_LAYERS // num_ranks} layers"
        )


def forecast(plans: int, layers: int, num_ranks: int, num_experts: int) -> str | None:
    """Return a rough estimate of time and memory of a large simulation; `None` for a small one."""
    plan_s = plans * PLAN_S * (num_ranks / PLAN_RANKS) ** PLAN_POWER
    # Counts in 4 bytes, and about 12 matrices between ranks in 8 bytes.
    num_bytes = 4 * layers * num_ranks * num_experts + 12 * 8 * num_ranks**2
    if plan_s < TOLD_S and num_bytes < TOLD_BYTES:
        return None
    took = f"{plan_s / 60:.0f} min" if plan_s > 90 else f"{plan_s:.0f} s"
    planning = f"{plans} plans take about {took}, and " if plans else ""
    return f"{num_ranks} ranks and {num_experts} experts: {planning}counts and exchanges take {num_bytes / 1e9:.1f} GB"

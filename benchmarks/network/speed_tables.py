"""Tables of `bench_training_speed`: speed, loss and balance of runs, and the stages of their steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.network.testbed import CONFIG, NUM_RANKS
from benchmarks.network.training_runs import BATCH_TOKENS, INTERVAL, WINDOW, Curve, Curves, curve_of, last_mean
from benchmarks.results import Table, Value, spread

SPEEDS = {
    "run": "",
    "tokens/s over plain": ".2f",
    "tokens/s": ",.0f",
    "loss after all steps": ".4f",
    "steps at equal time": "d",
    "loss then": ".4f",
    "copies dropped %": ".2f",
    "imbalance before": ".2f",
    "after": ".2f",
    "memory MB": ".0f",
    "experts %": ".0f",
    "exchanges %": ".0f",
}


def speeds(
    points: Sequence[Mapping[str, Any]],
    curves: Curves,
    peaks: Mapping[str, float],
    profiles: Mapping[str, Mapping[str, float]],
) -> Table:
    """Return speed, loss and balance of each run.

    Equal time is the longest time in which no run of a network takes all its steps. The speeds of a pass are ratios to
    `plain` of the same pass and network.
    """
    seconds: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for one in points:
        seconds[one["network"], one["run"]].append(one["seconds"])
    at = {key: elapsed_s(np.array(of)) for key, of in seconds.items()}
    rows: list[list[Value]] = []
    equal_of: dict[str, int] = {}
    for (network, name), of in seconds.items():
        curve = curve_of(name, curves)
        equal_s = min(times[-1] for (other, _), times in at.items() if other == network)
        steps = int(np.searchsorted(at[network, name], equal_s, side="right"))
        equal_of.setdefault(network, steps)
        mean_s = np.mean(of, 1)
        plain_s = np.mean(seconds[network, f"plain{network}"], 1)
        speed = [spread(plain_s / mean_s), spread(CONFIG.tokens_per_step / mean_s)]
        loss = last_mean(curve.loss), steps, last_mean(curve.loss[:steps])
        rows.append([name, *speed, *loss, *balance(curve), peaks[name] / 1e6, *shares(profiles[name])])
    flat, domains = equal_of.values()
    note = (
        f"Losses are means of the last {WINDOW} steps. Equal time is that of {flat} steps of plain, and of {domains} "
        "on two domains."
    )
    return Table(SPEEDS, rows, notes=[note])


def elapsed_s(seconds: np.ndarray) -> np.ndarray:
    """Return the seconds from the start of a run to the end of each step."""
    in_order = seconds.T.reshape(-1)
    return np.cumsum(np.repeat(in_order, INTERVAL))


def balance(curve: Curve) -> list[float]:
    """Return the dropped copies in percent, and the imbalance before and after, means of all steps."""
    copies = BATCH_TOKENS * NUM_RANKS * CONFIG.model.experts_per_token * CONFIG.model.num_layers
    return [float(100 * curve.dropped.mean() / copies), float(curve.before.mean()), float(curve.after.mean())]


def shares(profile: Mapping[str, float]) -> list[float]:
    """Return the shares of the experts and of all exchanges in the profiled time of rank 0, in percent."""
    total = sum(profile.values())
    exchanges = sum(seconds for stage, seconds in profile.items() if stage.endswith("exchange"))
    return [100 * profile.get("experts", 0.0) / total, 100 * exchanges / total]


STAGES = {
    "experts": ("experts",),
    "rows": ("dispatch: exchange", "combine: exchange"),
    "weights": ("weights: exchange", "weights"),
    "counts, with the wait for the slowest rank": ("counts: exchange",),
    "sums of gradients, with the wait": ("router: exchange", "rest: exchange"),
}


def stages(profiles: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the share of each stage in the profiled steps of rank 0, in percent."""
    rows: list[list[Value]] = []
    for name, of in profiles.items():
        total = sum(of.values())
        parts = [100 * sum(of.get(part, 0.0) for part in stage) / total for stage in STAGES.values()]
        rows.append([name, *parts, 100 - sum(parts)])
    return Table({"run": "", **dict.fromkeys(STAGES, ".0f"), "the rest of the model": ".0f"}, rows)


def memory(bytes_of: Mapping[str, int], peaks: Mapping[str, float]) -> Table:
    """Return the memory of each program on one rank."""
    rows: list[list[Value]] = []
    for name, compiled in bytes_of.items():
        pairs = [(compiled, bytes_of["plain"]), (peaks[name], peaks["plain"])]
        rows.append([name, *(value for each, plain in pairs for value in (each / 1e6, each / plain))])
    columns = {"run": ""}
    for kind in ("compiled", "measured"):
        columns |= {f"{kind} MB per rank": ".0f", f"{kind} over plain": ".2f"}
    return Table(columns, rows)

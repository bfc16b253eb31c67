"""Drift of expert popularity over training steps, and `fitted_drift` to fit it to a recording."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # loads scipy.optimize, which takes a second, at its first use
from jaxtyping import Float, Int, Num

from jax_moe_lb.core.checks import Count, NonNegative, Positive, check_value, checked_fields

LEAST_STEADY = 0.01
"""Minimum steady share of the variance, so that a load shape remains."""

LEAST_STEPS = 8
"""Minimum number of steps of a recording to fit."""

TIMES = 80
"""Number of correlation times tried by the fit, geometrically spaced from one step to the length of the recording."""


@dataclass(frozen=True)
@checked_fields
class Drift:
    """Shares of expert popularity that are steady, drift between steps, and are new in every step.

    The logarithm of an expert's popularity is the sum of three normal parts:

    - a steady part,
    - a drifting part, an autoregressive process of order 1 with autocorrelation `exp(-lag / steps)`,
    - a part sampled independently for every step.

    Their variances over experts are shares of the total variance. In addition, each rank has text of its own, which
    favors some experts on this rank alone.

    Use it to generate counts for balancers that plan from earlier steps. The default is no change between steps, which
    flatters these balancers.

    Args:
        steady: Steady share of the variance, above 0 and at most 1; 1 by default.
        drifting: Drifting share of the variance, at most `1 - steady`; 0 by default. The remainder is new in every
            step.
        steps: Correlation time of the drifting part, in steps; 1 by default.
        rank_std: Standard deviation of the logarithm of a rank's popularity relative to all ranks, in one step. At 0
            (default), ranks differ only by sampling.
        spread: Standard deviation over experts of the logarithm of popularity, as fitted to a recording; None (default)
            if unknown. Not needed if an imbalance is given.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> drift = Drift(steady=0.5, drifting=0.4, steps=10.0)
        >>> [round(drift.correlation(lag), 2) for lag in (0, 1, 10, 1000)]
        [1.0, 0.86, 0.65, 0.5]
    """

    steady: float = 1.0
    drifting: float = 0.0
    steps: Positive = 1.0
    rank_std: NonNegative = 0.0
    spread: NonNegative | None = None

    def __post_init__(self) -> None:
        if not 0 < self.steady <= 1:
            raise ValueError(f"steady is {self.steady}; expected a share above 0 and at most 1")
        # Allow for shares rounded upwards.
        if not 0 <= self.drifting <= 1 - self.steady + 1e-6:
            raise ValueError(f"drifting is {self.drifting}; expected 0 to {1 - self.steady:g}, the rest beside steady")

    @property
    def fresh(self) -> float:
        """Share of the variance sampled independently in every step."""
        return max(1 - self.steady - self.drifting, 0.0)

    def correlation(self, lag: int) -> float:
        """Compute the correlation over experts of log popularity between two steps.

        Args:
            lag: Number of steps between the two.

        Returns:
            The correlation; 1 at lag 0.
        """
        return 1.0 if lag == 0 else self.steady + self.drifting * math.exp(-abs(lag) / self.steps)

    def path(self, times: Sequence[int], experts: int, rng: np.random.Generator) -> Float[np.ndarray, "steps E"]:
        """Sample the changing parts of log popularity, in units of the standard deviation of the steady part.

        Args:
            times: Step numbers in increasing order; gaps are allowed.
            experts: Number of experts `E`.
            rng: Random generator.

        Returns:
            `[steps, E]`, the sum of the drifting and the new part.
        """
        state = rng.standard_normal(experts)
        rows, before = [], times[0]
        for time in times:
            kept = math.exp(-(time - before) / self.steps)
            state = kept * state + math.sqrt(1 - kept**2) * rng.standard_normal(experts)
            new = rng.standard_normal(experts)
            rows.append(math.sqrt(self.drifting) * state + math.sqrt(self.fresh) * new)
            before = time
        return np.stack(rows) / math.sqrt(self.steady)


RECORDED = Drift(steady=0.53, drifting=0.47, steps=21.0, rank_std=0.26)
"""Default drift, fitted to `benchmarks/traces/loss_0.npz`, trained with a balance loss, from step 128 on."""


def fitted_drift(trace: Int[np.ndarray, "steps layers R E"], per_token: int) -> Drift:
    """Fit a drift to a recording, over all its layers.

    All averages are weighted by load, so unpopular experts have little influence. For lognormal popularity, these
    weights leave the variances unchanged. The function fits `fresh + drifting (1 - exp(-lag / steps))` to the
    semivariances `V(lag)` after subtracting the sampling noise of counts. It uses least squares with shares of at least
    0, at lags 1, 2, 4, ... up to half of the steps. Each residual is relative to `V(lag)` including that noise.

    Semivariances need no mean, so a slow drift in a short recording causes no bias. `rank_std` follows from the excess
    of squared differences between ranks over sampling noise. All variances are relative to the other experts, and are
    corrected for the degree of freedom of the mean. With few experts, `spread` and `steady` are biased low, by a fifth
    with 16 experts.

    Args:
        trace: `[steps, layers, R, E]` integer counts of at least 8 steps.
        per_token: Number of experts `K` per token. A token chooses each expert at most once, so the load of popular
            experts saturates.

    Returns:
        The fitted drift, with `rank_std` and `spread`.

    Raises:
        ValueError: The recording has fewer than 8 steps, another shape or dtype or a negative count, or `per_token`
            exceeds the experts.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> popularity = rng.lognormal(0, 1, 32) * np.ones((64, 1, 4, 1))
        >>> drift = fitted_drift(rng.poisson(1000 * popularity), per_token=4)
        >>> drift.steady > 0.99, 0.5 < drift.spread < 2, drift.rank_std < 0.05
        (True, True, True)
    """
    if trace.ndim != 4 or not np.issubdtype(trace.dtype, np.integer) or trace.min(initial=0) < 0:
        raise ValueError(
            f"trace has shape {trace.shape}, dtype {trace.dtype} and minimum {trace.min(initial=0)}; expected counts "
            "[steps, layers, R, E], integers of at least 0"
        )
    check_value("per_token", per_token, Count)
    if per_token > trace.shape[3]:
        raise ValueError(f"per_token is {per_token}; expected at most the {trace.shape[3]} experts")
    if len(trace) < LEAST_STEPS:
        raise ValueError(f"the trace has {len(trace)} steps; expected at least {LEAST_STEPS} to fit a drift to")
    lags = [2**power for power in range((len(trace) // 2).bit_length())]
    found = moments(trace, per_token, lags)
    fresh, drifting, steps = _fit(lags, np.array(found.semivariances), found.noise, len(trace))
    total = max(found.variance, fresh + drifting, 1e-9)
    steady = max(1 - (fresh + drifting) / total, LEAST_STEADY)
    share = drifting / max(fresh + drifting, 1e-12) * (1 - steady)
    return Drift(steady, share, steps, math.sqrt(found.rank_variance), math.sqrt(total))


class Moments(NamedTuple):
    """Moments of log popularity in a recording, without sampling noise."""

    semivariances: tuple[float, ...]  # half the mean squared change over each lag
    variance: float  # variance over experts
    rank_variance: float  # variance of a rank's log popularity about all ranks' log popularity
    noise: float  # subtracted variance: sampling noise of counts, and text of single ranks in the sum over ranks

    @property
    def correlations(self) -> tuple[float, ...]:
        """Autocorrelation at each lag."""
        return tuple(min(1 - found / max(self.variance, 1e-9), 1.0) for found in self.semivariances)


def moments(trace: Int[np.ndarray, "steps layers R E"], per_token: int, lags: Sequence[int]) -> Moments:
    """Compute the moments used by `fitted_drift`."""
    tokens = trace.sum(2, dtype=np.int64)
    logs, noise = _log_popularity(tokens, per_token)
    shares: np.ndarray = tokens / np.maximum(tokens.sum(-1, keepdims=True), 1)
    # A weighted variance about its own weighted mean is too small by this factor.
    free = max(1 - float((shares**2).sum(-1).mean()), 1e-9)
    rank_variance = _rank_variance(trace, per_token) / free
    of_ranks = rank_variance / trace.shape[2]

    def semivariance(lag: int) -> float:
        weights = np.sqrt(tokens[lag:] * tokens[:-lag].astype(np.float64))
        changed = (logs[lag:] - logs[:-lag]) ** 2 - noise[lag:] - noise[:-lag]
        return float((changed * weights).sum() / max(weights.sum(), 1.0)) / 2 / free - of_ranks

    mean = (shares * logs).sum(-1, keepdims=True)
    without = float((shares * noise).sum(-1).mean()) / free + of_ranks
    variance = float((shares * (logs - mean) ** 2).sum(-1).mean()) / free - without
    return Moments(tuple(map(semivariance, lags)), max(variance, 0.0), rank_variance, without)


def _log_popularity(
    tokens: Num[np.ndarray, "steps layers E"], per_token: int
) -> tuple[Float[np.ndarray, "steps layers E"], Float[np.ndarray, "steps layers E"]]:
    """Return the log popularity per expert, and the variance added to it by sampling."""
    # The probability that a token chooses an expert is `1 - exp(-popularity)`, as in `skewed_counts`.
    copies = tokens.sum(-1, keepdims=True, dtype=np.float64)
    every = np.maximum(copies / per_token, 1.0)
    # Half a token keeps the logarithm of unused experts finite.
    chance = np.clip(tokens / every, 0.5 / every, 1 - 0.5 / every)
    popularity = -np.log1p(-chance)
    return np.log(popularity), chance / ((1 - chance) * popularity**2 * every)


def _rank_variance(trace: Int[np.ndarray, "steps layers R E"], per_token: int) -> float:
    """Compute the variance of ranks' log popularity about all ranks', without sampling noise."""
    counts: np.ndarray = trace.astype(np.float64)
    copies = counts.sum(3, keepdims=True)
    share = copies / np.maximum(copies.sum(2, keepdims=True), 1.0)
    mean = counts.sum(2, keepdims=True) * share
    chance = np.clip(mean * per_token / np.maximum(copies, 1.0), 1e-12, 1 - 1e-12)
    # The mean uses one of `R` degrees of freedom.
    free = 1 - share
    excess = (counts - mean) ** 2 - mean * (1 - chance) * free
    # Counts respond less to the logarithm as a probability approaches 1.
    slope = mean * (1 - chance) * -np.log1p(-chance) / chance
    square = float((slope**2 * free).sum())
    return max(float(excess.sum()) / square, 0.0) if square else 0.0


def _fit(
    lags: Sequence[int], found: Float[np.ndarray, "lags"], noise: float, longest: int
) -> tuple[float, float, float]:
    """Return the `fresh`, `drifting` and `steps` whose semivariances are nearest to those found."""
    # The residual of each semivariance is relative to its value including noise.
    scale = np.maximum(found, 0.0) + max(noise, 1e-12)
    best = (math.inf, 0.0, 0.0, 1.0)
    for steps in np.geomspace(1, longest, TIMES):
        columns = np.stack([np.ones(len(lags)), 1 - np.exp(-np.array(lags) / steps)], 1)
        (fresh, drifting), missed = scipy.optimize.nnls(columns / scale[:, None], found / scale)
        best = min(best, (missed, float(fresh), float(drifting), float(steps)))
    return best[1:]

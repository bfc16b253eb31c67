"""A `Drift` says how the popularity of experts changes from step to step; `fitted_drift` reads it off a recording."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num
from scipy.optimize import nnls

LEAST_STEADY = 0.01
"""At least this share of the variance is taken as steady, so that a shape of popularity is left."""

TIMES = 80
"""So many correlation times are tried, at even ratios, from one step to all that were recorded."""


@dataclass(frozen=True)
class Drift:
    """A drift says which part of the experts' popularity stays, which drifts, and which is new in every microbatch.

    The logarithm of an expert's popularity is a sum of three normal parts: a steady one; one that forgets itself, an
    autoregression of order 1 whose autocorrelation falls as `exp(-lag / steps)`; and one that is drawn anew for every
    step. Their variances over experts are shares of the whole. Besides, every rank has text of its own, which favours
    experts that the other ranks' text does not.

    Use it to draw counts for systems that plan from earlier steps, which a single step says nothing about. The default
    is no change at all, which flatters those systems.

    Args:
        steady: the share of the variance that stays, above 0 and at most 1.
        drifting: the share that drifts; what both leave of 1 is new in every step.
        steps: the correlation time of what drifts, in steps.
        rank_std: the standard deviation of the logarithm by which a rank's text differs from the other ranks' in a
            step; 0 for ranks that differ only as samples do.
        spread: the standard deviation of the logarithm over experts; `None` if unknown. It tells how skewed a recording
            was, and is not needed where an imbalance is asked for.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> drift = Drift(steady=0.5, drifting=0.4, steps=10.0)
        >>> [round(drift.correlation(lag), 2) for lag in (0, 1, 10, 1000)]
        [1.0, 0.86, 0.65, 0.5]
    """

    steady: float = 1.0
    drifting: float = 0.0
    steps: float = 1.0
    rank_std: float = 0.0
    spread: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.steady <= 1:
            raise ValueError(f"steady is {self.steady}; expected a share above 0 and at most 1")
        # Shares that were rounded may add up to a little more.
        if not 0 <= self.drifting <= 1 - self.steady + 1e-6:
            raise ValueError(f"drifting is {self.drifting}; expected 0 to {1 - self.steady:g}, what steady leaves")
        if not 0 < self.steps < math.inf:
            raise ValueError(f"steps is {self.steps}; expected a finite number above 0")
        for name, value in (("rank_std", self.rank_std), ("spread", self.spread)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number, at least 0")

    @property
    def fresh(self) -> float:
        """Returns the share of the variance that is new in every step."""
        return max(1 - self.steady - self.drifting, 0.0)

    def correlation(self, lag: int) -> float:
        """Computes the autocorrelation of an expert's log popularity, over experts.

        Args:
            lag: so many steps lie between.
        """
        return 1.0 if lag == 0 else self.steady + self.drifting * math.exp(-abs(lag) / self.steps)

    def path(self, times: Sequence[int], experts: int, rng: np.random.Generator) -> Float[np.ndarray, "steps E"]:
        """Draws what is added to the steady part, which has a standard deviation of 1 here.

        Args:
            times: the numbers of the steps, increasing, not all of them have to be there.
            experts: `E`.
            rng: draws.
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
"""Where nobody gives another: that of `benchmarks/traces/loss_0.npz`, with a balance loss, from step 128 on."""


def fitted_drift(trace: Int[np.ndarray, "steps layers R E"], per_token: int) -> Drift:
    """Fits a drift to a recording, all layers together.

    Every average is weighted by load, as an expert that nobody chooses decides nothing; where logarithms are normal
    that changes no variance. What remains of the semivariances `V(lag)` without the noise of counting is fitted by
    `fresh + drifting (1 - exp(-lag / steps))`, whose shares are at least 0: least squares over lags 1, 2, 4, ... up to
    half of the steps, each relative to `V(lag)` with that noise. Semivariances need no mean, so a slow drift in a short
    recording is no bias. What ranks differ by more than samples do is the excess of their squares. All variances are of
    logarithms relative to those of the other experts, and are divided by what that leaves of them. With few experts
    `spread` comes out low, and `steady` with it: by a fifth with 16.

    Args:
        trace: `[steps, layers, R, E]` of at least 8 steps.
        per_token: `K`. No token chooses an expert twice, so that loads say less of the most popular ones.

    Raises:
        ValueError: the recording is too short.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> popularity = rng.lognormal(0, 1, 32) * np.ones((64, 1, 4, 1))
        >>> drift = fitted_drift(rng.poisson(1000 * popularity), per_token=4)
        >>> drift.steady > 0.99, 0.5 < drift.spread < 2, drift.rank_std < 0.05
        (True, True, True)
    """
    if len(trace) < 8:
        raise ValueError(f"the trace has {len(trace)} steps; expected at least 8 to fit a drift to")
    lags = [2**power for power in range((len(trace) // 2).bit_length())]
    found = moments(trace, per_token, lags)
    fresh, drifting, steps = _fit(lags, np.array(found.semivariances), found.noise, len(trace))
    total = max(found.variance, fresh + drifting, 1e-9)
    steady = max(1 - (fresh + drifting) / total, LEAST_STEADY)
    share = drifting / max(fresh + drifting, 1e-12) * (1 - steady)
    return Drift(steady, share, steps, math.sqrt(found.rank_variance), math.sqrt(total))


class Moments(NamedTuple):
    """Moments are what a recording says of log popularity, without the noise of counting.

    Args:
        semivariances: half of the mean square by which it changes over each of some lags.
        variance: its variance over experts.
        rank_variance: that of a rank's text about all ranks'.
        noise: the variance of counting, and of ranks' text in their sum, that the others are without.
    """

    semivariances: tuple[float, ...]
    variance: float
    rank_variance: float
    noise: float

    @property
    def correlations(self) -> tuple[float, ...]:
        """Returns its autocorrelation at each of these lags."""
        return tuple(min(1 - found / max(self.variance, 1e-9), 1.0) for found in self.semivariances)


def moments(trace: Int[np.ndarray, "steps layers R E"], per_token: int, lags: Sequence[int]) -> Moments:
    """Computes what `fitted_drift` is fitted to.

    Args:
        trace: see `fitted_drift`.
        per_token: `K`.
        lags: steps, each fewer than the trace has.
    """
    tokens = trace.sum(2, dtype=np.int64)
    logs, noise = _log_popularity(tokens, per_token)
    shares: np.ndarray = tokens / np.maximum(tokens.sum(-1, keepdims=True), 1)
    # What is left of a weighted variance once logarithms are relative to each other.
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
    """Returns the logarithm of each expert's popularity, and the variance that counting adds to it.

    The chance of a token to choose an expert is `1 - exp(-popularity)`, as in `skewed_counts`.
    """
    copies = tokens.sum(-1, keepdims=True, dtype=np.float64)
    every = np.maximum(copies / per_token, 1.0)
    # Half a token keeps the logarithm finite where there was none.
    chance = np.clip(tokens / every, 0.5 / every, 1 - 0.5 / every)
    popularity = -np.log1p(-chance)
    return np.log(popularity), chance / ((1 - chance) * popularity**2 * every)


def _rank_variance(trace: Int[np.ndarray, "steps layers R E"], per_token: int) -> float:
    """Computes the variance of ranks' logarithms of popularity about all ranks', without that of samples."""
    counts: np.ndarray = trace.astype(np.float64)
    copies = counts.sum(3, keepdims=True)
    share = copies / np.maximum(copies.sum(2, keepdims=True), 1.0)
    mean = counts.sum(2, keepdims=True) * share
    chance = np.clip(mean * per_token / np.maximum(copies, 1.0), 1e-12, 1 - 1e-12)
    # One of `R` degrees of freedom is in the mean.
    free = 1 - share
    excess = (counts - mean) ** 2 - mean * (1 - chance) * free
    # Counts follow the logarithm the less the nearer a chance is to 1.
    slope = mean * (1 - chance) * -np.log1p(-chance) / chance
    square = float((slope**2 * free).sum())
    return max(float(excess.sum()) / square, 0.0) if square else 0.0


def _fit(
    lags: Sequence[int], found: Float[np.ndarray, "lags"], noise: float, longest: int
) -> tuple[float, float, float]:
    """Returns `fresh`, `drifting` and `steps` whose semivariances are nearest to those found.

    A semivariance is known up to some fraction of itself, the noise that was taken from it included.
    """
    scale = np.maximum(found, 0.0) + max(noise, 1e-12)
    best = (math.inf, 0.0, 0.0, 1.0)
    for steps in np.geomspace(1, longest, TIMES):
        columns = np.stack([np.ones(len(lags)), 1 - np.exp(-np.array(lags) / steps)], 1)
        (fresh, drifting), missed = nnls(columns / scale[:, None], found / scale)
        best = min(best, (missed, float(fresh), float(drifting), float(steps)))
    return best[1:]

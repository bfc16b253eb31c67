"""Runs of the training tables: systems and router losses, workloads, curves, and the counts that the testbed times."""

import dataclasses
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from benchmarks.network.testbed import CONFIG, NUM_RANKS, SYSTEMS, Case
from jax_moe_lb import Buffers, exact, plain
from jax_moe_lb.routing.capacity import capacity
from models.config import BatchConfig, TrainConfig
from models.data.corpus import Corpus
from models.data.sources import default_corpus

STEPS = 1000
"""Steps of a run."""

SEEDS = 3

BATCH_TOKENS = 256
"""Tokens of each rank in a step of the curves."""

LENGTH = 128
"""Tokens of a sequence."""

WINDOW = 100
"""Steps of a mean loss."""

SMALL = dataclasses.replace(CONFIG, batch=BatchConfig(CONFIG.batch.size, LENGTH // 4))
"""Configuration of the testbed with a quarter of the batch."""

TUNED, CUSTOMARY = 1e-1, 1e-2
"""Weights of the auxiliary loss: with the lowest validation loss of `SWEEP`, and of Switch Transformer."""

SWEEP = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Weights of the auxiliary loss to choose from."""

AUX = f" + aux {TUNED:g}"
"""End of the name of runs with the tuned loss."""

LOSSES: dict[str, dict[str, float]] = {
    "": {},
    AUX: {"aux_loss": TUNED},
    f" + aux {CUSTOMARY:g}": {"aux_loss": CUSTOMARY},
    " + bias": {"bias_rate": 1e-3},
}
"""Options of the router by the end of a run's name."""

RUNS = {
    f"{system}{end}": Case(SYSTEMS[system], **options)
    for end, options in LOSSES.items()
    for system in ("plain", "exact", "ultraep")
} | {f"capacity 1.25{AUX}": Case(plain(), capacity_factor=1.25, aux_loss=TUNED)}
"""Runs on the usual workload."""

BASE = f"plain{AUX}"
"""Run that others are compared with: `plain` with the tuned loss."""

ROOMY = f"plain, headroom 1.5{AUX}"
"""`BASE` with buffers that take its loads in one round, in more memory."""

EXACT, RATED, GATHERED = f"exact{AUX}", f"exact, headroom 1.25, rates{AUX}", f"hybridep(4){AUX}"
"""Runs that are compared with `BASE` and `ROOMY`: the default, with plans in seconds, and with all experts gathered."""

WHOLE = BASE, ROOMY, EXACT, RATED, GATHERED
"""Runs that are timed on all workloads."""

WITH_BIAS = ("plain + bias", "exact + bias", "ultraep + bias")
TRAINED = (f"ultraep{AUX}", "plain", "exact", "ultraep", *WITH_BIAS, f"capacity 1.25{AUX}")
TIMED = (*WHOLE, *TRAINED)
"""Runs on the usual workload whose steps are timed."""

CASES = RUNS | {
    ROOMY: Case(plain().replace(buffers=Buffers(headroom=1.5)), aux_loss=TUNED),
    RATED: Case(exact().replace(buffers=Buffers(headroom=1.25)), aux_loss=TUNED, has_rates=True),
    GATHERED: Case(plain(), aux_loss=TUNED, gathered=(NUM_RANKS,)),
}
"""All programs."""

CURVES = {ROOMY: BASE, RATED: EXACT, GATHERED: BASE}
"""Runs with the losses and counts of another one, up to rounding."""

USUAL, ROLLOUT = "usual", "replayed rollout"
TEXT, FREE = "another text", "another text, loss ended"
QUARTER, TWICE = "a quarter of the batch", "twice the ranks"
"""Names of workloads."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Text, batch and ranks of a run."""

    num_ranks: int = NUM_RANKS
    length: int = LENGTH
    changes_text: bool = False
    ends_loss: bool = False
    steps: int = STEPS

    @property
    def config(self) -> TrainConfig:
        """Configuration of the run: a sixteenth of the testbed's batch."""
        parallel = dataclasses.replace(CONFIG.parallel, expert_parallel=self.num_ranks)
        batch = BatchConfig(size=BATCH_TOKENS * NUM_RANKS // LENGTH, sequence_length=self.length)
        return dataclasses.replace(CONFIG, batch=batch, parallel=parallel)

    def corpus(self, step: int) -> Corpus:
        if not self.changes_text:
            return usual_text()
        return sources() if step < self.change else documentation()

    @property
    def change(self) -> int:
        """Return the first step with another text, or without a router loss."""
        return self.steps // 2


WORKLOADS = {
    USUAL: Workload(),
    TEXT: Workload(changes_text=True, steps=600),
    FREE: Workload(changes_text=True, ends_loss=True, steps=600),
    QUARTER: Workload(length=LENGTH // 4, steps=600),
    TWICE: Workload(num_ranks=2 * NUM_RANKS, steps=600),
}


@cache
def usual_text() -> Corpus:
    return default_corpus(CONFIG.data.max_corpus_bytes)


@cache
def documentation() -> Corpus:
    """Return the help topics of Python, English text."""
    return Corpus.of_text(_topics(), "help topics")


@cache
def sources() -> Corpus:
    """Return the rest of the usual text, Python sources."""
    (part,) = usual_text().parts
    (stream,) = part.streams
    text = np.asarray(stream.tokens[len(_topics()) :], np.uint8).tobytes()
    return Corpus.of_text(text, "standard library")


def _topics() -> bytes:
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Curve(NamedTuple):
    """Every step of a run, and its validation loss at the end."""

    loss: np.ndarray
    dropped: np.ndarray
    before: np.ndarray
    after: np.ndarray
    rounds: np.ndarray
    counts: np.ndarray
    validation: np.ndarray


def imbalance(counts: np.ndarray) -> np.ndarray:
    """Return `max / mean` of the ranks' load at home of counts `[..., R, E]`."""
    load = counts.sum(-2).reshape(*counts.shape[:-2], counts.shape[-2], -1).sum(-1)
    return np.asarray(load.max(-1) / load.mean(-1))


def last_mean(loss: np.ndarray) -> float:
    return float(loss[-WINDOW:].mean())


def dropped_percent(curve: Curve) -> float:
    """Return the dropped copies of all copies, in percent."""
    layers = curve.counts.shape[1]
    copies = BATCH_TOKENS * NUM_RANKS * CONFIG.model.experts_per_token * layers
    return float(100 * curve.dropped.mean() / copies)


class Key(NamedTuple):
    run: str
    workload: str = USUAL
    seed: int = 0

    def path(self, folder: Path) -> Path:
        """Return the file of the curve."""
        return folder / f"{self.workload}, {CURVES.get(self.run, self.run)}, {self.seed}.npz"


def save_curve(curve: Curve, path: Path) -> None:
    """Write a curve; a killed process leaves no part of a file under this name."""
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **curve._asdict())
    part.rename(path)


def load_curve(path: Path) -> Curve:
    with np.load(path) as file:
        return Curve(*(file[field] for field in Curve._fields))


def seeds_of(folder: Path, run: str) -> list[Curve]:
    """Return the curves of a run's seeds that exist."""
    paths = (Key(run, seed=seed).path(folder) for seed in range(SEEDS))
    return [load_curve(path) for path in paths if path.exists()]


SCALE = CONFIG.tokens_per_step // NUM_RANKS // BATCH_TOKENS
"""Tokens of the testbed over those of the curves."""


def timed_counts(case: Case, curve: Curve, number: int) -> np.ndarray:
    """Return counts `[number, layers, R, E]` of the testbed's batch, of steps in the middle of equal intervals."""
    interval, per_token = len(curve.counts) // number, CONFIG.model.experts_per_token
    counts = curve.counts[interval // 2 :: interval][:number]
    if case.capacity_factor is not None:
        limit = capacity(case.capacity_factor, BATCH_TOKENS * per_token, CONFIG.model.num_experts)
        counts = with_dropped(counts, limit, BATCH_TOKENS, per_token)
    return counts * SCALE


def with_dropped(kept: np.ndarray, limit: int, num_tokens: int, per_token: int) -> np.ndarray:
    """Return counts whose copies within capacity are the given ones."""
    missing = num_tokens * per_token - kept.sum(-1, keepdims=True)
    room = np.where(kept == limit, num_tokens - limit, 0)
    before = np.cumsum(room, -1) - room
    return (kept + np.clip(missing - before, 0, room)).astype(np.int32)

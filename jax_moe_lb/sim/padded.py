"""Exchanges of this library between processes on CPUs: rows, experts and messages sent by each rank.

An exchange consists of the permutes of `collectives/permutes.py`, one after the other on all ranks together. A permute
carries whole steps of `P / R` rows for an operand of `P` rows, as many as its largest pair needs. The operand of the
way out has all copies of a rank, and that of the way back a receive buffer. Replicas travel in the same way, those of
each slot in turn, and the gradients return together.

A round takes the next rows of every receiver's stream, and all ranks wait for the last one. The stream is sorted by
slot, then by source. In two phases static experts come first in the streams of the homes, and of a dynamic expert the
rows that move on.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jax_moe_lb.collectives.permutes import unidirectional_permutes
from jax_moe_lb.core.plan import Plan, replica_copies
from jax_moe_lb.transport.wave_rows import RowsBetween, WaveRows

RowsByRound = Int[np.ndarray, "N R R"]
"""Rows from rank to rank in each round; rows on the diagonal stay on the rank."""

TurnRows = Int[np.ndarray, "N R S"]
"""Rows per slot served in turns: no rank starts a turn before all ranks ended the one before."""


class PaddedHop(NamedTuple):
    """Rows of an exchange with the padding, over all rounds."""

    out: RowsBetween  # from rank to rank on the way out
    back: RowsBetween  # from rank to rank on the way back
    permutes_out: int  # number of permutes on the way out
    permutes_back: int  # number of permutes on the way back

    @classmethod
    def of(cls, rows: RowsByRound, rows_out: int, rows_back: int) -> "PaddedHop":
        """Return the padded rows of an exchange and of the way back."""
        (out, permutes_out), (back, permutes_back) = (
            padded_rows(rows, rows_out),
            padded_rows(rows.swapaxes(1, 2), rows_back),
        )
        return cls(out, back, permutes_out, permutes_back)


def padded_rows(rows: RowsByRound, num_rows: int) -> tuple[RowsBetween, int]:
    """Compute the rows sent from rank to rank with the padding, over all rounds of an exchange."""
    num_ranks, number = rows.shape[1], 0
    step = -(-num_rows // num_ranks)
    padded = np.zeros((num_ranks, num_ranks), np.int64)
    for pairs in unidirectional_permutes(num_ranks):
        source, target = np.array(pairs).T
        steps = int((-(-rows[:, source, target].max(1) // step)).sum())
        padded[source, target] += steps * step
        number += steps
    return padded, number


def rounds_by_share(rows: RowsBetween, capacity: int) -> RowsByRound:
    """Divide rows into rounds if all sources have about equal shares of every part of a receiver's stream."""
    total = np.maximum(rows.sum(0), 1)
    first = range(0, int(total.max()), capacity)
    return np.stack([np.ceil(rows * np.clip(total - at, 0, capacity) / total) for at in first]).astype(np.int64)


def rounds_of_stream(sizes: Int[np.ndarray, "R B"], capacity: int) -> Int[np.ndarray, "N R B"]:
    """Divide streams of consecutive blocks of rows into rounds."""
    ends = sizes.cumsum(1)
    number = max(1, -(-int(ends[:, -1].max()) // capacity))
    limits = capacity * np.arange(number + 1)[:, None, None]
    first, last = limits[:-1], limits[1:]
    return np.clip(ends, first, last) - np.clip(ends - sizes, first, last)


def rounds_of_copies(
    wave: WaveRows, capacity: int, last: Bool[np.ndarray, "E"] | None = None
) -> tuple[RowsByRound, TurnRows]:
    """Divide the copies of a direct exchange into rounds."""
    slots, num_ranks = wave.plan.placement, wave.plan.num_ranks
    held = np.maximum(slots, 0)
    by_source = wave.by_expert[:, held, np.arange(num_ranks)[:, None]].transpose(1, 2, 0)
    rows = np.where(slots[..., None] >= 0, by_source, 0)
    order = _order(np.zeros(held.shape, bool) if last is None else last[held])
    stream = np.take_along_axis(rows, order[..., None], 1)
    parts = rounds_of_stream(stream.reshape(num_ranks, -1), capacity).reshape(-1, *stream.shape)
    of_slots = np.take_along_axis(parts.sum(3), np.argsort(order, 1)[None], 2)
    return parts.sum(2).swapaxes(1, 2), of_slots


class MovedRounds(NamedTuple):
    """Rows of two phases by round."""

    between: RowsByRound  # rows from their homes to other ranks
    staying: TurnRows  # rows served at home
    moved: TurnRows  # rows served by other ranks


def rounds_in_phases(first: Plan, second: Plan, moves: Bool[np.ndarray, "E"], capacity: int) -> MovedRounds:
    """Divide the rows of two phases into the rounds of the exchange to the homes."""
    num_experts, num_ranks = second.quota.shape
    homes = np.arange(num_experts) // second.num_home
    at_home = homes[:, None] == np.arange(num_ranks)
    taken = np.where(at_home, 0, second.quota)
    stays = first.quota.sum(1) - taken.sum(1)
    # Experts that move are the last ones of a stream, and home keeps the first rows of each.
    blocks = np.hstack([stays[:, None], taken]).reshape(num_ranks, second.num_home, -1)
    order = _order(moves.reshape(num_ranks, -1))
    stream = np.take_along_axis(blocks, order[..., None], 1)
    parts = rounds_of_stream(stream.reshape(num_ranks, -1), capacity).reshape(-1, *stream.shape)
    parts = np.take_along_axis(parts, np.argsort(order, 1)[None, ..., None], 2)
    by_expert = parts.reshape(len(parts), num_experts, -1)
    held, rank = np.maximum(second.placement, 0), np.arange(num_ranks)[:, None]
    is_home = (second.placement >= 0) & (homes[held] == rank)
    is_taken = (second.placement >= 0) & ~is_home
    return MovedRounds(
        parts[..., 1:].sum(2),
        np.where(is_home, by_expert[:, held, 0], 0),
        np.where(is_taken, by_expert[:, held, 1 + rank], 0),
    )


def _order(last: Bool[np.ndarray, "R X"]) -> Int[np.ndarray, "R X"]:
    return np.argsort(last, axis=1, kind="stable")


def replicas_by_slot(plan: Plan) -> RowsByRound:
    """Count the experts copied from rank to rank for each replica slot."""
    return replica_copies(plan, from_home=True).transpose(2, 0, 1).astype(np.int64)


def padded_replicas(by_slot: RowsByRound, num_home: int, domain: int) -> PaddedHop:
    """Return the experts copied from rank to rank, and the gradients on the way back, with the padding."""
    # Ranks exchange replicas inside domains, and a permute is one operation of all domains.
    number = by_slot.shape[1] // domain
    blocks = by_slot.reshape(-1, number, domain, number, domain).diagonal(axis1=1, axis2=3)
    out, permutes_out = padded_rows(blocks.max(-1), num_home)
    back, permutes_back = padded_rows(blocks.sum(0).max(-1).T[None], max(1, len(by_slot)))
    every = np.eye(number, dtype=np.int64)
    return PaddedHop(np.kron(every, out), np.kron(every, back), permutes_out, permutes_back)


def exchange_hops(num_ranks: int, permutes: int, rounds: int) -> float:
    """Return the latencies of an exchange of few rows that a round of an exchange takes."""
    # An exchange of few rows has all permutes once, and the sum by which the ranks agree on their number.
    return (permutes / max(rounds, 1) + 1) / (len(unidirectional_permutes(num_ranks)) + 1)

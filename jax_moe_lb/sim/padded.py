"""Exchanges of this library between processes on CPUs: rows, experts and messages sent by each rank.

An exchange consists of the permutes of `collectives/permutes.py`, one after the other on all ranks together. A permute
carries whole steps of `P / R` rows for an operand of `P` rows, as many as its largest pair needs. Replicas are gathered
on a ring: all home experts pass every rank, whatever the plan.
"""

import numpy as np
from jaxtyping import Float, Int, Num

from jax_moe_lb.collectives.permutes import unidirectional_permutes

RowsBetween = Num[np.ndarray, "R R"]


def padded_rows(rows: RowsBetween, capacity: int, num_copies: int) -> tuple[Int[np.ndarray, "R R"], int]:
    """Compute the rows sent from rank to rank with their padding, over all rounds of an exchange.

    Args:
        rows: `[R, R]`, rows from rank to rank; rows on the diagonal fill the buffer as well.
        capacity: Rows of a receive buffer in one round.
        num_copies: Rows of the operand of the exchange.

    Returns:
        `[R, R]` padded rows with 0 on the diagonal, and the number of permutes.

    Examples:
        >>> import numpy as np
        >>> rows = np.array([[0, 3], [1, 0]])
        >>> padded_rows(rows, capacity=4, num_copies=4)
        (array([[0, 4],
               [2, 0]]), 3)
    """
    num_ranks, number = len(rows), 0
    step = -(-num_copies // num_ranks)
    total = np.maximum(rows.sum(0), 1)
    padded = np.zeros((num_ranks, num_ranks), np.int64)
    for first in range(0, int(total.max()), capacity):
        # A receiver fills its buffer in the order of its slots, to which all sources send about equal shares.
        landing = np.ceil(rows * np.clip(total - first, 0, capacity) / total)
        for pairs in unidirectional_permutes(num_ranks):
            source, target = np.array(pairs).T
            steps = -(-int(landing[source, target].max()) // step)
            padded[source, target] += steps * step
            number += steps
    return padded, number


def ring_experts(num_ranks: int, num_home: int, *, back: bool = False) -> Float[np.ndarray, "R R"]:
    """Compute the experts sent from rank to rank if the home experts of all ranks pass every rank.

    Args:
        num_ranks: Number of ranks `R`.
        num_home: Home experts `L` of a rank.
        back: If True, in the opposite direction, as sums of gradients; False by default.
    """
    sent = np.zeros((num_ranks, num_ranks))
    ranks = np.arange(num_ranks)
    sent[ranks, (ranks + (-1 if back else 1)) % num_ranks] = (num_ranks - 1) * num_home
    return sent


def exchange_hops(num_ranks: int, permutes: int, rounds: int) -> float:
    """Return the latencies of an exchange of few rows that a round of an exchange takes.

    An exchange of few rows has all permutes once, and the sum by which the ranks agree on their number.

    Args:
        num_ranks: Number of ranks `R`.
        permutes: Number of permutes in all rounds.
        rounds: Number of rounds.
    """
    return (permutes / max(rounds, 1) + 1) / (len(unidirectional_permutes(num_ranks)) + 1)

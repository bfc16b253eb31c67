"""`rows_of_hops` counts which rank sends how many rows to which in every hop over the rails, for the simulator."""

import numpy as np
from jaxtyping import Bool, Int

from jax_moe_lb.plan import Plan

Matrix = Int[np.ndarray, "R R"]
"""Numbers of rows from rank (row of the matrix) to rank (column)."""


def rows_of_hops(rows: Matrix, plan: Plan, ranks_per_node: int) -> tuple[Matrix, Matrix, Matrix]:
    """Counts the rows of the three hops by which `Spray` brings rows to the ranks that serve them.

    `Spray.hops` is this. Where the sender is the rail rank itself, a row stands on the diagonal: it crosses no link.

    Args:
        rows: the token copies from rank to rank.
        plan: its `rails` say how many rows take which rail; without them rows travel along the rail of the rank that
            serves them.
        ranks_per_node: how many ranks share the rails of a node.

    Returns:
        Rows inside nodes, those to rail ranks included; rows along rails, between nodes; rows from rail ranks to the
        ranks that serve them.
    """
    num_ranks, members = len(rows), ranks_per_node
    far = np.arange(num_ranks)[:, None] // members != np.arange(num_ranks)[None] // members
    nodes = num_ranks // members
    shape, same = (nodes, members, nodes, members), np.arange(nodes)
    to_rail, rail, last = (np.zeros(shape, np.int64) for _ in range(3))
    for offset in range(members):
        # Sender (d, a), receiver (f, m), by the rail ranks of this offset in both nodes.
        passing = _by_rail_rank(rows, plan, members, offset, far).reshape(shape)
        to_rail[same, :, same, offset] += passing.sum((2, 3))
        rail[:, offset, :, offset] += passing.sum((1, 3))
        last[same, offset, same, :] += passing.sum((0, 1))
    near = np.where(far, 0, rows)
    return near + to_rail.reshape(rows.shape), rail.reshape(rows.shape), last.reshape(rows.shape)


def _by_rail_rank(rows: Matrix, plan: Plan, members: int, offset: int, far: Bool[np.ndarray, "R R"]) -> Matrix:
    """Counts the rows between nodes that pass by the rail ranks of one offset, as `rail_hops.by_rail_rank`, traced."""
    receiver = np.arange(len(rows))[None] % members
    if plan.rails is None:
        return np.where(far & (receiver == offset), rows, 0)
    sharing = members // plan.rails.shape[2]
    # Where several ranks of a node share a rail, one of them takes all rows for a receiver, so that none is counted
    # twice: the one whose place among them is that of the receiver among its own.
    takes = far & (receiver % sharing == offset % sharing)
    return np.where(takes, plan.rails[:, :, offset // sharing], 0)

"""Weights and gradients that a plan moves from rank to rank are counted here; `rows_between` counts token copies."""

import numpy as np
from jaxtyping import Int

from jax_moe_lb.plan import Plan

Matrix = Int[np.ndarray, "R R"]
"""Numbers of experts from rank (row of the matrix) to rank (column), int64."""


def replicas_between(plan: Plan) -> Matrix:
    """Counts the experts whose weights are copied from rank to rank: from home, or from the relay that the plan names.

    Args:
        plan: the plan, in NumPy arrays.
    """
    sender = _homes(plan)
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        # -1 stands for no relay: the copy comes from home.
        sender = np.where(relay >= 0, relay, sender)
    return _between(sender, plan)


def gradients_between(plan: Plan) -> Matrix:
    """Counts the gradients of replicas that go home, straight, whatever the relays.

    Args:
        plan: the plan, in NumPy arrays.
    """
    return _between(_homes(plan), plan).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Counts the rows that each slot serves; 0 for an empty one.

    Args:
        plan: the plan of a wave, in NumPy arrays.
    """
    # An empty slot's -1 is read as expert 0, and its rows are then masked.
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def _homes(plan: Plan) -> Int[np.ndarray, "R X"]:
    """Returns the home rank of each replica; -1 for an empty slot."""
    replicas = plan.placement[:, plan.num_home :]
    return np.where(replicas >= 0, replicas // plan.num_home, -1)


def _between(sender: Int[np.ndarray, "R X"], plan: Plan) -> Matrix:
    there = sender >= 0
    receiver = np.broadcast_to(np.arange(plan.num_ranks)[:, None], sender.shape)
    copies = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    # `+=` with repeated indices would count a pair of ranks once, however many experts go between them.
    np.add.at(copies, (sender[there], receiver[there]), 1)
    return copies

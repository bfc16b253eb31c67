"""What a plan moves from rank to rank beside token copies, read off the plan: weights and gradients."""

import numpy as np
from jaxtyping import Int

from jax_moe_lb.plan import Plan

Matrix = Int[np.ndarray, "R R"]
"""From rank (row) to rank (column)."""


def replicas_between(plan: Plan) -> Matrix:
    """Expert weights that are copied from rank to rank: from home, or from the relay that the plan names."""
    sender = _homes(plan)
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        sender = np.where(relay >= 0, relay, sender)
    return _between(sender, plan)


def gradients_between(plan: Plan) -> Matrix:
    """Gradients of replicas that go home, straight, whatever the relays."""
    return _between(_homes(plan), plan).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Rows that each slot serves; 0 for an empty one."""
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def _homes(plan: Plan) -> Int[np.ndarray, "R X"]:
    """The home rank of each replica; -1 for an empty slot."""
    replicas = plan.placement[:, plan.num_home :]
    return np.where(replicas >= 0, replicas // plan.num_home, -1)


def _between(sender: Int[np.ndarray, "R X"], plan: Plan) -> Matrix:
    there = sender >= 0
    receiver = np.broadcast_to(np.arange(plan.num_ranks)[:, None], sender.shape)
    copies = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    np.add.at(copies, (sender[there], receiver[there]), 1)
    return copies

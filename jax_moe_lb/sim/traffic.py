"""What a plan moves from rank to rank, read off the plan: token copies, weights, gradients."""

import numpy as np
from jaxtyping import Bool, Int

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


def hops(rows: Matrix, plan: Plan, members: int, sprayed: bool) -> tuple[Matrix, ...]:
    """The exchanges, one after the other, that bring token copies to the ranks that serve them.

    Args:
        rows: of `plan.rows_between`.
        plan: its rails; without them rows travel along the rail of the rank that serves them.
        members: `M`, ranks of a domain, which share its rails.
        sprayed: whether rows for other domains pass by relays (`Spray`); else they go straight there.

    Returns:
        One matrix; or that inside domains, to relays; that along rails; that from relays.
    """
    if not sprayed:
        return (rows,)
    num_ranks = len(rows)
    far = np.arange(num_ranks)[:, None] // members != np.arange(num_ranks)[None] // members
    domains = num_ranks // members
    shape, same = (domains, members, domains, members), np.arange(domains)
    to_relay, rail, last = (np.zeros(shape, np.int64) for _ in range(3))
    for offset in range(members):
        # Sender (d, a), receiver (f, m), by the relays of this offset in both domains.
        passing = _by_relay(rows, plan, members, offset, far).reshape(shape)
        to_relay[same, :, same, offset] += passing.sum((2, 3))
        rail[:, offset, :, offset] += passing.sum((1, 3))
        last[same, offset, same, :] += passing.sum((0, 1))
    near = np.where(far, 0, rows)
    return near + to_relay.reshape(rows.shape), rail.reshape(rows.shape), last.reshape(rows.shape)


def _by_relay(rows: Matrix, plan: Plan, members: int, offset: int, far: Bool[np.ndarray, "R R"]) -> Matrix:
    """Token copies between domains that pass by relays of one offset; see `transport.rail_hops.by_relay`."""
    receiver = np.arange(len(rows))[None] % members
    if plan.rails is None:
        return np.where(far & (receiver == offset), rows, 0)
    sharing = members // plan.rails.shape[2]
    takes = far & (receiver % sharing == offset % sharing)
    return np.where(takes, plan.rails[:, :, offset // sharing], 0)


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

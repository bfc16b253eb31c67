"""ECHO: tokens beyond the mean spill to clones of hot experts, by one pass over sorted spills and rooms."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.host_callback import PlannedOnHost, served_at_home
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan


@dataclass(frozen=True)
@checked_fields
class ECHO(PlannedOnHost):
    """Elastic cloning for hot experts: spilled tokens of the hottest experts fill the emptiest ranks.

    Use it as a baseline. A rank above the mean of the domain keeps its coldest experts, as far as the mean allows; the
    rest of the tokens spill. The largest spills fill the largest rooms, one after another. A rank then clones the
    experts with the most tokens for it, as many as it has replica slots. All other tokens stay at home.

    The original plans on the GPU, without a wait for the host. This one plans in Python on the host.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.contrib import ECHO
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.diag([12, 15, 7, 6]).astype(np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = ECHO().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan), plan.placement[:, 1])
        [10 11  9 10] [-1 -1  0  1]

    Reference:
        Megatron-LM pull request 2368, its planner with the algorithm `one_shot_greedy`, without its threshold. Ties go
        to the lower index here.
    """

    def plan_on_host(self, counts: np.ndarray, plan: Plan) -> Plan:
        """Return ECHO's plan; see `PlannedOnHost`."""
        tokens, num_home = counts.sum(0).astype(np.int64), plan.num_home
        placement, quota = served_at_home(counts, plan)
        for first in range(0, plan.num_ranks, plan.domain):
            own: np.ndarray = np.arange(first * num_home, (first + plan.domain) * num_home)
            moved = spilled_tokens(tokens[own].reshape(plan.domain, num_home))
            for rank in range(plan.domain):
                hottest: np.ndarray = np.argsort(-moved[:, rank], kind="stable")[: plan.slots - num_home]
                hottest = hottest[moved[hottest, rank] > 0]
                placement[first + rank, num_home : num_home + len(hottest)] = own[hottest]
                quota[own[hottest], first + rank] += moved[hottest, rank]
                quota[own[hottest], first + hottest // num_home] -= moved[hottest, rank]
        return replace(plan, placement=placement, quota=quota.astype(np.int32))


def spilled_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens that each expert of a domain gives to each rank, if slots abound."""
    load = tokens.sum(1)
    mean = load.sum() // len(load)
    order = np.argsort(tokens, axis=1, kind="stable")
    # The coldest experts stay, up to the mean.
    beyond = np.maximum(np.take_along_axis(tokens, order, 1).cumsum(1) - mean, 0)
    spills = np.zeros_like(tokens)
    np.put_along_axis(spills, order, np.diff(beyond, axis=1, prepend=0), 1)
    spills, rooms = spills.reshape(-1), np.maximum(mean - load, 0)
    by_spill, by_room = np.argsort(-spills, kind="stable"), np.argsort(-rooms, kind="stable")
    # Spills and rooms are intervals, each one after another; a spill gives its overlap with a room.
    spill_ends, room_ends = spills[by_spill].cumsum(), rooms[by_room].cumsum()
    starts = np.maximum.outer(spill_ends - spills[by_spill], room_ends - rooms[by_room])
    moved = np.zeros((len(spills), len(rooms)), np.int64)
    moved[np.ix_(by_spill, by_room)] = np.maximum(np.minimum.outer(spill_ends, room_ends) - starts, 0)
    return moved

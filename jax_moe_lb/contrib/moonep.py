"""MoonEP: every rank serves exactly the mean load, with the most overloaded rank filling the emptiest one."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.host_callback import PlannedOnHost, served_at_home
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan


@dataclass(frozen=True)
@checked_fields
class MoonEP(PlannedOnHost):
    """MoonEP's plan: each rank of a domain serves the mean load exactly.

    Use it as a baseline. The most overloaded home rank fills the rank with the most room, even beyond its own surplus,
    until no rank is above the mean. It then gives the hottest experts first, to the largest receivers first. With as
    many replica slots as home experts, every rank serves the mean load.

    The original plans in a kernel and needs `E / R` replica slots. This one plans in Python on the host. With fewer
    slots, tokens that find no slot stay at home. If the mean is no integer, the first ranks serve one token more.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.contrib import MoonEP
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.diag([12, 15, 7, 6]).astype(np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = MoonEP().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan), plan.placement[:, 1])
        [10 10 10 10] [ 1 -1  0  1]

    Reference:
        MoonEP, github.com/MoonshotAI/MoonEP, the reference of its planning kernel.
    """

    def plan_on_host(self, counts: np.ndarray, plan: Plan) -> Plan:
        """Return MoonEP's plan; see `PlannedOnHost`."""
        size, (placement, quota) = plan.domain, served_at_home(counts, plan)
        for first in range(0, plan.num_ranks, size):
            ranks = slice(first, first + size)
            moved = receive_quotas(quota[:, ranks].sum(0))
            for home in range(size):
                _give(first + home, moved[home], first, placement, quota)
        return replace(plan, placement=placement, quota=quota.astype(np.int32))


def receive_quotas(load: np.ndarray) -> np.ndarray:
    """Return the tokens that each rank gives to each other one, so that all have the mean load."""
    ranks = np.arange(len(load))
    balance: np.ndarray = load - (load.sum() + len(load) - 1 - ranks) // len(load)
    moved = np.zeros((len(load), len(load)), np.int64)
    while balance.max() > 0:
        giver, taker = int(np.argmax(balance)), int(np.argmin(balance))
        moved[giver, taker] = -balance[taker]
        balance[giver] += balance[taker]
        balance[taker] = 0
    return moved


def _give(home: int, wanted: np.ndarray, first: int, placement: np.ndarray, quota: np.ndarray) -> None:
    """Give tokens of the hottest experts of a rank to the receivers, the largest first, as far as slots allow."""
    num_home = len(quota) // len(placement)
    own: np.ndarray = np.arange(home * num_home, (home + 1) * num_home)
    to_give: np.ndarray = wanted.copy()
    while to_give.max() > 0:
        left: np.ndarray = quota[own, home]
        taker, expert = int(np.argmax(to_give)), int(own[np.argmax(left)])
        slots = placement[first + taker]
        if expert not in slots:
            free = np.flatnonzero(slots < 0)
            if not len(free):
                to_give[taker] = 0
                continue
            slots[free[0]] = expert
        part = min(quota[expert, home], to_give[taker])
        quota[expert, home] -= part
        quota[expert, first + taker] += part
        to_give[taker] -= part

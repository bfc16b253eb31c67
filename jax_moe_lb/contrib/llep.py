"""LLEP: tokens beyond a rank's capacity spill to the least loaded ranks."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from jax_moe_lb.balancers.host_callback import PlannedOnHost, served_at_home
from jax_moe_lb.core.checks import Count, Least, checked_fields
from jax_moe_lb.core.plan import Plan


@dataclass(frozen=True)
@checked_fields
class LLEP(PlannedOnHost):
    """Least-loaded expert parallelism: tokens beyond a capacity spill to the ranks with the least load.

    Use it as a baseline. Experts are assigned from the hottest on. A home rank keeps as many tokens as its capacity
    allows, if all its colder experts stay. The rest goes to the least loaded rank with room, and so on. Domains below
    `min_imbalance` are left alone.

    The original has no replica slots: helpers receive any number of experts, and a rank beyond its capacity gives the
    rest to the least loaded helper. Here tokens that find no slot stay at home. It plans in Python on the host.

    Args:
        capacity: load that a rank may have, relative to the mean; at least 1, 1.1 by default.
        min_tokens: minimum tokens of a part given to a helper, unless they are the last; 1024 by default.
        min_imbalance: imbalance from which a domain is balanced; 1.3 by default.

    Raises:
        ValueError: an option is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.contrib import LLEP
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.diag([12, 15, 7, 6]).astype(np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> balancer = LLEP(capacity=1.0, min_tokens=1)
        >>> plan, _ = balancer.rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan), plan.placement[:, 1])
        [12 10  8 10] [-1 -1  1  1]

    Reference:
        LLEP, arXiv 2601.17111, and the authors' code (Apache-2.0), whose defaults are these options.
    """

    capacity: Annotated[float, Least(1.0)] = 1.1
    min_tokens: Count = 1024
    min_imbalance: Annotated[float, Least(1.0)] = 1.3

    def plan_on_host(self, counts: np.ndarray, plan: Plan) -> Plan:
        """Return LLEP's plan; see `PlannedOnHost`."""
        placement, quota = served_at_home(counts, plan)
        for first in range(0, plan.num_ranks, plan.domain):
            ranks = np.arange(first, first + plan.domain)
            load: np.ndarray = quota[:, ranks].sum(0)
            if load.max() * plan.domain >= self.min_imbalance * load.sum() and load.sum():
                most = max(int(self.capacity * (load.sum() // plan.domain)), 1)
                _spill_domain(ranks, most, self.min_tokens, placement, quota)
        return replace(plan, placement=placement, quota=quota.astype(np.int32))


def _spill_domain(ranks: np.ndarray, most: int, min_tokens: int, placement: np.ndarray, quota: np.ndarray) -> None:
    num_home, slots = len(quota) // len(placement), placement[ranks[0] : ranks[-1] + 1]
    own = np.arange(ranks[0] * num_home, (ranks[-1] + 1) * num_home)
    tokens = quota[own].sum(1)
    # Load of a rank: assigned tokens, and those of its experts that are not assigned yet.
    load = tokens.reshape(len(ranks), num_home).sum(1)
    for at in np.argsort(-tokens, kind="stable"):
        expert, home = int(own[at]), int(at) // num_home
        left = int(min(max(load[home] - most, 0), tokens[at]))
        while left:
            part, helper = _helper(expert, home, left, most - load, min_tokens, slots)
            if not part:
                break
            quota[expert, ranks[home]] -= part
            quota[expert, ranks[helper]] += part
            load[home] -= part
            load[helper] += part
            left -= part


def _helper(expert: int, home: int, left: int, room: np.ndarray, min_tokens: int, slots: np.ndarray) -> tuple[int, int]:
    """Return the tokens for the least loaded rank with room and a slot, and this rank; 0 tokens if there is none."""
    for helper in np.argsort(-room, kind="stable").tolist():
        part, held = int(min(left, room[helper])), slots[helper]
        if helper == home or part <= 0 or (part < min_tokens and part < left):
            continue
        free = np.flatnonzero(held < 0)
        if expert in held or len(free):
            if expert not in held:
                held[free[0]] = expert
            return part, helper
    return 0, home

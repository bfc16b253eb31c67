"""The cost of a dispatch: the traffic and memory that the simulator reads on a host."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.transport.exchange import Buffers


@dataclass(frozen=True)
class TransportCost:
    """Waves, hops and buffers of a dispatch, with NumPy arrays on a host.

    `Dispatch.cost` returns it. Derive from it for a dispatch that serves in several waves, or whose rows take several
    hops, as `MultiRailDispatch` does.

    Args:
        buffers: receive buffer of a rank.

    Examples:
        >>> from jax_moe_lb.transport import Direct
        >>> Direct().cost().buffer_rows(4096 * 8)
        34432
    """

    buffers: Buffers

    passes_home: ClassVar[bool] = False
    """True if rows of the second wave come from the homes of their experts, where the first exchange brought all rows,
    and their outputs return there first. The second counts of `waves` are then those of homes."""

    address_bytes: ClassVar[int] = 8
    """Bytes that a rank sends to every other per layer to announce its rows: two integers."""

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Return the counts and the plan of each wave: one wave by default. All waves but the last need no plan.

        Args:
            counts: `[R, E]` integers, the copies that each rank routes to each expert.
            start: the plan that the balancer started from.
            plan: the plan of the balancer.
            balancer: the balancer.

        Raises:
            ValueError: the plan is not legal, or the dispatch cannot serve by it.
        """
        del start, balancer
        check_plan(plan, counts)
        return [(counts, plan)]

    def hops(self, rows: Int[np.ndarray, "R R"], plan: Plan, topology: Topology) -> tuple[Int[np.ndarray, "R R"], ...]:
        """Return the rows from rank to rank of each consecutive exchange: one direct exchange by default.

        Args:
            rows: `[R, R]` integers, the token copies from rank to rank, as `rows_between` counts them.
            plan: the plan of their wave.
            topology: the ranks of a node and its rails.
        """
        del plan, topology
        return (rows,)

    def buffer_rows(self, num_copies: int) -> int:
        """Return the rows of a rank's buffers: those of one round by default.

        Args:
            num_copies: `T * K`, the copies of every rank.
        """
        return self.buffers.rows(num_copies)

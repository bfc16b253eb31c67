"""Cost of a dispatch: its traffic and memory, for the simulator on a host."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.transport.exchange import Buffers


@dataclass(frozen=True)
@checked_fields
class TransportCost:
    """Waves, hops and buffers of a dispatch, as NumPy arrays on a host.

    `Dispatch.cost` returns it. Write a subclass for a dispatch with several waves or hops, as `MultiRailDispatch` does.

    Args:
        buffers: receive buffer of a rank.

    Examples:
        >>> from jax_moe_lb.transport import Direct
        >>> Direct().cost().buffer_rows(4096 * 8)
        34432
    """

    buffers: Buffers

    passes_home: ClassVar[bool] = False
    """True if rows of the second wave come from the homes of their experts, and their outputs return there first.

    The first exchange then sends all rows to the homes. The second counts of `waves` are by home."""

    once_per_member: ClassVar[bool] = False
    """True if a token with several experts on one rank travels there once, and the sum of their outputs returns.

    With `by_level` the same holds for nodes. A transfer then quantizes tokens only."""

    by_level: ClassVar[bool] = False
    """True if rows for another node travel to the rank of equal offset first, and then inside the node."""

    address_bytes: ClassVar[int] = 8
    """Bytes per layer sent by a rank to each other rank to announce its rows: two integers."""

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Return the counts and the plan of each wave; by default one wave. Only the last wave needs the plan.

        Args:
            counts: `[R, E]` integers, copies routed by each rank to each expert.
            start: initial plan of the balancer.
            plan: plan of the balancer.
            balancer: balancer of the system.

        Raises:
            ValueError: the plan is illegal, or the dispatch does not support it.
        """
        del start, balancer
        check_plan(plan, counts)
        return [(counts, plan)]

    def hops(self, rows: Int[np.ndarray, "R R"], plan: Plan, topology: Topology) -> tuple[Int[np.ndarray, "R R"], ...]:
        """Return the rows between ranks in each consecutive exchange; by default one direct exchange.

        Args:
            rows: `[R, R]` integers, token copies from rank to rank, as counted by `rows_between`.
            plan: plan of the wave.
            topology: ranks of a node and its rails.

        Returns:
            `[R, R]` integers for each exchange.
        """
        del plan, topology
        return (rows,)

    def buffer_rows(self, num_copies: int) -> int:
        """Return the rows of a rank's buffers; by default the `A` rows of one round.

        Args:
            num_copies: `T * K`, token copies of a rank.
        """
        return self.buffers.rows(num_copies)

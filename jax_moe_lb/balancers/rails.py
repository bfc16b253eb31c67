"""RailS (arXiv 2510.19262): rows between nodes are spread over all rails."""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, namespace
from jax_moe_lb.planners.spray import MAX_CHUNKS, MAX_TICKS, spray


@dataclass(frozen=True)
@checked_fields
class RailS(Balancer):
    """RailS: assignment of token copies between nodes to rails; placement and quota stay unchanged.

    Use it with `MultiRailDispatch`, last in a `Chain`, if a node has several network interfaces and the ranks send or
    receive different amounts. If all ranks send equal amounts to equally distributed experts, the sender's own
    interfaces are already evenly loaded.

    A node has `Topology.ranks_per_node` ranks and `Topology.rails_per_node` rails. Its plan depends on the rows of its
    own ranks only. For each receiving node separately, the copies are cut into chunks, assigned largest first to the
    rail finishing them first. The rails of the receiving node are therefore loaded evenly, too.

    Args:
        chunks: chunks per pair of nodes and rail; 16 by default. One network interface sends and receives at most `1 +
            1 / chunks` of its share or, with few copies, one more copy per other node. 16 came within 0.2 % of the
            bound. More chunks make planning longer, and need more messages if each chunk is a message; see
            `best_chunks`.
        speeds: relative speeds of the rails, integers; 0 for a failed rail. `None` (default): all are equal.

    Raises:
        ValueError: `chunks` or `speeds` is out of range.

    Examples:
        >>> from dataclasses import replace
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import RailS, interface_rows
        >>> from jax_moe_lb.core import plain_plan
        >>> topology = replace(Topology.flat(num_ranks=4, ranks_per_domain=2), rails_per_node=2)
        >>> counts = np.array([[0, 0, 8, 0], [0, 0, 4, 0], [0, 0, 0, 0], [0, 0, 0, 0]], np.int32)
        >>> plan, _ = RailS().rebalance(counts, plain_plan(counts, topology), topology, ())
        >>> sent, received = interface_rows(plan.rails, topology.ranks_per_node)
        >>> print(sent[0], received[1])  # by rail: what node 0 sends, what node 1 receives
        [6 6] [6 6]

    Reference:
        RailS, arXiv 2510.19262.
    """

    chunks: int = 16
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks is {self.chunks}; expected 1 to {MAX_CHUNKS}")
        if self.speeds is not None:
            ticks_of(self.speeds)

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Return the reason why there is no choice of rails; `None` if there is one."""
        del num_home, slots
        if topology.num_ranks == topology.ranks_per_node:
            return "all ranks are in one node, so no row uses a rail; expected several nodes by mesh axes or domains"
        return "rails_per_node is 1, so there is no choice of rails" if topology.rails_per_node == 1 else None

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Assign the rows of all nodes to rails.

        Every rank computes the assignment of all ranks, including the rows forwarded through it. See
        `Balancer.rebalance`.

        Raises:
            ValueError: the rails do not divide the ranks of a node, or their number differs from the number of speeds.
        """
        members, num_rails = topology.ranks_per_node, topology.rails_per_node
        if members % num_rails:
            raise ValueError(
                f"Topology.rails_per_node is {num_rails}; expected a divisor of the {members} ranks of a node"
            )
        speeds = (1,) * num_rails if self.speeds is None else self.speeds
        if len(speeds) != num_rails:
            raise ValueError(f"speeds has {len(speeds)} rails; expected the {num_rails} of Topology.rails_per_node")
        rows = rows_between(counts, plan)
        ticks = namespace(rows).asarray(np.array(ticks_of(speeds), np.int32))
        return replace(plan, rails=spray(rows, ticks, members, self.chunks)), state


def ticks_of(speeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return integers proportional to the time of a row on each rail; 0 for a failed rail."""
    # Use it to call the planner with speeds (`planners/spray.py`).
    for rail, speed in enumerate(speeds):
        if speed < 0:
            raise ValueError(f"speeds of rail {rail} is {speed}; expected at least 0")
    alive = [speed for speed in speeds if speed]
    if not alive:
        raise ValueError(f"speeds is {speeds}; expected at least one speed above 0")
    multiple = math.lcm(*alive)
    # Use times, not speeds: the planner compares integer products of loads and times.
    ticks = tuple(multiple // speed if speed else 0 for speed in speeds)
    if max(ticks) > MAX_TICKS:
        raise ValueError(
            f"speeds is {speeds}, whose least common multiple is {multiple}; "
            f"expected at most {MAX_TICKS} times the slowest speed; round the speeds"
        )
    return ticks


def best_chunks(bytes_on_rail: float, bytes_per_s: float, message_s: float) -> int:
    """Return the optimal number of chunks per rail and pair of nodes, if every chunk is one message."""
    # Use it for `RailS(chunks=...)` with a custom exchange; `MultiRailDispatch` does not send one message per chunk.
    # With `c` chunks, a rail may get `1 / c` more than its share, which takes `bytes_on_rail / bytes_per_s / c`
    # seconds. `c` messages take `c * message_s` seconds. The sum is minimal at the square root of the quotient of the
    # two.
    for name, value in (("bytes_on_rail", bytes_on_rail), ("bytes_per_s", bytes_per_s), ("message_s", message_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; expected a finite number above 0")
    return round(min(max(math.sqrt(bytes_on_rail / bytes_per_s / message_s), 1), MAX_CHUNKS))


def interface_rows(rails: Int[AnyArray, "R R N"], ranks_per_node: int) -> tuple[AnyArray, AnyArray]:
    """Return the token copies sent and received between nodes by every network interface.

    Use it to inspect the balance of the rails: an exchange takes as long as its busiest interface.

    Args:
        rails: `plan.rails`, `[R, R, N]` int32, rows from rank to rank on each rail.
        ranks_per_node: ranks per node, `Topology.ranks_per_node`.

    Returns:
        Sent and received rows of each interface, `[nodes, N]` int32 each.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.balancers import interface_rows
        >>> rails = np.zeros((4, 4, 2), np.int32)
        >>> rails[0, 2] = 6, 2  # from rank 0 on node 0 to rank 2 on node 1
        >>> rails[0, 1] = 9, 0  # inside node 0, not over an interface
        >>> sent, received = interface_rows(rails, ranks_per_node=2)
        >>> print(sent.tolist(), received.tolist())
        [[6, 2], [0, 0]] [[0, 0], [6, 2]]
    """
    num_ranks, _, num_rails = rails.shape
    nodes = num_ranks // ranks_per_node
    rows = rails.reshape(nodes, ranks_per_node, nodes, ranks_per_node, num_rails).sum((1, 3), dtype=np.int32)
    # The plan assigns rows inside a node to a rail, too, but they use no interface.
    far = rows * (1 - namespace(rails).eye(nodes, dtype=np.int32))[:, :, None]
    return far.sum(1, dtype=np.int32), far.sum(0, dtype=np.int32)

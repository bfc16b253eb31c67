"""RailS (arXiv 2510.19262): every node sprays what it sends to another over all of its rails."""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, namespace
from jax_moe_lb.planners.spray import MAX_CHUNKS, MAX_TICKS, spray


@dataclass(frozen=True)
class RailS(Balancer):
    """Puts the token copies between nodes on rails, and changes nothing else.

    Use it with `MultiRailDispatch`, last in a `Chain`, where a node has several network interfaces and its ranks send
    or receive different amounts. Where all ranks send as much and choose experts alike, the sender's own interface is
    even already.

    A node is `Topology.ranks_per_node` ranks with `Topology.rails_per_node` rails; its plan follows from what its own
    ranks send. For every other node on its own, so that the other one's rails are loaded evenly too, the copies are cut
    into chunks, which go, largest first, to the rail that is done with them first.

    Args:
        chunks: how many chunks to make of each pair of nodes on each rail. One NIC sends and receives at most
            `1 + 1 / chunks` of its share, or, of few copies, up to one more for each other node. 16, the default, came
            within 0.2 % of the bound; more make planning longer, and more messages where each is a message of its own,
            see `best_chunks`.
        speeds: the speeds of the rails relative to each other, in whole numbers; 0 for a dead one. `None`, the default,
            means that all are equal.

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
    """

    chunks: int = 16
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks is {self.chunks}; expected 1 to {MAX_CHUNKS}")
        if self.speeds is not None:
            ticks_of(self.speeds)

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> str | None:
        """Says why there is no choice of rails; see `Balancer.no_op_reason`."""
        del num_home, slots
        if topology.num_ranks == topology.ranks_per_node:
            return "all ranks are of one node, and no row takes a rail; expected several, by mesh axes or domains"
        return "rails_per_node is 1, which leaves no choice" if topology.rails_per_node == 1 else None

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Puts the rows of all nodes on rails; every rank computes those of all, as it must know what will pass by it.

        See `Balancer.rebalance`.

        Raises:
            ValueError: the rails do not divide the ranks of a node, or there are not as many as speeds.
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
    """Returns whole numbers in proportion to the time that a row takes on each rail; 0 for a dead one.

    Use it to call the planner, `planners/spray.py`, with speeds.

    Args:
        speeds: the speeds of the rails relative to each other, at least 0.

    Raises:
        ValueError: a negative speed, no rail that is not dead, or speeds with no common multiple that is small enough.

    Examples:
        >>> ticks_of((4, 4, 1, 0))
        (1, 1, 4, 0)
    """
    for rail, speed in enumerate(speeds):
        if speed < 0:
            raise ValueError(f"speeds of rail {rail} is {speed}; expected at least 0")
    alive = [speed for speed in speeds if speed]
    if not alive:
        raise ValueError(f"speeds is {speeds}; expected a rail that is not dead")
    multiple = math.lcm(*alive)
    # Times and not speeds: the planner compares products of loads and times, in whole numbers.
    ticks = tuple(multiple // speed if speed else 0 for speed in speeds)
    if max(ticks) > MAX_TICKS:
        raise ValueError(
            f"speeds is {speeds}, whose least common multiple is {multiple}; "
            f"expected at most {MAX_TICKS} times the slowest: round them"
        )
    return ticks


def best_chunks(bytes_on_rail: float, bytes_per_s: float, message_s: float) -> int:
    """Says how many chunks to make of what one rail carries from one node to another, if every chunk is a message.

    Use it for `RailS(chunks=...)` with an exchange of your own; in `MultiRailDispatch` a chunk is no message. With `c`
    chunks the rail may get `1 / c` more than its share, which takes `bytes_on_rail / bytes_per_s / c`, and `c` messages
    take `c * message_s`. The sum is least at the square root of the quotient of the two.

    Args:
        bytes_on_rail: the share of one rail, in bytes.
        bytes_per_s: what the rail carries, in bytes per second; 50e9 for a NIC of 400 Gbit/s.
        message_s: what one message costs beside its bytes, in seconds.

    Raises:
        ValueError: one of them is not a finite number above 0.

    Examples:
        >>> best_chunks(bytes_on_rail=16e6, bytes_per_s=50e9, message_s=1.25e-6)
        16
    """
    for name, value in (("bytes_on_rail", bytes_on_rail), ("bytes_per_s", bytes_per_s), ("message_s", message_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; expected a finite number above 0")
    return round(min(max(math.sqrt(bytes_on_rail / bytes_per_s / message_s), 1), MAX_CHUNKS))


def interface_rows(rails: Int[AnyArray, "R R N"], ranks_per_node: int) -> tuple[AnyArray, AnyArray]:
    """Counts the token copies that every network interface sends to other nodes and receives from them.

    Use it to see how evenly a plan loads them: an exchange takes as long as its busiest interface.

    Args:
        rails: `plan.rails`, `[R, R, N]` int32, the rows from rank to rank on each rail.
        ranks_per_node: how many ranks a node has, `Topology.ranks_per_node`.

    Returns:
        What each interface sends, and what it receives, `[nodes, N]` int32 each.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.balancers import interface_rows
        >>> rails = np.zeros((4, 4, 2), np.int32)
        >>> rails[0, 2] = 6, 2  # from rank 0, on node 0, to rank 2, on node 1
        >>> rails[0, 1] = 9, 0  # inside node 0: over no interface
        >>> sent, received = interface_rows(rails, ranks_per_node=2)
        >>> print(sent.tolist(), received.tolist())
        [[6, 2], [0, 0]] [[0, 0], [6, 2]]
    """
    num_ranks, _, num_rails = rails.shape
    nodes = num_ranks // ranks_per_node
    rows = rails.reshape(nodes, ranks_per_node, nodes, ranks_per_node, num_rails).sum((1, 3), dtype=np.int32)
    # Rows inside a node stand on a rail in the plan, and travel over none.
    far = rows * (1 - namespace(rails).eye(nodes, dtype=np.int32))[:, :, None]
    return far.sum(1, dtype=np.int32), far.sum(0, dtype=np.int32)

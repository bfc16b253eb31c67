"""RailS (arXiv 2510.19262): every domain sprays what it sends to another over all of its rails."""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan, rows_between
from jax_moe_lb.planners.spray import MAX_CHUNKS, MAX_TICKS, spray
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, State, namespace


@dataclass(frozen=True)
class RailS(Balancer):
    """Puts the token copies between domains on rails, and changes nothing else: use it last, with `Spray`.

    A domain is `Topology.ranks_per_node` ranks with `Topology.rails_per_node` rails; its plan follows from what its
    own ranks send. For every other domain on its own, so that the other one's rails are loaded evenly too, the copies
    are cut into chunks, which go, largest first, to the rail that is done with them first.

    Args:
        chunks: of each pair of domains on each rail. One NIC sends and receives at most `1 + 1 / chunks` of its share,
            or, of few copies, up to one more for each other domain. More chunks mean a longer plan, and more messages
            where each is a message of its own; see `best_chunks`.
        speeds: of the rails relative to each other, in whole numbers; 0 for a dead one. `None`: all equal.
    """

    chunks: int = 16
    speeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks is {self.chunks}; expected 1 to {MAX_CHUNKS}")
        if self.speeds is not None:
            ticks_of(self.speeds)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Rails for all domains; every rank computes those of all, as it must know what will pass by it.

        Raises:
            ValueError: the rails do not divide the ranks of a domain, or there are not as many as speeds.
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
    """Whole numbers in proportion to the time that a row takes on each rail; 0 for a dead one.

    Raises:
        ValueError: a negative speed, no rail that is not dead, or speeds with no common multiple that is small enough.
    """
    for rail, speed in enumerate(speeds):
        if speed < 0:
            raise ValueError(f"speeds of rail {rail} is {speed}; expected at least 0")
    alive = [speed for speed in speeds if speed]
    if not alive:
        raise ValueError(f"speeds is {speeds}; expected a rail that is not dead")
    multiple = math.lcm(*alive)
    ticks = tuple(multiple // speed if speed else 0 for speed in speeds)
    if max(ticks) > MAX_TICKS:
        raise ValueError(
            f"speeds is {speeds}, whose least common multiple is {multiple}; "
            f"expected at most {MAX_TICKS} times the slowest: round them"
        )
    return ticks


def best_chunks(bytes_on_rail: float, bytes_per_s: float, message_s: float) -> int:
    """How many chunks to make of what one rail carries from one domain to another, if every chunk is a message.

    With `c` chunks the rail may get `1 / c` more than its share, which takes `bytes_on_rail / bytes_per_s / c`, and
    `c` messages take `c * message_s`. The sum is least at the square root of the quotient of the two.

    Args:
        bytes_on_rail: share of one rail, in bytes.
        bytes_per_s: what the rail carries.
        message_s: what one message costs beside its bytes, in seconds.

    Raises:
        ValueError: one of them is not a finite number above 0.
    """
    for name, value in (("bytes_on_rail", bytes_on_rail), ("bytes_per_s", bytes_per_s), ("message_s", message_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; expected a finite number above 0")
    return round(min(max(math.sqrt(bytes_on_rail / bytes_per_s / message_s), 1), MAX_CHUNKS))


def interface_rows(rails: Int[AnyArray, "R R N"], ranks_per_node: int) -> tuple[AnyArray, AnyArray]:
    """Token copies that every network interface sends to other nodes and receives from them, `[R / M, N]` each.

    Args:
        rails: of a plan.
        ranks_per_node: of the topology.
    """
    num_ranks, _, num_rails = rails.shape
    nodes = num_ranks // ranks_per_node
    rows = rails.reshape(nodes, ranks_per_node, nodes, ranks_per_node, num_rails).sum((1, 3), dtype=np.int32)
    far = rows * (1 - namespace(rails).eye(nodes, dtype=np.int32))[:, :, None]
    return far.sum(1, dtype=np.int32), far.sum(0, dtype=np.int32)

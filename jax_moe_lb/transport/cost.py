"""Cost of a dispatch: its traffic and memory, for the simulator on a host."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts
from jax_moe_lb.transport.exchange import Buffers
from jax_moe_lb.transport.wave_rows import EvenRouting, RowsBetween, WaveRows, spread_evenly


class RowArrays(NamedTuple):
    """Rows of the arrays of width `H` that a rank stores in one round."""

    sent: int  # rows of the operand of the exchange, gathered from tokens or from forwarded rows
    # Rows of a receive buffer from which the products' operand is gathered; 0 if products read the receive buffer
    received: int
    computed: int  # rows of the products' operand
    carried: int  # rows carried from round to round: outputs, or their sums
    carries_sums: bool = False  # whether these are sums in float32 or wider; False by default
    sent_first: int = 0  # rows of the operand of a first hop; 0 (default) for one hop
    forwarded: int = 0  # rows received in a first hop and sent on; 0 by default

    def gathered(self, copies: float) -> float:
        """Return the rows gathered by a rank in a dispatch."""
        return float(self.sent_first + self.sent + self.computed) if self.received else copies


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
    """True if rows of the second wave come from the homes of the experts, and the outputs return there first.

    The first exchange then sends all rows to the homes. The second counts of `waves` are by home."""

    once_per_member: ClassVar[bool] = False
    """True if rows are tokens, each sent once to a member, and sums of outputs return.

    The receiver gathers the copies from the rows. A transfer then quantizes tokens only."""

    by_level: ClassVar[bool] = False
    """True if each hop uses the links of one level: between nodes, or inside a node."""

    early_hops: ClassVar[int] = 0
    """Number of first hops that need no plan; they run beside the planner and the replication."""

    address_bytes: ClassVar[int] = 8
    """Bytes per layer sent by a rank to each other rank to announce its rows: two integers."""

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Return the counts and the plan per wave; by default one wave. Only the last wave needs the plan.

        Args:
            counts: `[R, E]` integers, copies by source rank and expert.
            start: initial plan of the balancer.
            plan: plan of the balancer, legal for the counts.
            balancer: balancer of the system.

        Raises:
            ValueError: the dispatch does not support the plan.
        """
        del start, balancer
        return [(counts, plan)]

    def hops(self, wave: WaveRows, topology: Topology) -> tuple[RowsBetween, ...]:
        """Return the rows between ranks in each consecutive exchange; by default one direct exchange of all copies.

        Args:
            wave: copies of the wave, and tokens with copies in each member.
            topology: ranks of a node and its rails.

        Returns:
            `[R, R]` per exchange; rows on the diagonal stay on the rank.

        Raises:
            ValueError: the dispatch does not support the plan.
        """
        del topology
        return (wave.copies,)

    def even_hops(self, routing: EvenRouting, sizes: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
        """Return the rows of a rank in each exchange under uniform routing and plain expert parallelism.

        `hops` returns the same rows for equal counts. This method needs no arrays, so it suits any number of ranks.

        Args:
            routing: numbers of experts and tokens.
            sizes: members of the group at each level, outermost first.

        Returns:
            For each exchange the rows by the outermost level on which source and destination differ.
        """
        return (spread_evenly(float(routing.num_tokens * routing.per_token), sizes),)

    def rounds(self, wave: WaveRows, topology: Topology, num_copies: int) -> int:
        """Return the number of rounds of a wave; by default by the load of the busiest rank.

        Args:
            wave: copies of the wave, with its plan.
            topology: ranks of a node.
            num_copies: `T * K`, token copies of a rank.
        """
        del topology
        # Ceiling division in integers.
        return -(-int(load(wave.plan).max()) // self.buffers.rows(num_copies))

    def row_arrays(self, num_tokens: int, per_token: int, topology: Topology) -> RowArrays:
        """Return the rows of the arrays of a round; by default copies as sent, and the receive buffer.

        Args:
            num_tokens: `T`, tokens of a rank.
            per_token: `K`, experts per token.
            topology: ranks and nodes of the layer.
        """
        del topology
        copies = num_tokens * per_token
        return RowArrays(copies, 0, self.buffer_rows(copies), copies)

    def chunks_of_hops(self) -> tuple[int, int]:
        """Return the exchanges per hop, on the way out and back; a chunk's first hop runs beside the last one's second.

        By default 1: each hop waits for the whole hop before it.
        """
        return 1, 1

    def choice_bytes(self, per_token: int) -> int:
        """Return the bytes sent beside each row: with `once_per_member`, the slot and the weight of every choice.

        Args:
            per_token: `K`, experts per token.
        """
        # Weights are float32, and slots travel in the dtype of the weights.
        return 2 * 4 * per_token if self.once_per_member else 0

    def buffer_rows(self, num_copies: int) -> int:
        """Return the rows of a rank's products; by default the `A` rows of one round.

        Args:
            num_copies: `T * K`, token copies of a rank.
        """
        return self.buffers.rows(num_copies)

"""Rows of a dispatch in lists, `Once` or `Forward`, that travel under a plan, for timelines.

Counts do not record which experts a token combines, so the rows are the estimates of `transport/wave_rows.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_moe_lb.aot.sizes import LayerSizes
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.wave_rows import WaveRows


class ListHop(NamedTuple):
    """Exchanges of lists inside groups of ranks."""

    rows: Int[np.ndarray, "G P P"]  # rows from rank (second) to rank (third) of each group, in all rounds
    sent: int  # rows of an operand on the way out
    received: int  # rows of an operand on the way back
    chunks: int = 1  # exchanges of the rows of a round


@dataclass(frozen=True, eq=False)
class ListLoad:
    """Rows of all hops of a dispatch in lists."""

    hops: tuple[ListHop, ...]  # one hop, or the hop between nodes and the hop inside nodes
    rounds: int  # rounds of the last hop
    choice_bytes: int  # bytes of the choices of a row, which travel in one exchange for all chunks

    @classmethod
    def of(
        cls, dispatch: Dispatch, sizes: LayerSizes, topology: Topology, counts: Counts, plan: Plan
    ) -> "ListLoad | None":
        """Count the rows of a dispatch; None if the rows are copies."""
        cost, (tokens, per_token) = dispatch.cost(), (sizes.tokens, sizes.per_token)
        if not cost.once_per_member:
            return None
        wave = WaveRows(counts, plan, per_token)
        between = [np.ceil(rows).astype(np.int64) for rows in cost.hops(wave, topology)]
        arrays, number = cost.row_arrays(tokens, per_token, topology), dispatch.buffers.chunks
        rounds = max(1, cost.rounds(wave, topology, tokens * per_token))
        choice_bytes = cost.choice_bytes(per_token)
        everyone = np.arange(topology.num_ranks)[None]
        if len(between) == 1:
            hop = ListHop(_inside(between[0], everyone), arrays.sent, arrays.received)
            return cls((hop,), rounds, choice_bytes)
        nodes = everyone.reshape(-1, topology.levels[-1].size)
        part = -(-tokens // number)
        number = -(-tokens // part)
        first, forwarded = part * min(per_token, len(nodes)), part * len(nodes)
        sent = min(arrays.received, forwarded * min(per_token, nodes.shape[1]))
        return cls(
            (
                ListHop(_inside(between[0], nodes.T), first, forwarded, number),
                ListHop(_inside(between[1], nodes), sent, arrays.received, number),
            ),
            rounds,
            choice_bytes,
        )

    def bytes_of(self, hop: int, i: int, nbytes: int, *, is_back: bool) -> list[Int[np.ndarray, "P P 1"]]:
        """Return the bytes between the ranks per group in one exchange."""
        one, rows = self.hops[hop], self.hops[hop].rows
        width = nbytes // (one.received if is_back else one.sent)
        chunks = one.chunks
        if hop == len(self.hops) - 1:
            rows = part_of_round(rows, i, self.rounds)
            if nbytes <= self.choice_bytes * one.received:
                chunks, width = 1, width if is_back else self.choice_bytes
        rows = -(-(rows.transpose(0, 2, 1) if is_back else rows) // chunks)
        return list(rows[..., None] * width)


def part_of_round(rows: Int[np.ndarray, "..."], i: int, rounds: int) -> Int[np.ndarray, "..."]:
    """Return the part of rows in round `i` that are spread evenly over the rounds."""
    return rows * (i + 1) // rounds - rows * i // rounds


def _inside(rows: Int[np.ndarray, "R R"], groups: Int[np.ndarray, "G P"]) -> Int[np.ndarray, "G P P"]:
    """Return the rows between the ranks per group."""
    return rows[groups[:, :, None], groups[:, None]]

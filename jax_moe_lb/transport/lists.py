"""Lists of rows between the ranks of a group: an entry travels once to each rank that serves copies of it.

An *entry* is a token of this rank, or a row that this rank forwards. A rank sends one list to each rank of the group:
the entries with copies there, in order. In step `i` of `n`, rows with an even share of the copies of every list travel,
so no rank receives more than a receive buffer of copies. A round is one step, or one of each chunk. All ranks learn the
sizes of all lists from one all-gather.
"""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jax_moe_lb.collectives.ragged_all_to_all import (
    Group,
    Slices,
    concatenated,
    empty_buffer,
    empty_buffer_now,
    ragged_all_to_all,
    starts,
)
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.core.types import iota, pytree
from jax_moe_lb.kernels.slot_places import RowOwners, sum_rows
from jax_moe_lb.transport.exchange import TILE_ROWS, rows_at

GroupMatrix = Int[Array, "G G"]
"""One number per sender and receiver of a group of `G` ranks."""

PerChoice = Int[Array, "N K"]
"""One integer per entry and choice."""


@dataclass(frozen=True)
class Hop:
    """Exchange on the route of rows: each rank of a group sends one block to each other rank, with known sizes."""

    # Use it if the table of blocks follows from the plan: ranks then need not exchange sizes.

    group: Group  # ranks of the exchange
    size: GroupMatrix  # rows from each sender to each receiver
    first: GroupMatrix  # first row of each block in the sender's array
    lands: GroupMatrix  # first row of each block in the receiver's array

    def there(self, rows: Shaped[Array, "P H"], into: Shaped[Array, "Q H"], site: str) -> Shaped[Array, "Q H"]:
        """Send rows to the receivers."""
        me = self.group.me
        slices = Slices(self.first[me], self.size[me], self.lands[me], self.size[:, me])
        return ragged_all_to_all(rows, into, slices, self.group, site=site)

    def back(self, rows: Shaped[Array, "Q H"], into: Shaped[Array, "P H"], site: str) -> Shaped[Array, "P H"]:
        """Return rows to the senders; the transpose of `there`."""
        me = self.group.me
        slices = Slices(self.lands[:, me], self.size[:, me], self.first[:, me], self.size[me])
        return ragged_all_to_all(rows, into, slices, self.group, site=site)


@pytree
class Lists:
    """Lists of a rank for all ranks of the group."""

    # A *row* is an entry in the list of one rank. `Q = N * min(K, P)` bounds their number, or a limit of `P`.

    entry: Int[Array, "Q"]  # entry of each row; rows are sorted by rank, then by entry
    rank: Int[Array, "Q"]  # rank of each row; the rows of all lists come first, and the others have rank `P`
    before: Int[Array, "Q"]  # copies of earlier rows; the highest integer for rows of no list
    row: PerChoice  # row of each choice; `Q` for none
    code: PerChoice  # code of each choice, above 0, such as its slot plus 1; 0 for none
    copies: Int[Array, "P"]  # copies in each list
    steps: Int[Array, ""]  # number of steps, at least 1 and equal on all ranks
    tables: Int[Array, "C P P"]  # rows from each rank to each rank in the steps of the first round, one of each chunk

    @classmethod
    def of(
        cls,
        rank: PerChoice,
        code: PerChoice,
        rounds: Int[Array, ""] | int,
        group: Group,
        max_ranks: int | None = None,
        chunks: int = 1,
    ) -> "Lists":
        """Make the lists of a rank, and gather the sizes of the lists of all ranks."""
        (num_entries, per_entry), num_ranks = rank.shape, jax.lax.axis_size(group.axes)
        num_rows = num_entries * min(per_entry, num_ranks, max_ranks or num_ranks)
        copies = (rank[None] == iota(num_ranks)[:, None, None]).sum(2, dtype=jnp.int32).reshape(-1)
        place = starts((copies > 0).astype(jnp.int32))
        cell = jnp.maximum(rank, 0) * num_entries + iota(num_entries)[:, None]
        row = jnp.where(rank >= 0, place[cell], num_rows)
        # Only the first choice of each row is written, so the indices are unique.
        first = jnp.where(is_first(row, num_rows), row, num_rows).reshape(-1)
        cells = jnp.full_like(first, copies.shape[0], shape=num_rows).at[first].set(cell.reshape(-1), mode="drop")
        # Rows of no list are in no step.
        before = starts(copies).at[cells].get(mode="fill", fill_value=INT32_MAX)
        by_rank = copies.reshape(num_ranks, num_entries).sum(1, dtype=jnp.int32)
        coded = jnp.where(rank >= 0, code, 0)
        entry, of_rank = cells % max(num_entries, 1), cells // max(num_entries, 1)
        lists = cls(
            entry,
            of_rank,
            before,
            row,
            coded,
            by_rank,
            jnp.maximum(rounds, 1) * chunks,
            jnp.zeros((chunks, num_ranks, num_ranks), jnp.int32),
        )
        return replace(lists, tables=lists._gathered(lists._edges(0), group))

    def round(self, i: Int[Array, ""] | int, num_sent: int, group: Group) -> "Step":
        """Return the rows of round `i` as one exchange."""
        edges = self._edges(i)
        table = self._tables(i, edges, group).sum(0, dtype=jnp.int32)
        return Step(self, edges[0], edges[-1] - edges[0], table, min(num_sent, self.entry.shape[0]), group)

    def steps_of_round(self, i: Int[Array, ""] | int, num_sent: int, group: Group) -> tuple["Step", ...]:
        """Return the exchanges of round `i`, one of each chunk; their rows return into the array of the whole round."""
        edges = self._edges(i)
        tables = self._tables(i, edges, group)
        returns = starts(tables.sum(0, dtype=jnp.int32), 1)[None] + starts(tables, 0)
        num_sent = min(num_sent, self.entry.shape[0])
        return tuple(
            Step(self, first, last - first, tables[c], num_sent, group, returns=returns[c])
            for c, (first, last) in enumerate(itertools.pairwise(edges))
        )

    def _tables(self, i: Int[Array, ""] | int, edges: list[Int[Array, "P"]], group: Group) -> Int[Array, "C P P"]:
        return self.tables if isinstance(i, int) and i == 0 else self._gathered(edges, group)

    def _gathered(self, edges: list[Int[Array, "P"]], group: Group) -> Int[Array, "C P P"]:
        sizes = jnp.stack([last - first for first, last in itertools.pairwise(edges)])
        return jax.lax.all_gather(sizes, group.axes, axis=1)

    def _edges(self, i: Int[Array, ""] | int) -> list[Int[Array, "P"]]:
        """Return the first row per list in each step of round `i`, and in the step after the last one."""
        chunks = self.tables.shape[0]
        return [self._edge(i * chunks + c) for c in range(chunks + 1)]

    def share(self, i: Int[Array, ""] | int) -> Int[Array, "P"]:
        """Return the copies per list before step `i`, `floor(copies * i / steps)`."""
        i = jnp.minimum(i, self.steps)
        # Without products above 2^31.
        return self.copies // self.steps * i + self.copies % self.steps * i // self.steps

    def _edge(self, i: Int[Array, ""] | int) -> Int[Array, "P"]:
        """Return the first row per list in step `i` or later: the first with as many copies before it."""
        first = starts(self.copies) + self.share(i)
        return (self.before[None] < first[:, None]).sum(1, dtype=jnp.int32)


@dataclass(frozen=True)
class Step:
    """One exchange of parts of all lists; made by `Lists.round` and `Lists.steps_of_round`."""

    lists: Lists  # lists of this rank
    first: Int[Array, "P"]  # first row of each list in this step
    size: Int[Array, "P"]  # rows of each list in this step
    table: Int[Array, "P P"]  # rows from each rank to each rank
    num_sent: int  # rows of the operand
    group: Group  # ranks of the lists
    # First entry of the step, and the one after the last; `None` (default) for all entries
    entries: tuple[int, int] | None = None
    # First row of each block in the receive buffer; `None` (default) if the buffer has only the rows of this step
    lands: Int[Array, "P P"] | None = None
    # First row of each block in the array of returned rows; `None` (default) if it has only the rows of this step
    returns: Int[Array, "P P"] | None = None

    def chunks(self, number: int, num_sent: int, *, in_one_buffer: bool) -> tuple["Step", ...]:
        """Split the step by entries, into exchanges of their own."""
        if number == 1:
            return (self,)
        lists, num_ranks = self.lists, self.size.shape[0]
        num_entries = lists.row.shape[0]
        part = -(-num_entries // number)
        bounds = [min(at * part, num_entries) for at in range(number + 1)]
        # [P, Q]: rows of each list; those of no list have a rank out of range.
        mine = lists.rank[None] == iota(num_ranks)[:, None]
        starts_of = starts(mine.sum(1, dtype=jnp.int32))
        edges = [starts_of + (mine & (lists.entry < bound)[None]).sum(1, dtype=jnp.int32) for bound in bounds]
        edges = [jnp.clip(edge, self.first, self.first + self.size) for edge in edges]
        sizes = [last - first for first, last in itertools.pairwise(edges)]
        tables = jax.lax.all_gather(jnp.stack(sizes), self.group.axes, axis=1)
        earlier = starts(tables, 0)
        whole = starts(self.table, 0)
        return tuple(
            replace(
                self,
                first=edges[at],
                size=sizes[at],
                table=tables[at],
                num_sent=min(num_sent, lists.entry.shape[0]),
                entries=(bounds[at], bounds[at + 1]),
                lands=whole + earlier[at] if in_one_buffer else None,
            )
            for at in range(number)
        )

    @property
    def sent(self) -> Int[Array, "B"]:
        """Row of the lists at each position of the operand, `[B]` int32."""
        return concatenated(self.first, self.size, self.num_sent)

    @property
    def position(self) -> Int[Array, "Q"]:
        """Position per row in the operand, `[Q]` int32; negative for rows of other steps."""
        rank, row = self.lists.rank, iota(self.lists.rank.shape[0])
        # Rows of no list have a rank out of range: their size is 0.
        first, size, start = (
            value.at[rank].get(mode="fill", fill_value=0) for value in (self.first, self.size, starts(self.size))
        )
        offset = row - first
        return jnp.where((offset >= 0) & (offset < size), start + offset, -1)

    def _hop(self) -> Hop:
        table = self.table
        return Hop(self.group, table, starts(table, 1), starts(table, 0) if self.lands is None else self.lands)

    def send(self, entries: Float[Array, "N W"], into: Float[Array, "A W"], site: str) -> Float[Array, "A W"]:
        """Send each entry once to the ranks of the rows in this step."""
        first = 0 if self.entries is None else self.entries[0]
        rows = rows_at(entries, self.lists.entry[self.sent] - first)
        return self._hop().there(rows, into, site)

    def of_rows(self, values: Shaped[Array, "N K"]) -> Shaped[Array, "B K"]:
        """Return the values of the entry of each sent row."""
        return values[self.lists.entry[self.sent]]

    def codes(self) -> Int[Array, "B K"]:
        """Return the codes of the choices per sent row; 0 for choices of other ranks."""
        mine = self.of_rows(self.lists.row) == self.sent[:, None]
        return jnp.where(mine, self.of_rows(self.lists.code), 0)

    def exchange(self, rows: Shaped[Array, "B W"], num_rows: int, site: str) -> Shaped[Array, "A W"]:
        """Send one row of an array per sent row, into a new buffer; see `send`."""
        return self._hop().there(rows, empty_buffer(rows, num_rows), site)

    def clear(self, received: Shaped[Array, "A W"]) -> Shaped[Array, "A W"]:
        """Return received rows, with 0 in rows that were not received."""
        num_received = self.table[:, jax.lax.axis_index(self.group.axes)].sum(dtype=jnp.int32)
        return jnp.where((iota(received.shape[0]) < num_received)[:, None], received, 0)

    def sum_back(self, rows: Float[Array, "A W"], site: str) -> Float[Array, "N W"]:
        """Return rows to the sources and sum those of each entry; the transpose of `send`."""
        return self.sums(self.back(rows, self.returned(rows), site))

    def sums(self, returned: Float[Array, "B W"]) -> Float[Array, "N W"]:
        """Sum the returned rows of each entry."""
        lists, num_ranks = self.lists, self.size.shape[0]
        row = lists.row if self.entries is None else lists.row[slice(*self.entries)]
        at = jnp.append(self.position, -1)[row]
        if num_ranks < at.shape[1]:
            ranks = jnp.append(lists.rank, num_ranks)[row]
            at = jnp.stack([jnp.where(ranks == rank, at, -1).max(1) for rank in range(num_ranks)], 1)
        else:
            at = jnp.where(is_first(row, lists.rank.shape[0]), at, -1)
        return sum_rows(returned, at, owners=self._owners())

    def _owners(self) -> RowOwners:
        first, last = (0, self.lists.row.shape[0]) if self.entries is None else self.entries
        is_sent = iota(self.num_sent) < self.size.sum(dtype=jnp.int32)
        return RowOwners(jnp.where(is_sent, self.lists.entry[self.sent] - first, last - first))

    def choices_back(self, values: Float[Array, "A K"], site: str) -> Float[Array, "N K"]:
        """Return one number per choice from the rank that serves it; the transpose of `send_choices`."""
        return self.choices(self.back(values, self.returned(values), site))

    def choices(self, returned: Float[Array, "B K"]) -> Float[Array, "N K"]:
        """Return the returned number of each choice."""
        at = jnp.append(self.position, -1)[self.lists.row]
        choice = iota(returned.shape[1])[None]
        return jnp.where(at >= 0, returned[jnp.maximum(at, 0), choice], 0)

    def returned(self, rows: Array) -> Array:
        """Allocate the array of returned rows."""
        return empty_buffer_now(rows, self.num_sent)

    def back(self, rows: Shaped[Array, "A W"], into: Shaped[Array, "B W"], site: str) -> Shaped[Array, "B W"]:
        """Return rows to the sources."""
        hop = self._hop()
        return (hop if self.returns is None else replace(hop, first=self.returns)).back(rows, into, site)


def is_first(row: PerChoice, none: int) -> Bool[Array, "N K"]:
    """Return whether each choice is the first of the entry with the same row."""
    again = [(row[:, :k] == row[:, k, None]).any(1) for k in range(row.shape[1])]
    return (row != none) & ~jnp.stack(again, 1)


def rows_with_padding(num_rows: int, per_token: int, num_sources: int) -> int:
    """Return the rows of a buffer for lists with so many copies, and `K` more per source."""
    # A list has an even share of its copies in a step, rounded up, and the last row may have `K - 1` more.
    rows = num_rows + per_token * num_sources
    return rows if rows < 8 * TILE_ROWS else -(-rows // TILE_ROWS) * TILE_ROWS


def rows_of_chunk(num_copies: int, per_token: int, num_ranks: int, chunks: int) -> int:
    """Return the most rows that a rank sends in one of several chunks, each with an even share of every list."""
    return rows_with_padding(-(-num_copies // chunks), per_token, num_ranks)

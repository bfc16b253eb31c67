"""Sizes of a layer, and its token copies and replicas under a plan: bytes of exchanges and rows of products."""

import itertools
import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_moe_lb.core.checks import Count, checked_fields, shown
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.file_limits import REMEDY, LimitError
from jax_moe_lb.core.plan import Plan, replica_copies
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts
from jax_moe_lb.layer.facts import layer_facts
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.layer.systems import System
from jax_moe_lb.recordings.counts_files import MOST_ENTRIES, read_counts
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.lists import rows_of_chunk, rows_with_padding
from jax_moe_lb.transport.wave_rows import WaveRows

LETTERS = {"H": "hidden", "F": "inner", "E": "experts", "T": "tokens", "K": "per_token"}
EXPECTED_SIZES = "some of H, F, E, T and K, such as H=2048,F=768,E=128,T=4096,K=8"
MOST = 2**31 - 1


@dataclass(frozen=True)
@checked_fields
class LayerSizes:
    """Sizes of a layer; Qwen3-30B-A3B with 4096 tokens per rank by default.

    Args:
        hidden: Model width `H`; 2048 by default.
        inner: Inner width `F` of an expert; 768 by default.
        experts: Number of experts `E`; 128 by default.
        tokens: Tokens `T` per rank; 4096 by default.
        per_token: Experts `K` per token; 8 by default.

    Raises:
        ValueError: A size is below 1.

    Examples:
        >>> from jax_moe_lb.aot import LayerSizes
        >>> LayerSizes.parse("E=64,T=1024")
        LayerSizes(hidden=2048, inner=768, experts=64, tokens=1024, per_token=8)
    """

    hidden: Count = 2048
    inner: Count = 768
    experts: Count = 128
    tokens: Count = 4096
    per_token: Count = 8

    @classmethod
    def parse(cls, text: str) -> "LayerSizes":
        """Parse sizes from text; missing sizes keep their defaults.

        Args:
            text: Sizes such as `H=2048,F=768,E=128,T=4096,K=8`.

        Raises:
            ValueError: A letter is unknown or repeated, or a size is no integer of at least 1.
        """
        given: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"([HFETK])=(0*[1-9]\d{0,9})", part.strip(), re.ASCII)
            if found is None or LETTERS[found[1]] in given or int(found[2]) > MOST:
                raise ValueError(f"sizes is {text[:100]!r}; expected {EXPECTED_SIZES}")
            given[LETTERS[found[1]]] = int(found[2])
        return replace(cls(), **given)

    @property
    def by_letter(self) -> dict[str, int]:
        """Sizes by letter."""
        return {letter: getattr(self, name) for letter, name in LETTERS.items()}

    @property
    def ideal_flops(self) -> int:
        """Floating-point operations of a rank in a forward pass: of the token copies and of the router."""
        copies = 3 * self.per_token * self.inner
        return 2 * self.tokens * self.hidden * (copies + self.experts)


def check_sizes(sizes: LayerSizes, num_devices: int) -> None:
    """Check that a layer has a place on all devices of a target."""
    if sizes.experts % num_devices:
        raise ValueError(f"E is {sizes.experts}; expected a multiple of the target's {num_devices} devices")
    if sizes.per_token > sizes.experts:
        raise ValueError(f"K is {sizes.per_token}; expected at most E, {sizes.experts}")
    for letter, size, number, most, what in (
        ("T", sizes.tokens, num_devices * sizes.tokens * sizes.per_token, MOST, "token copies of all ranks"),
        ("T", sizes.tokens, sizes.tokens * sizes.hidden, MOST, "elements of the tokens of a rank"),
        ("E", sizes.experts, num_devices * sizes.experts, MOST_ENTRIES, "counts of all ranks"),
    ):
        if number > most:
            raise ValueError(f"{letter} is {size}; expected at most {most} {what}, not {number}")


DEFAULT_LOAD = "zipf:1.0"
"""Load of a timeline by default: the popularity of an expert falls with the place, at random homes."""

EXPECTED_LOAD = "uniform, zipf:EXPONENT such as zipf:1.0, or a file of counts, .npy or .npz"

Slices = Int[np.ndarray, "R R S"]
"""Rows, or experts, from rank (first) to each slot (third) of a rank (second)."""


class ListHop(NamedTuple):
    """Exchanges of lists inside groups of ranks."""

    rows: Int[np.ndarray, "G P P"]  # rows from rank (second) to rank (third) of each group, in all rounds
    sent: int  # rows of an operand on the way out
    received: int  # rows of an operand on the way back
    chunks: int = 1  # exchanges of the rows of a round
    # Rows of these operands in an exchange of one chunk of `Once`, which has all rows in the backward pass; 0 otherwise
    chunk_sent: int = 0
    chunk_received: int = 0


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
            copies, num_ranks = tokens * per_token, topology.num_ranks
            hop = ListHop(_inside(between[0], everyone), arrays.sent, arrays.received)
            if number > 1:
                sent = min(arrays.sent, rows_of_chunk(copies, per_token, num_ranks, number))
                received = rows_with_padding(dispatch.buffers.chunk_rows(copies), per_token, num_ranks)
                hop = hop._replace(chunks=number, chunk_sent=sent, chunk_received=received)
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

    def bytes_of(
        self, hop: int, i: int, nbytes: int, operand_rows: int, *, is_back: bool
    ) -> list[Int[np.ndarray, "P P 1"]]:
        """Return the bytes between the ranks per group in one exchange with an operand of so many rows."""
        one, rows = self.hops[hop], self.hops[hop].rows
        of_round, of_chunk = (one.received, one.chunk_received) if is_back else (one.sent, one.chunk_sent)
        chunks = one.chunks
        if of_chunk:
            # The program may view a row as several.
            is_chunk = operand_rows % of_round != 0 and operand_rows % of_chunk == 0
            chunks, of_round = (chunks, of_chunk) if is_chunk else (1, of_round)
        width = nbytes // of_round
        if hop == len(self.hops) - 1:
            rows = part_of_round(rows, i, self.rounds)
            if nbytes <= self.choice_bytes * one.received:
                chunks, width = chunks if of_chunk else 1, width if is_back else self.choice_bytes
        rows = -(-(rows.transpose(0, 2, 1) if is_back else rows) // chunks)
        return list(rows[..., None] * width)


def part_of_round(rows: Int[np.ndarray, "..."], i: int, rounds: int) -> Int[np.ndarray, "..."]:
    """Return the part of rows in round `i` that are spread evenly over the rounds."""
    return rows * (i + 1) // rounds - rows * i // rounds


def _inside(rows: Int[np.ndarray, "R R"], groups: Int[np.ndarray, "G P"]) -> Int[np.ndarray, "G P P"]:
    return rows[groups[:, :, None], groups[:, None]]


@dataclass(frozen=True, eq=False)
class LayerLoad:
    """Load of one layer under the plan of its system.

    Args:
        name: Text of the load, such as `zipf:1.0`.
        waves: Rows per exchange from home to slots: one exchange, or two phases.
        copies: Token copies `T * K` of a rank.
        capacity: Rows `A` of a rank in one round.
        plan: Plan of the layer.
        moved_on: `[R, S]`, rows per home slot that the second wave serves on other ranks, the last rows of the
            stream of their home; None (default) for one wave.
        lists: rows of a dispatch in lists; None (default) for token copies.

    Examples:
        >>> from jax_moe_lb import Topology, exact
        >>> from jax_moe_lb.aot import LayerLoad, LayerSizes, counts_of
        >>> sizes, topology = LayerSizes(experts=16, tokens=256, per_token=2), Topology.flat(8)
        >>> load = LayerLoad.of(exact(), sizes, topology, counts_of("zipf:1.2", sizes, 8))
        >>> load.rounds, load.imbalance < 1.05
        (1, True)
    """

    name: str
    waves: tuple[Slices, ...]
    copies: int
    capacity: int
    plan: Plan
    moved_on: Int[np.ndarray, "R S"] | None = None
    lists: ListLoad | None = None

    @classmethod
    def of(
        cls, system: System, sizes: LayerSizes, topology: Topology, counts: Counts, name: str = "counts"
    ) -> "LayerLoad":
        """Plan for counts on this host, as the program does.

        Args:
            system: System of the program.
            sizes: Sizes of the layer.
            topology: Ranks of the layer.
            counts: `[R, E]` int32, token copies by source rank and expert.
            name: Name in tables.

        Raises:
            ValueError: The counts do not fit the sizes, or the balancer rejects them.
        """
        expected = (topology.num_ranks, sizes.experts)
        copies = sizes.tokens * sizes.per_token
        if counts.shape != expected or counts.sum(1).max() > copies:
            raise ValueError(
                f"counts has shape {counts.shape} and up to {counts.sum(1).max()} copies of a rank; expected shape "
                f"{expected} and at most {copies}"
            )
        tokens = jax.ShapeDtypeStruct((sizes.tokens, sizes.hidden), jnp.bfloat16)
        weights = jax.ShapeDtypeStruct((sizes.tokens, sizes.per_token), jnp.float32)
        num_home = sizes.experts // topology.num_ranks
        system = system.by_rule(topology, sizes.experts, sizes.per_token, tokens).limit_slots(sizes.experts, num_home)
        experts, slots = jax.eval_shape(partial(_experts, sizes, num_home)), num_home + system.replica_slots
        facts = layer_facts(tokens, weights, experts, slots, system, topology)
        system = replace(system, balancer=system.balancer.sized(facts))
        found = plan_on_host(system, counts, topology)
        waves = tuple(slices(wave_counts, plan) for wave_counts, plan in found.waves)
        moved_on = None
        if len(waves) > 1:
            by_home = found.waves[1][0].sum(0).reshape(topology.num_ranks, -1)
            moved_on = np.pad(by_home, ((0, 0), (0, waves[0].shape[2] - by_home.shape[1]))).astype(np.int64)
        lists = ListLoad.of(system.dispatch, sizes, topology, counts, found.plan)
        return cls(name, waves, copies, system.dispatch.buffers.rows(copies), found.plan, moved_on, lists)

    @property
    def rounds(self) -> int:
        """Rounds of the receive buffer."""
        if self.lists is not None:
            return self.lists.rounds
        return max(1, -(-int(self.waves[0].sum((0, 2)).max()) // self.capacity))

    @property
    def imbalance(self) -> float:
        """`max / mean` of the rows served by ranks."""
        served = np.stack([self.rows(i).sum(1) for i in range(self.rounds)]).sum(0)
        return float(served.max() / max(served.mean(), 1e-9))

    def sent(self, wave: int, i: int, *, by_rank: bool = False) -> Slices:
        """Return the rows sent in round `i`, from rank to slot.

        Args:
            wave: Number of the wave.
            i: Number of the round, from 0.
            by_rank: Whether the stream of a receiver is sorted by source before slots. False by default.
        """
        whole = self.waves[wave]
        if self.rounds == 1:
            return whole
        if self.moved_on is not None:
            return self._sent_in_phases(wave, self.moved_on, i)
        if wave or self.lists is not None:
            return part_of_round(whole, i, self.rounds)
        # The window of a round on the stream of each receiver, by slot and then source, or by source and then slot.
        order = (1, 0, 2) if by_rank else (1, 2, 0)
        stream = whole.transpose(order).reshape(len(whole), -1)
        ends = stream.cumsum(1)
        first, last = i * self.capacity, (i + 1) * self.capacity
        inside = np.clip(ends, first, last) - np.clip(ends - stream, first, last)
        back = np.argsort(order)
        return inside.reshape([whole.shape[axis] for axis in order]).transpose(back)

    def rows(self, i: int, part: str = "all") -> Int[np.ndarray, "R S"]:
        """Return the rows served by each slot in round `i`.

        Args:
            i: Number of the round, from 0.
            part: `all` (default) or a part of two phases: `home_wave`, or `moved_wave`, the rows from other ranks.
        """
        if self.moved_on is None:
            return self.sent(0, i).sum(0)
        home = (self._passed(self.moved_on, i + 1) - self._passed(self.moved_on, i))[:, 0]
        moved = self.sent(1, i).sum(0)
        return {"home_wave": home, "moved_wave": moved}.get(part, home + moved)

    def _passed(self, moved_on: Int[np.ndarray, "R S"], rounds: int) -> Int[np.ndarray, "R 2 S"]:
        """Return the rows per home slot in the first rounds: those that stay, and those that move."""
        # Rows that stay are the first ones of a stream.
        parts = np.stack([self.waves[0].sum(0) - moved_on, moved_on], 1)
        rows = parts.reshape(len(parts), -1)
        return np.clip(rounds * self.capacity - (rows.cumsum(1) - rows), 0, rows).reshape(parts.shape)

    def _sent_in_phases(self, wave: int, moved_on: Int[np.ndarray, "R S"], i: int) -> Slices:
        """Return the rows of a phase in round `i`, spread evenly over the rows of each expert."""
        whole, (begin, end) = self.waves[wave], (self._passed(moved_on, rounds) for rounds in (i, i + 1))
        if wave == 0:
            total, begin, end = self.waves[0].sum(0), begin.sum(1), end.sum(1)
        else:
            held, num_home = np.maximum(self.plan.placement, 0), self.plan.num_home
            at = held // num_home, held % num_home
            total, begin, end = (one[at] for one in (moved_on, begin[:, 1], end[:, 1]))
        total = np.maximum(total, 1)
        return whole * end // total - whole * begin // total

    @cached_property
    def replicas(self) -> Slices:
        """Experts copied into each replica slot (third) of a rank (second), from home or from a relay (first)."""
        return replica_copies(self.plan).astype(np.int64)

    @cached_property
    def replica_gradients(self) -> Slices:
        """Gradients from the replica slots (third) of a rank (first) to the homes of the experts (second)."""
        return replica_copies(self.plan, from_home=True).astype(np.int64).transpose(1, 0, 2)


def slices(counts: Counts, plan: Plan) -> Slices:
    """Count the rows from each rank to each slot of each rank."""
    ranks = np.arange(plan.num_ranks)
    held = np.maximum(plan.placement, 0)
    going = (np.asarray(nearest_first(counts, plan.quota, rank, plan.domain, plan.split)) for rank in range(len(ranks)))
    return np.stack([np.where(plan.placement >= 0, one[held, ranks[:, None]], 0) for one in going]).astype(np.int64)


def counts_of(load: str, sizes: LayerSizes, num_ranks: int, seed: int = 0) -> Counts:
    """Return the counts of a load.

    Args:
        load: `uniform`, `zipf:EXPONENT`, or a file with `[R, E]` or `[layers, R, E]`, of which the first layer counts.
        sizes: Sizes of the layer.
        num_ranks: Number of ranks `R`.
        seed: Random seed of a Zipf load; 0 by default.

    Raises:
        ValueError: The text is no load, or the file has invalid counts.

    Examples:
        >>> from jax_moe_lb.aot import LayerSizes, counts_of
        >>> counts_of("uniform", LayerSizes(experts=4, tokens=8, per_token=2), 2).tolist()
        [[4, 4, 4, 4], [4, 4, 4, 4]]
    """
    if load == "uniform":
        base, more = divmod(sizes.tokens * sizes.per_token, sizes.experts)
        return np.tile(base + (np.arange(sizes.experts) < more), (num_ranks, 1)).astype(np.int32)
    if found := re.fullmatch(r"zipf:(\d{1,3}(?:\.\d{1,6})?)", load, re.ASCII):
        return zipf_counts(sizes, num_ranks, float(found[1]), seed)
    if load.endswith((".npy", ".npz")):
        try:
            return read_counts(Path(load), argument="load")[0]
        except LimitError as error:
            # Callers have neither the option nor the argument of the remedy, and a load takes one layer.
            problem = str(error).rsplit(REMEDY, 1)[0]
            raise LimitError(f"{problem}. Save the counts of one layer, [R, E].") from error
    raise ValueError(f"load is {shown(load)}; expected {EXPECTED_LOAD}")


def zipf_counts(sizes: LayerSizes, num_ranks: int, exponent: float, seed: int = 0) -> Counts:
    """Sample counts of tokens that choose distinct experts, whose popularity falls as a power of a random place."""
    rng = np.random.default_rng(seed)
    logs = -exponent * np.log(rng.permutation(sizes.experts) + 1.0)
    counts = np.zeros((num_ranks, sizes.experts), np.int32)
    step = max(1, MOST_ENTRIES // sizes.experts)
    for rank, first in itertools.product(range(num_ranks), range(0, sizes.tokens, step)):
        # The largest noisy logits are a sample without replacement.
        noisy = logs + rng.gumbel(size=(min(step, sizes.tokens - first), sizes.experts))
        chosen = np.argpartition(-noisy, sizes.per_token - 1, axis=1)[:, : sizes.per_token]
        counts[rank] += np.bincount(chosen.reshape(-1), minlength=sizes.experts)
    return counts


def _experts(sizes: LayerSizes, number: int) -> Experts:
    up = jnp.zeros((number, sizes.hidden, sizes.inner), jnp.bfloat16)
    return Experts(up, up.mT, up)

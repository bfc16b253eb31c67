"""`traffic_of` counts what one rank reads from and writes to its own memory in one layer, by name.

Caches are left out, as in `compiled/memory_traffic.py`: each array counts once when it is written and once for every
operation that reads it. Each term is one of operations that programs compiled for H100s have, and
`benchmarks/bench_hbm_model.py` holds the sum against what they move in all.
"""

from dataclasses import dataclass

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.parts import Parts
from jax_moe_lb.systems import System

SUMS_BYTES = 4
"""Sums over rows, rounds and replicas are kept in float32."""


@dataclass(frozen=True)
class HbmTraffic(Parts):
    """Counts bytes, read and written, on one rank.

    `simulate` gives time to the first three where `Cluster.hbm_bytes_per_s` is known: permutations, sums and joined
    weights. Exchanges take that of their links, and products and activations that of the experts' curve.

    Args:
        permutation: what brings token copies into the order in which they are sent.
        sums: what adds the outputs of a token's experts, or the gradients of its copies.
        joined: what puts weights of home experts and replicas into one array for the products.
        exchanges: what sends and receives rows and replicas, beside the links.
        products: what multiplies: rows, hidden activations and weights, the gradients of all of them, and transposes
            that kernels want in the backward pass.
        activations: what is between products.
        carried: outputs and sums of gradients that a loop over rounds carries.
        arriving: gradients of replicas that go home: all kinds side by side for one exchange, that exchange, and what
            adds one of them to its sum. Of joined weights those of home experts are cut out of those of all slots.
    """

    permutation: float = 0.0
    sums: float = 0.0
    joined: float = 0.0
    exchanges: float = 0.0
    products: float = 0.0
    activations: float = 0.0
    carried: float = 0.0
    arriving: float = 0.0


def traffic_of(system: System, model: ModelShape, cluster: Cluster, *, backward: bool = True) -> HbmTraffic:
    """Counts the traffic of one layer in one microbatch, of a system whose receive buffer is filled once.

    What expert domains gather is not in it.

    Args:
        system: its slots, and what its dispatch says of buffers and rounds.
        model: the sizes of the layer.
        cluster: its ranks share the experts.
        backward: whether there is a backward pass, which computes again what it needs.

    Examples:
        >>> from jax_moe_lb import plain
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape
        >>> model = ModelShape(1, hidden=2048, inner=768, experts=128, per_token=8, tokens=4096)
        >>> round(traffic_of(plain(), model, Cluster((Links("gpu", 8, 360e9),))).total / 1e9, 1)
        7.2
    """
    copies = model.tokens * model.per_token
    rows = system.dispatch.buffer_rows(copies)
    home = model.experts // cluster.num_ranks
    slots = home + system.replica_slots
    each = _Arrays(
        tokens=float(model.tokens * model.row_bytes),
        copies=float(copies * model.row_bytes),
        rows=float(rows * model.row_bytes),
        hidden=float(rows * model.inner * model.itemsize),
        kind=float(slots * model.expert_bytes / model.matrices),
    )
    inner, joins, loops = model.matrices - 1, system.joins_weights, system.dispatch.max_rounds != 1
    replicas, turns = system.replica_slots, not system.dispatch.own_kernels
    # Ranks send as many as they get, and no more than they have.
    fetched = HbmTraffic(exchanges=2.0 * min(replicas, home) * model.expert_bytes)
    forward = each.forward(inner, joins, loops) + fetched
    if not backward:
        return forward
    widened = SUMS_BYTES / model.itemsize
    # One that arrives is read, its home expert's sum too, and the wide sum of both read and written, to be rounded.
    added = (3 + 4 * widened) * (replicas > 0)
    arriving = HbmTraffic(arriving=(4.0 * replicas + added + 2 * home * joins) * model.expert_bytes)
    return forward + fetched + each.backward(inner, joins, turns, loops, widened) + arriving


@dataclass(frozen=True)
class _Arrays:
    """Has the bytes of one layer's arrays; of `kind` that of one matrix of every slot."""

    tokens: float
    copies: float
    rows: float
    hidden: float
    kind: float

    def forward(self, inner: int, joins: bool, loops: bool) -> HbmTraffic:
        return HbmTraffic(
            permutation=permuted_bytes(self.copies),
            sums=summed_bytes(self.copies, self.tokens),
            joined=joins * joined_bytes((inner + 1) * self.kind, is_backward=False),
            exchanges=2 * (self.copies + self.rows),
            # Rows are read once, by the products of up and gate together, and written once.
            products=2 * self.rows + (inner + 1) * (self.hidden + self.kind),
            activations=(inner + 1) * self.hidden,
            carried=loops * self.copies,
        )

    def backward(self, inner: int, joins: bool, turns: bool, loops: bool, widened: float) -> HbmTraffic:
        """Counts the pass that receives rows and gradients, and multiplies rows once more for what they had become."""
        again = self.rows + inner * (self.hidden + self.kind)
        of_hidden = self.rows + self.hidden + self.kind
        of_rows = 2 * self.rows + inner * (self.hidden + self.kind)
        of_weights = 2 * self.rows + (inner + 1) * (self.hidden + self.kind)
        all_kinds = (inner + 1) * self.kind
        # Sums are wider than weights: a loop reads and writes them, and writes them wide, and at the end rounds them.
        carried = (2 * widened + (widened - 1) + widened + 1) * all_kinds
        # Of rows and weights, and of hidden activations as they are made; joined weights are transposed on the way.
        transposed = turns * (2 * self.rows + self.hidden + (0 if joins else 2 * all_kinds))
        return HbmTraffic(
            permutation=2 * permuted_bytes(self.copies),
            sums=summed_bytes(self.copies, self.tokens),
            joined=joins * joined_bytes(all_kinds, is_backward=True),
            exchanges=3 * (self.copies + self.rows),
            products=again + of_hidden + of_rows + of_weights + transposed,
            activations=2 * (inner + 1) * self.hidden,
            carried=loops * carried,
        )


def permuted_bytes(copies_bytes: float) -> float:
    """Counts what a permutation of token copies moves in a rank's memory: each is read and written.

    Args:
        copies_bytes: those of the copies.
    """
    return 2 * copies_bytes


def summed_bytes(copies_bytes: float, tokens_bytes: float) -> float:
    """Counts what a sum of each token's copies moves in a rank's memory.

    Args:
        copies_bytes: those of the copies, which are read.
        tokens_bytes: those of the tokens, which are written.
    """
    return copies_bytes + tokens_bytes


def joined_bytes(weights_bytes: float, *, is_backward: bool) -> float:
    """Counts what moves in a rank's memory to have weights of home experts and replicas in one array.

    Args:
        weights_bytes: those of all slots.
        is_backward: whether their transposes are needed, too.
    """
    return (4 if is_backward else 2) * weights_bytes

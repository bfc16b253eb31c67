"""Bytes moved in the memory of one rank by one layer.

`traffic_of` counts reads and writes of device memory. Caches are ignored, as in `aot/memory.py`: an array counts once
per write and once per operation reading it.
"""

from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from jax_moe_lb.kernels.backends import TILE
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape

BreakdownT = TypeVar("BreakdownT", bound="ByteBreakdown")


@dataclass(frozen=True)
class ByteBreakdown:
    """Base class of named byte counts, added part by part."""

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(asdict(self).values())

    def __add__(self: BreakdownT, other: BreakdownT) -> BreakdownT:
        return type(self)(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


HIDDEN_ARRAYS = 9
"""Hidden activations read or written between the products of a gated expert: three forward, six backward."""

SUMS_BYTES = 4
"""Bytes per element of sums over rows, rounds and replicas, kept in float32."""


@dataclass(frozen=True)
class HbmTraffic(ByteBreakdown):
    """Bytes read and written in the memory of one rank."""

    # If `Cluster.hbm_bytes_per_s` is given, `simulate` computes time for permutations, sums, joined weights and
    # arriving gradients. The time of exchanges follows from their links, and the time of products and activations from
    # the experts' curve.

    permutation: float = 0.0  # permutation of token copies into their send order
    sums: float = 0.0  # sums of the outputs of a token's experts, or of the gradients of its copies
    joined: float = 0.0  # concatenation of the weights of home experts and replicas into one array; see `joins_weights`
    exchanges: float = 0.0  # sends and receives of rows and replicas, beside the links
    products: float = 0.0  # operands and results of products: rows, hidden activations, weights and their gradients
    activations: float = 0.0  # element-wise operations between products
    carried: float = 0.0  # outputs and sums of gradients carried by a loop over rounds
    # Gradients of replicas on their way home: the split of joined gradients, the exchange, and the addition of each to
    # its sum
    arriving: float = 0.0


def traffic_of(system: System, model: ModelShape, cluster: Cluster, *, backward: bool = True) -> HbmTraffic:
    """Count the memory traffic of one layer in one microbatch, if its receive buffer is filled once."""
    # Gathers of expert domains are not included.
    rows = system.dispatch.cost().row_arrays(model.tokens, model.per_token, cluster.topology())
    home = model.experts // cluster.num_ranks
    system = system.limit_slots(model.experts, home)
    inner, loops, replicas = model.matrices - 1, system.dispatch.buffers.max_rounds != 1, system.replica_slots
    joins = joins_weights(system, model, cluster)
    gathered = rows.gathered(float(rows.sent)) * model.row_bytes
    sent = float((rows.sent + (rows.received or rows.computed) + rows.sent_first + rows.forwarded) * model.row_bytes)
    operand, hidden = float(rows.computed * model.row_bytes), float(rows.computed * model.inner * model.itemsize)
    one_kind = float((home + replicas) * model.expert_bytes / model.matrices)
    all_kinds = (inner + 1) * one_kind
    # Reads and writes of outputs, or of their sums, carried by a loop.
    carried = float(rows.carried * model.row_bytes) * (3 * SUMS_BYTES / model.itemsize if rows.carries_sums else 1)
    # A rank sends as many replicas as it receives, at most its home experts.
    fetched = 2.0 * min(replicas, home) * model.expert_bytes
    forward = HbmTraffic(
        permutation=2 * gathered,
        sums=gathered + float(model.tokens * model.row_bytes),
        joined=joins * 2 * all_kinds,
        exchanges=2 * sent + fetched,
        # Rows are read once, by the products of up and gate together, and written once.
        products=2 * operand + (inner + 1) * (hidden + one_kind),
        activations=(inner + 1) * hidden,
        carried=loops * carried,
    )
    if not backward:
        return forward
    # Products of the rows again, and of the gradients of hidden activations, rows and weights.
    again = operand + inner * (hidden + one_kind)
    of_hidden = operand + hidden + one_kind
    of_rows = 2 * operand + inner * (hidden + one_kind)
    of_weights = 2 * operand + (inner + 1) * (hidden + one_kind)
    return forward + HbmTraffic(
        permutation=4 * gathered,
        sums=forward.sums,
        joined=forward.joined,
        exchanges=3 * sent + fetched,
        products=again + of_hidden + of_rows + of_weights,
        activations=2 * (inner + 1) * hidden,
        carried=loops * summed_in_loop(all_kinds, model),
        arriving=arriving_bytes(replicas, replicas, (home + replicas) * joins, model),
    )


def summed_in_loop(weights_bytes: float, model: ModelShape) -> float:
    """Count the bytes read and written to add the gradients of one round to those of earlier rounds."""
    # The loop reads and writes sums and writes wide gradients; the end rounds them.
    widened = SUMS_BYTES / model.itemsize
    return (2 * widened + (widened - 1) + widened + 1) * weights_bytes


def empty_row_bytes(model: ModelShape, passes: int) -> float:
    """Count the bytes of one empty row of a receive buffer: products skip it, and the rest does not."""
    return passes * (HIDDEN_ARRAYS / 3 * model.inner * model.itemsize + model.row_bytes)


def arriving_bytes(sent: int, arriving: int, joined_slots: int, model: ModelShape) -> float:
    """Count the bytes read and written by a rank for the gradients of replicas on the way home."""
    # Each arriving gradient, the sum of its expert and a wide sum are read, and both sums written. Gradients of joined
    # weights are split: those of replicas, also of empty slots, before the exchange, and those of home experts after.
    added = 3 + 2 * SUMS_BYTES / model.itemsize
    return (2 * joined_slots + sent + arriving + added * arriving) * model.expert_bytes


def joins_weights(system: System, model: ModelShape, cluster: Cluster) -> bool:
    """Return whether the weights of home experts and replicas are copied into one array for the products."""
    reads_parts = model.itemsize == 2 and min(model.hidden, model.inner) >= TILE and not cluster.joins_weights
    return system.replica_slots > 0 and not reads_parts and not system.dispatch.cost().passes_home

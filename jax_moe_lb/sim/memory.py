"""Bytes held by one rank in a step, and bytes moved in its memory by one layer.

`memory_of` counts the arrays of a step. Each term is an array of programs compiled for H100; `jax-moe-lb compile` lists
the largest ones. `benchmarks/bench_memory_model.py` compares the sum with the compiler's.

`traffic_of` counts reads and writes of device memory. Caches are ignored, as in `aot/memory.py`: an array counts once
per write and once per operation reading it. `benchmarks/bench_hbm_model.py` compares the sum with compiled programs.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple, TypeVar

from jax_moe_lb.kernels.backends import TILE
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step

BreakdownT = TypeVar("BreakdownT", bound="ByteBreakdown")


@dataclass(frozen=True)
class ByteBreakdown:
    """Base class of named byte counts, added part by part."""

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(asdict(self).values())

    def __add__(self: BreakdownT, other: BreakdownT) -> BreakdownT:
        """Add two breakdowns part by part."""
        return type(self)(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


SUMS_BYTES = 4
"""Bytes per element of sums over rows, rounds and replicas, kept in float32."""


@dataclass(frozen=True)
class HbmTraffic(ByteBreakdown):
    """Bytes read and written in the memory of one rank.

    If `Cluster.hbm_bytes_per_s` is given, `simulate` computes time for the first three parts: permutations, sums and
    joined weights. The time of exchanges follows from their links, and the time of products and activations from the
    experts' curve.

    Args:
        permutation: Permutation of token copies into their send order.
        sums: Sums of the outputs of a token's experts, or of the gradients of its copies.
        joined: Concatenation of the weights of home experts and replicas into one array; see `joins_weights`.
        exchanges: Sends and receives of rows and replicas, beside the links.
        products: Operands and results of products: rows, hidden activations, weights and their gradients.
        activations: Element-wise operations between products.
        carried: Outputs and sums of gradients carried by a loop over rounds.
        arriving: Gradients of replicas on their way home: their concatenation for one exchange, the exchange, and the
            addition of each to its sum. Joined weights also need a slice of the home experts' gradients.
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
    """Count the memory traffic of one layer in one microbatch, if its receive buffer is filled once.

    Gathers of expert domains are not included.

    Args:
        system: System with its slots, and with the buffers and rounds of its dispatch.
        model: Sizes of the layer.
        cluster: Cluster whose ranks share the experts.
        backward: If True (default), include the backward pass with its rematerialization.

    Returns:
        The bytes read and written on one rank, by part.

    Examples:
        >>> from jax_moe_lb import plain
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape
        >>> model = ModelShape(1, hidden=2048, inner=768, experts=128, per_token=8, tokens=4096)
        >>> round(traffic_of(plain(), model, Cluster((Links("gpu", 8, 360e9),))).total / 1e9, 1)
        6.6
    """
    rows = system.dispatch.cost().row_arrays(model.tokens, model.per_token, cluster.topology())
    home = model.experts // cluster.num_ranks
    slots = home + system.replica_slots
    widened = SUMS_BYTES / model.itemsize
    each = _Arrays(
        tokens=float(model.tokens * model.row_bytes),
        gathered=rows.gathered(float(rows.sent)) * model.row_bytes,
        exchanged=float((rows.sent + (rows.received or rows.computed)) * model.row_bytes),
        first_hop=float((rows.sent_first + rows.forwarded) * model.row_bytes),
        carried=float(rows.carried * model.row_bytes) * (3 * widened if rows.carries_sums else 1),
        rows=float(rows.computed * model.row_bytes),
        hidden=float(rows.computed * model.inner * model.itemsize),
        kind=float(slots * model.expert_bytes / model.matrices),
    )
    inner, loops, replicas = model.matrices - 1, system.dispatch.buffers.max_rounds != 1, system.replica_slots
    joins = joins_weights(system, model, cluster)
    # A rank sends as many replicas as it receives, at most its home experts.
    fetched = HbmTraffic(exchanges=2.0 * min(replicas, home) * model.expert_bytes)
    forward = each.forward(inner, joins, loops) + fetched
    if not backward:
        return forward
    # Each arriving gradient reads itself and the sum of its home expert; a wide sum is read, written and rounded.
    added = (3 + 4 * widened) * (replicas > 0)
    arriving = HbmTraffic(arriving=(4.0 * replicas + added + 2 * home * joins) * model.expert_bytes)
    return forward + fetched + each.backward(inner, joins, loops, widened) + arriving


@dataclass(frozen=True)
class _Arrays:
    """Bytes of the arrays of one layer.

    Args:
        tokens: Tokens of a rank.
        gathered: Rows gathered in a dispatch.
        exchanged: Rows sent and received in the last hop.
        first_hop: Rows sent and received in a first hop.
        carried: Reads and writes of outputs, or of their sums, carried by a loop.
        rows: Operand of the products.
        hidden: One hidden activation.
        kind: One matrix of all slots.
    """

    tokens: float
    gathered: float
    exchanged: float
    first_hop: float
    carried: float
    rows: float
    hidden: float
    kind: float

    def forward(self, inner: int, joins: bool, loops: bool) -> HbmTraffic:
        return HbmTraffic(
            permutation=permuted_bytes(self.gathered),
            sums=summed_bytes(self.gathered, self.tokens),
            joined=joins * joined_bytes((inner + 1) * self.kind),
            exchanges=2 * (self.exchanged + self.first_hop),
            # Rows are read once, by the products of up and gate together, and written once.
            products=2 * self.rows + (inner + 1) * (self.hidden + self.kind),
            activations=(inner + 1) * self.hidden,
            carried=loops * self.carried,
        )

    def backward(self, inner: int, joins: bool, loops: bool, widened: float) -> HbmTraffic:
        """Count the backward pass, including the rematerialized products of the rows."""
        again = self.rows + inner * (self.hidden + self.kind)
        of_hidden = self.rows + self.hidden + self.kind
        of_rows = 2 * self.rows + inner * (self.hidden + self.kind)
        of_weights = 2 * self.rows + (inner + 1) * (self.hidden + self.kind)
        all_kinds = (inner + 1) * self.kind
        # Sums are wider than weights. A loop reads and writes them and writes wide gradients; the end rounds them.
        carried = (2 * widened + (widened - 1) + widened + 1) * all_kinds
        return HbmTraffic(
            permutation=2 * permuted_bytes(self.gathered),
            sums=summed_bytes(self.gathered, self.tokens),
            joined=joins * joined_bytes(all_kinds),
            exchanges=3 * (self.exchanged + self.first_hop),
            products=again + of_hidden + of_rows + of_weights,
            activations=2 * (inner + 1) * self.hidden,
            carried=loops * carried,
        )


def permuted_bytes(copies_bytes: float) -> float:
    """Count the bytes read and written by a permutation of token copies in a rank's memory.

    Args:
        copies_bytes: Bytes of the copies.
    """
    return 2 * copies_bytes


def summed_bytes(copies_bytes: float, tokens_bytes: float) -> float:
    """Count the bytes read and written by the sum of each token's copies in a rank's memory.

    Args:
        copies_bytes: Bytes of the copies, which are read.
        tokens_bytes: Bytes of the tokens, which are written.
    """
    return copies_bytes + tokens_bytes


def joined_bytes(weights_bytes: float) -> float:
    """Count the bytes read and written to concatenate the weights of home experts and replicas in a rank's memory.

    Args:
        weights_bytes: Bytes of all slots.
    """
    return 2 * weights_bytes


def joins_weights(system: System, model: ModelShape, cluster: Cluster) -> bool:
    """Return whether the weights of home experts and replicas are copied into one array for the products.

    Args:
        system: System with its slots. In two phases, products of rows at home and of moved rows are apart.
        model: Sizes of the layer. Kernels of NVIDIA GPUs have the dtypes and least widths of `kernels/backends.py`.
        cluster: Cluster whose `joins_weights` gives the form of CPUs and TPUs.

    Examples:
        >>> from jax_moe_lb import exact, plain
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape
        >>> model = ModelShape(1, hidden=2048, inner=768, experts=128, per_token=8, tokens=4096)
        >>> gpus = Cluster((Links("gpu", 8, 360e9),))
        >>> [joins_weights(exact(2), replace(model, itemsize=n), gpus) for n in (2, 4)]
        [False, True]
        >>> [joins_weights(one, model, replace(gpus, joins_weights=True)) for one in (exact(2), plain())]
        [True, False]
    """
    reads_parts = model.itemsize == 2 and min(model.hidden, model.inner) >= TILE and not cluster.joins_weights
    return system.replica_slots > 0 and not reads_parts and not system.dispatch.cost().passes_home


MOMENTS_BYTES = 8.0
"""Bytes of Adam's two moments per parameter, in float32."""

MASTER_BYTES = 4.0
"""Bytes of the optimizer's float32 copy per parameter, for parameters of fewer bytes."""

ADDRESS_BYTES = 16
"""Bytes of residuals per token copy: its expert, its weight, and its positions in the send order and back, four bytes
each.
"""

NAMES = {
    "gathered": "gathered experts",
    "kept": "kept tokens",
    "buffers": "buffers of a round",
    "in_use": "weights in use",
    "sums": "sums of gradients",
    "arriving": "arriving gradients",
}
"""Names of parts in messages, if they differ from the field names."""


@dataclass(frozen=True)
class Memory(ByteBreakdown):
    """Bytes on one rank of the MoE layers; attention and embedding are not included.

    Layers run in sequence, so arrays live only within one layer count once: replicas, and the fields after `kept`. The
    peak of a layer is in the products of the backward pass, or in the accumulation of replica gradients on their home
    ranks.

    Args:
        weights: Home experts of all layers.
        gradients: Gradients of these experts. `gradients`, `optimizer` and `kept` are 0 without a backward pass.
        optimizer: Optimizer state of all home experts.
        replicas: Slots beyond the home experts, or their gradients on the way home.
        gathered: Experts gathered in expert domains, of all layers if kept, else of two layers. It includes their
            gradients of one layer if there is a backward pass, and the experts decoded by a codec with state, of all
            layers.
        kept: Residuals of all layers: tokens and addresses of their copies; without rematerialization, copies and
            hidden activations instead of tokens. In a pipeline, of all microbatches in flight on the first stage.
        buffers: Tokens, copies as sent and received, and hidden activations.
        in_use: Weights as operands of products: one layer out of the stack of all layers. With replicas and joined
            weights, also one kind of all slots in one array; in the backward pass, gate and up.
        sums: Sums of gradients of all slots. A loop over rounds adds one kind of the round.
        arriving: Receive buffer for the gradients of replicas, and one wide sum of them.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    replicas: float = 0.0
    gathered: float = 0.0
    kept: float = 0.0
    buffers: float = 0.0
    in_use: float = 0.0
    sums: float = 0.0
    arriving: float = 0.0

    @property
    def by_name(self) -> dict[str, float]:
        """Bytes of each nonzero part, by its name in messages."""
        return {NAMES.get(name, name): value for name, value in asdict(self).items() if value}

    @property
    def words(self) -> str:
        """Nonzero parts in GB, as text."""
        return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in self.by_name.items())


def memory_of(system: System, model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> Memory:
    """Count the memory of a rank, without a simulation.

    Args:
        system: System whose replica slots and dispatch give the buffers of a layer.
        model: Sizes of the layers of one rank; see `Parallel.share`.
        cluster: Cluster whose ranks share the experts.
        migration: Gathers of expert domains.
        step: Passes of the step. Without a backward pass, there are no gradients, optimizer state or residuals.

    Returns:
        The bytes on one rank by part, at the peak.
    """
    home = model.experts // cluster.num_ranks * model.expert_bytes
    parameters = model.layers * home / model.itemsize if step.backward else 0.0
    always = Memory(
        weights=float(model.layers * home),
        gradients=parameters * model.gradient_itemsize,
        optimizer=parameters * optimizer_bytes(model, step),
        gathered=_gathered_bytes(model, cluster, migration, step),
        kept=float(step.parallel.in_flight * model.layers * _kept_bytes(model, step)) if step.backward else 0.0,
    )
    layer = _Layer(system, model, cluster, migration)
    backward = [layer.of_hidden(), layer.of_rows(), layer.of_weights(), layer.replica_gradients_come_home()]
    phases = backward if step.backward else [layer.forward()]
    return always + max(phases, key=lambda phase: phase.total)


class _RowBytes(NamedTuple):
    """Bytes of the arrays of `RowArrays`, and of one hidden activation."""

    sent: int
    received: int
    computed: int
    hidden: int
    forwarded: int
    carried: int


@dataclass(frozen=True)
class _Layer:
    """Memory of one running layer, in each phase that may be the peak."""

    system: System
    model: ModelShape
    cluster: Cluster
    migration: Migration

    @property
    def loops(self) -> bool:
        """True if a loop carries sums and outputs from round to round."""
        return self.system.dispatch.buffers.max_rounds != 1

    @property
    def num_home(self) -> int:
        """Number of experts served by a rank without replicas: its home experts and its gathered experts."""
        gathered = self.migration.gathered_bytes(self.model, self.cluster) // self.model.expert_bytes
        return self.model.experts // self.cluster.num_ranks + gathered

    @property
    def replica_slots(self) -> int:
        # A rank with all experts needs no replicas.
        return self.system.replica_slots if self.num_home < self.model.experts else 0

    def forward(self) -> Memory:
        """Count the forward pass: the exchange beside the outputs of earlier rounds, or the hidden activations."""
        rows = self._rows()
        held = rows.forwarded + rows.carried * self.loops
        exchanging = rows.sent + (rows.received or rows.computed)
        gathering = rows.received + rows.computed
        computing = rows.computed + (self.model.matrices - 1) * rows.hidden
        return self._products(1, held + max(exchanging, gathering, computing))

    def of_hidden(self) -> Memory:
        """Count the gradients of hidden activations: rows, gradients of outputs, and both passes' activations."""
        rows = self._rows()
        phase = self._products(2, 2 * rows.computed + 2 * self.model.matrices * rows.hidden + self._held())
        # In a loop, the sums of earlier rounds exist; the gradient of `down` follows.
        return replace(phase, sums=self._sums() * (self.loops + 1 / self.model.matrices))

    def of_rows(self) -> Memory:
        """Count the gradients of rows: rows, and a product with each of the inner matrices.

        Rows are needed for the gradients of these matrices, which come last. The gradient of `down` is complete.
        """
        rows, matrices = self._rows(), self.model.matrices
        phase = self._products(2, matrices * rows.computed + (matrices - 1) * rows.hidden + self._held())
        return replace(phase, sums=self._sums() * (self.loops + 1 / matrices))

    def of_weights(self) -> Memory:
        """Count the gradients of the inner matrices, beside the exchange of the gradients of rows."""
        rows, matrices = self._rows(), self.model.matrices
        exchanged = rows.computed + (0 if self.loops and not rows.received else rows.sent)
        phase = self._products(0, rows.computed + exchanged + (matrices - 1) * rows.hidden + self._held())
        # A loop adds one kind at a time to the carried sums.
        return replace(phase, sums=self._sums() * (1 + self.loops / matrices))

    def replica_gradients_come_home(self) -> Memory:
        """Count the gradients of replicas on the way home: one array sent, one received, and their sums."""
        if not self.replica_slots:
            return Memory()
        model, domain = self.model, self.cluster.topology(self._inside()).ranks_per_domain
        room = self.system.replicate.max_incoming_replicas(self.replica_slots, self.num_home, domain)
        return Memory(
            replicas=float(self.replica_slots * model.expert_bytes),
            buffers=float(self._rows().sent + self._tokens()),
            sums=self._sums(),
            arriving=float(room * model.expert_bytes + model.expert_bytes / model.itemsize * SUMS_BYTES),
        )

    def _products(self, kinds: int, buffers: int) -> Memory:
        """Count products with `kinds` kinds of the weights of all slots, in one array if they are joined."""
        model, slots = self.model, self.replica_slots
        home = model.experts // self.cluster.num_ranks * model.expert_bytes
        joined = kinds * (self.num_home + slots) * model.expert_bytes / model.matrices
        joined = joined if slots and joins_weights(self.system, model, self.cluster) else 0.0
        return Memory(
            replicas=float(slots * model.expert_bytes),
            buffers=float(buffers + self._tokens()),
            # A single layer is not sliced from a stack.
            in_use=float(joined + home * (model.layers > 1)),
        )

    def _rows(self) -> "_RowBytes":
        model = self.model
        rows = self.system.dispatch.cost().row_arrays(
            model.tokens, model.per_token, self.cluster.topology(self._inside())
        )
        return _RowBytes(
            rows.sent * model.row_bytes,
            rows.received * model.row_bytes,
            rows.computed * model.row_bytes,
            rows.computed * model.inner * model.itemsize,
            rows.forwarded * model.row_bytes,
            int(rows.carried * model.row_bytes * (SUMS_BYTES / model.itemsize if rows.carries_sums else 1)),
        )

    def _held(self) -> int:
        """Return the bytes held during a backward round: forwarded rows, and carried gradients of rows."""
        rows = self._rows()
        # Tokens are forwarded, and the gradients of their outputs.
        return 2 * rows.forwarded + rows.carried * self.loops

    def _tokens(self) -> int:
        """Return the bytes of a layer's tokens and outputs, or of their gradients."""
        return 2 * self.model.tokens * self.model.row_bytes

    def _sums(self) -> float:
        parameters = (self.num_home + self.replica_slots) * self.model.expert_bytes / self.model.itemsize
        # A single round rounds each gradient as it is written.
        return parameters * (SUMS_BYTES if self.loops else self.model.itemsize)

    def _inside(self) -> tuple[int, ...]:
        sizes = self.migration.sizes(self.cluster)
        return tuple(level.size // size for level, size in zip(self.cluster.levels, sizes, strict=True))


def _gathered_bytes(model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> float:
    home, gathered = model.experts // cluster.num_ranks * model.expert_bytes, migration.gathered_bytes(model, cluster)
    # Two sets suffice if experts are gathered again, or for inference: one in use, one in transfer.
    held = gathered * (model.layers if step.backward and not migration.gather_again else min(2, model.layers))
    if step.backward:
        held += gathered * model.gradient_itemsize // model.itemsize
    # Such a codec encodes differences from the experts decoded last, so each rank keeps those of every layer.
    if migration.codec.remembers:
        held += model.layers * (gathered + home)
    if migration.codec.gradient_ratio > 1 and step.backward:
        # The residual has a part for each level that gathers: all experts gathered there.
        sizes = migration.sizes(cluster)
        parts = sum(math.prod(sizes[: at + 1]) for at, size in enumerate(sizes) if size > 1)
        held += model.layers * parts * home // model.itemsize * SUMS_BYTES
    return float(held)


def _kept_bytes(model: ModelShape, step: Step) -> int:
    """Return the bytes of the residuals of one layer."""
    copies = model.tokens * model.per_token
    if step.recompute:
        return model.tokens * model.row_bytes + copies * ADDRESS_BYTES
    return copies * (model.row_bytes + (model.matrices - 1) * model.inner * model.itemsize + ADDRESS_BYTES)


def optimizer_bytes(model: ModelShape, step: Step) -> float:
    """Return the bytes of optimizer state per parameter.

    Args:
        model: Shape whose `itemsize` decides whether there is a float32 copy.
        step: Step whose `optimizer_bytes`, if given, takes precedence.
    """
    if step.optimizer_bytes is not None:
        return step.optimizer_bytes
    return MOMENTS_BYTES + (MASTER_BYTES if model.itemsize < MASTER_BYTES else 0.0)

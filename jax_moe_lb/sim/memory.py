"""Bytes held by one rank in a step.

`memory_of` counts the arrays of a step. Each term is an array of programs compiled for H100; `jax-moe-lb compile` lists
the largest ones. `benchmarks/compiled/memory_model.py` compares the sum with the compiler's.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.hbm import SUMS_BYTES, ByteBreakdown, joins_weights
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.transport.cost import RowArrays

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
    """Bytes on one rank of the MoE layers; attention and embedding are not included."""

    # Layers run in sequence, so arrays live only within one layer count once: replicas, and the fields after `kept`.
    # The peak of a layer is in the products of the backward pass, or in the accumulation of replica gradients on their
    # home ranks.

    weights: float = 0.0  # home experts of all layers
    # Gradients of these experts. `gradients`, `optimizer` and `kept` are 0 without a backward pass.
    gradients: float = 0.0
    optimizer: float = 0.0  # optimizer state of all home experts
    replicas: float = 0.0  # slots beyond the home experts, or their gradients on the way home
    # Experts gathered in expert domains, of all layers if kept, else of two layers. It includes their gradients of one
    # layer if there is a backward pass, and the experts decoded by a codec with state, of all layers.
    gathered: float = 0.0
    # Residuals of all layers: tokens and addresses of their copies; without rematerialization, copies and hidden
    # activations instead of tokens. In a pipeline, of all microbatches in flight on the first stage.
    kept: float = 0.0
    buffers: float = 0.0  # tokens, copies as sent and received, and hidden activations
    # Weights as operands of products: one layer out of the stack of all layers. With replicas and joined weights, also
    # one kind of all slots in one array; in the backward pass, gate and up.
    in_use: float = 0.0
    sums: float = 0.0  # sums of gradients of all slots. A loop over rounds adds one kind of the round.
    arriving: float = 0.0  # receive buffer for the gradients of replicas, and one wide sum of them

    @property
    def by_name(self) -> dict[str, float]:
        """Bytes per nonzero part, by the name in messages."""
        return {NAMES.get(name, name): value for name, value in asdict(self).items() if value}

    @property
    def words(self) -> str:
        """Nonzero parts in GB, as text."""
        return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in self.by_name.items())


def memory_of(system: System, model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> Memory:
    """Count the memory of a rank, without a simulation."""
    home = model.experts // cluster.num_ranks * model.expert_bytes
    parameters = model.layers * home / model.itemsize if step.backward else 0.0
    always = Memory(
        weights=float(model.layers * home),
        gradients=parameters * model.gradient_itemsize,
        optimizer=parameters * optimizer_bytes(model, step),
        gathered=_gathered_bytes(model, cluster, migration, step),
        kept=float(step.parallel.in_flight * model.layers * _kept_bytes(model, step)) if step.backward else 0.0,
    )
    num_home = model.experts // cluster.num_ranks + migration.gathered_bytes(model, cluster) // model.expert_bytes
    layer = _Layer(system.limit_slots(model.experts, num_home), model, cluster, migration, num_home)
    backward = [layer.of_hidden(), layer.of_rows(), layer.of_weights(), layer.replica_gradients_come_home()]
    phases = backward if step.backward else [layer.forward()]
    return always + max(phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class _Layer:
    """Memory of one running layer, in each phase that may be the peak."""

    system: System
    model: ModelShape
    cluster: Cluster
    migration: Migration
    num_home: int  # experts served by a rank without replicas: its home experts and its gathered experts

    @property
    def loops(self) -> bool:
        """True if a loop carries sums and outputs from round to round."""
        return self.system.dispatch.buffers.max_rounds != 1

    def forward(self) -> Memory:
        """Count the forward pass: the exchange beside the outputs of earlier rounds, or the hidden activations."""
        rows = self._rows
        held = rows.forwarded + rows.carried * self.loops
        exchanging = rows.sent + (rows.received or rows.computed)
        gathering = rows.received + rows.computed
        computing = rows.computed + (self.model.matrices - 1) * self._hidden
        return self._products(1, held + max(exchanging, gathering, computing))

    def of_hidden(self) -> Memory:
        """Count the gradients of hidden activations: rows, gradients of outputs, and both passes' activations."""
        rows = self._rows
        phase = self._products(2, 2 * rows.computed + 2 * self.model.matrices * self._hidden + self._held())
        # In a loop, the sums of earlier rounds exist; the gradient of `down` follows.
        return replace(phase, sums=self._sums() * (self.loops + 1 / self.model.matrices))

    def of_rows(self) -> Memory:
        """Count the gradients of rows: rows, and a product with each of the inner matrices."""
        # Rows are needed for the gradients of these matrices, which come last. The gradient of `down` is complete.
        rows, matrices = self._rows, self.model.matrices
        phase = self._products(2, matrices * rows.computed + (matrices - 1) * self._hidden + self._held())
        return replace(phase, sums=self._sums() * (self.loops + 1 / matrices))

    def of_weights(self) -> Memory:
        """Count the gradients of the inner matrices, beside the exchange of the gradients of rows."""
        rows, matrices = self._rows, self.model.matrices
        exchanged = rows.computed + (0 if self.loops and not rows.received else rows.sent)
        phase = self._products(0, rows.computed + exchanged + (matrices - 1) * self._hidden + self._held())
        # A loop adds one kind at a time to the carried sums.
        return replace(phase, sums=self._sums() * (1 + self.loops / matrices))

    def replica_gradients_come_home(self) -> Memory:
        """Count the gradients of replicas on the way home: one array sent, one received, and their sums."""
        if not self.system.replica_slots:
            return Memory()
        model, domain = self.model, self._topology.ranks_per_domain
        room = self.system.replicate.max_incoming_replicas(self.system.replica_slots, self.num_home, domain)
        return Memory(
            replicas=float(self.system.replica_slots * model.expert_bytes),
            buffers=float(self._rows.sent + self._tokens()),
            sums=self._sums(),
            arriving=float(room * model.expert_bytes + model.expert_bytes / model.itemsize * SUMS_BYTES),
        )

    def _products(self, kinds: int, buffers: int) -> Memory:
        """Count products with `kinds` kinds of the weights of all slots, in one array if they are joined."""
        model, slots = self.model, self.system.replica_slots
        home = model.experts // self.cluster.num_ranks * model.expert_bytes
        joined = kinds * (self.num_home + slots) * model.expert_bytes / model.matrices
        joined = joined if joins_weights(self.system, model, self.cluster) else 0.0
        return Memory(
            replicas=float(slots * model.expert_bytes),
            buffers=float(buffers + self._tokens()),
            # A single layer is not sliced from a stack.
            in_use=float(joined + home * (model.layers > 1)),
        )

    @cached_property
    def _topology(self) -> Topology:
        return self.cluster.topology(self.migration.group_sizes(self.cluster))

    @cached_property
    def _rows(self) -> RowArrays:
        """Arrays of a round, in bytes."""
        model = self.model
        rows = self.system.dispatch.cost().row_arrays(model.tokens, model.per_token, self._topology)
        widened = SUMS_BYTES / model.itemsize if rows.carries_sums else 1
        carried = int(rows.carried * model.row_bytes * widened)
        numbers = rows.sent, rows.received, rows.computed, rows.forwarded
        sent, received, computed, forwarded = (number * model.row_bytes for number in numbers)
        return RowArrays(sent, received, computed, carried, forwarded=forwarded)

    @property
    def _hidden(self) -> int:
        """Bytes of one hidden activation."""
        return self._rows.computed // self.model.hidden * self.model.inner

    def _held(self) -> int:
        """Return the bytes held during a backward round: forwarded rows, and carried gradients of rows."""
        rows = self._rows
        # Tokens are forwarded, and the gradients of their outputs.
        return 2 * rows.forwarded + rows.carried * self.loops

    def _tokens(self) -> int:
        """Return the bytes of a layer's tokens and outputs, or of the gradients."""
        return 2 * self.model.tokens * self.model.row_bytes

    def _sums(self) -> float:
        parameters = (self.num_home + self.system.replica_slots) * self.model.expert_bytes / self.model.itemsize
        # A single round rounds each gradient as it is written.
        return parameters * (SUMS_BYTES if self.loops else self.model.itemsize)


def _gathered_bytes(model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> float:
    home, gathered = model.experts // cluster.num_ranks * model.expert_bytes, migration.gathered_bytes(model, cluster)
    if not gathered:
        return 0.0
    # Two sets suffice if experts are gathered again, or for inference: one in use, one in transfer.
    held = gathered * (model.layers if step.backward and not migration.gather_again else min(2, model.layers))
    held += gathered * step.backward  # the gradients
    # Such a codec encodes differences from the experts decoded last, so each rank keeps those of every layer.
    if migration.codec.remembers:
        held += model.layers * (gathered + home)
    if migration.codec.of_gradients.compresses and step.backward:
        # The residual has a part for each level that gathers: all experts gathered there.
        sizes = migration.sizes(cluster)
        parts = sum(math.prod(sizes[: at + 1]) for at, size in enumerate(sizes) if size > 1)
        held += model.layers * parts * home // model.itemsize * SUMS_BYTES
    return float(held)


def _kept_bytes(model: ModelShape, step: Step) -> int:
    copies = model.tokens * model.per_token
    if step.recompute:
        return model.tokens * model.row_bytes + copies * ADDRESS_BYTES
    return copies * (model.row_bytes + (model.matrices - 1) * model.inner * model.itemsize + ADDRESS_BYTES)


def optimizer_bytes(model: ModelShape, step: Step) -> float:
    """Return the bytes of optimizer state per parameter."""
    if step.optimizer_bytes is not None:
        return step.optimizer_bytes
    return MOMENTS_BYTES + (MASTER_BYTES if model.itemsize < MASTER_BYTES else 0.0)

"""Bytes held by one rank in a step.

`memory_of` counts the arrays of a step. Each term is an array of programs compiled for H100; `jax-moe-lb compile` lists
the largest ones. `benchmarks/compiled/memory_model.py` compares the sum with the compiler's.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.hbm import SUMS_BYTES, ByteBreakdown, joins_weights
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step

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
    topology = cluster.topology(migration.group_sizes(cluster))
    phases = _phases(system.limit_slots(model.experts, num_home), model, cluster, topology, num_home, step.backward)
    return always + max(phases, key=lambda phase: phase.total)


def _phases(
    system: System, model: ModelShape, cluster: Cluster, topology: Topology, num_home: int, backward: bool
) -> Iterator[Memory]:
    """Yield the memory of one running layer in each phase that may be the peak, with `num_home` experts at home."""
    rows = system.dispatch.cost().row_arrays(model.tokens, model.per_token, topology)
    counts = rows.sent, rows.received, rows.computed, rows.forwarded
    sent, received, computed, forwarded = (number * model.row_bytes for number in counts)
    # A loop carries sums and outputs from round to round.
    loops, matrices, slots = system.dispatch.buffers.max_rounds != 1, model.matrices, system.replica_slots
    carried = loops * int(rows.carried * model.row_bytes * (SUMS_BYTES / model.itemsize if rows.carries_sums else 1))
    hidden = rows.computed * model.inner * model.itemsize
    tokens = 2 * model.tokens * model.row_bytes
    # A single round rounds each gradient as it is written.
    sums = (num_home + slots) * model.expert_bytes / model.itemsize * (SUMS_BYTES if loops else model.itemsize)
    replicas, joins = float(slots * model.expert_bytes), joins_weights(system, model, cluster)
    # A single layer is not sliced from a stack.
    sliced = model.experts // cluster.num_ranks * model.expert_bytes * (model.layers > 1)

    def products(kinds: int, buffers: int, sums: float = 0.0) -> Memory:
        """Count products with `kinds` kinds of the weights of all slots, in one array if they are joined."""
        joined = kinds * (num_home + slots) * model.expert_bytes / matrices if joins else 0.0
        return Memory(replicas=replicas, buffers=float(buffers + tokens), in_use=float(joined + sliced), sums=sums)

    if not backward:
        # The exchange beside the outputs of earlier rounds, or the hidden activations.
        exchanging, gathering = sent + (received or computed), received + computed
        computing = computed + (matrices - 1) * hidden
        yield products(1, forwarded + carried + max(exchanging, gathering, computing))
        return
    # Forwarded tokens and gradients of outputs, and carried gradients of rows.
    held = 2 * forwarded + carried
    # Gradients of hidden activations: rows, gradients of outputs, and the activations of both passes. In a loop, the
    # sums of earlier rounds exist; the gradient of `down` follows.
    yield products(2, 2 * computed + 2 * matrices * hidden + held, sums * (loops + 1 / matrices))
    # Gradients of rows: rows, which the next phase needs, and a product with each of the inner matrices.
    yield products(2, matrices * computed + (matrices - 1) * hidden + held, sums * (loops + 1 / matrices))
    # Gradients of the inner matrices, beside the exchange of the gradients of rows. A loop adds one kind at a time to
    # the carried sums.
    exchanged = computed + (0 if loops and not received else sent)
    yield products(0, computed + exchanged + (matrices - 1) * hidden + held, sums * (1 + loops / matrices))
    if slots:
        # Gradients of replicas on the way home: one array sent, one received, and their sums.
        room = system.replicate.max_incoming_replicas(slots, num_home, topology.ranks_per_domain)
        arriving = float(room * model.expert_bytes + model.expert_bytes / model.itemsize * SUMS_BYTES)
        yield Memory(replicas=replicas, buffers=float(sent + tokens), sums=sums, arriving=arriving)


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

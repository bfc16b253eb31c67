"""`memory_of` counts what one rank holds in a step, by name."""

from dataclasses import asdict, dataclass

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.systems import System

MOMENTS_BYTES = 8.0
"""Adam keeps two moments of every parameter, in float32."""

MASTER_BYTES = 4.0
"""Where parameters have fewer bits the optimizer keeps a copy of them in float32."""


@dataclass(frozen=True)
class Memory:
    """Counts the bytes on one rank, of the experts of these layers alone: no attention and no embedding.

    Args:
        weights: the bytes of the home experts of all layers.
        gradients: the bytes of their gradients; 0 without a backward pass, as are the next and `kept`.
        optimizer: the bytes of the optimizer's state of all home experts.
        replicas: the bytes of the slots beyond home experts, which all layers share; with a backward pass of their
            gradients, too.
        gathered: the bytes of the experts that expert domains gather, of all layers if they are kept, else of two; with
            a backward pass of the gradients of one layer, too; and of what a codec remembers of all layers.
        buffers: the bytes of the rows that a rank receives in one round, twice: as they come, and as they leave.
        kept: the bytes of token copies that all layers keep between forward and backward.
    """

    weights: float
    gradients: float
    optimizer: float
    replicas: float
    gathered: float
    buffers: float
    kept: float

    @property
    def total(self) -> float:
        """Returns the bytes of all of them together."""
        return sum(asdict(self).values())

    @property
    def words(self) -> str:
        """Says each part that there is, in GB."""
        names = {"gathered": "gathered experts", "kept": "kept rows"}
        parts = [(names.get(name, name), value) for name, value in asdict(self).items() if value]
        return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts)


def memory_of(system: System, model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> Memory:
    """Counts the memory of a rank, for which nothing needs to be simulated.

    Args:
        system: its replica slots and the buffers of its dispatch count.
        model: the sizes of the layers.
        cluster: its ranks share the experts.
        migration: which experts are gathered.
        step: without a backward pass there are no gradients, no optimizer, and nothing that is kept for them.
    """
    home, gathered = model.experts // cluster.num_ranks * model.expert_bytes, migration.gathered_bytes(model, cluster)
    parameters = model.layers * home / model.itemsize if step.backward else 0.0
    # Experts that are gathered again need two sets, as do those of inference: one in use, the next on its way.
    held = gathered * (model.layers if step.backward and not migration.gather_again else min(2, model.layers))
    if step.backward:
        held += gathered * model.gradient_itemsize // model.itemsize
    # Ranks keep what they decoded of every layer until its next gather, where differences are to be taken from it.
    if migration.codec.remembers:
        held += model.layers * (gathered + home)
    rows = model.layers * model.tokens * model.per_token if step.backward else 0
    return Memory(
        weights=float(model.layers * home),
        gradients=parameters * model.gradient_itemsize,
        optimizer=parameters * optimizer_bytes(model, step),
        replicas=float(
            system.replica_slots * (model.expert_bytes + (model.expert_gradient_bytes if step.backward else 0))
        ),
        gathered=float(held),
        buffers=float(2 * system.dispatch.buffer_rows(model.tokens * model.per_token) * model.row_bytes),
        kept=float(rows * model.row_bytes),
    )


def optimizer_bytes(model: ModelShape, step: Step) -> float:
    """Returns the bytes of the optimizer's state for each parameter.

    Args:
        model: the bytes of a parameter decide whether there is a copy in float32.
        step: what it says itself is taken, if it says something.
    """
    if step.optimizer_bytes is not None:
        return step.optimizer_bytes
    return MOMENTS_BYTES + (MASTER_BYTES if model.itemsize < MASTER_BYTES else 0.0)

"""`memory_of` counts what one rank holds in a step, by name.

Each term is an array of programs compiled for H100s, of which `jax-moe-lb compile` lists the largest by name, and
`benchmarks/bench_memory_model.py` holds the sum against what their compiler takes.
"""

from dataclasses import asdict, dataclass, replace

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.hbm import SUMS_BYTES
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.parts import Parts
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.systems import System

MOMENTS_BYTES = 8.0
"""Adam keeps two moments of every parameter, in float32."""

MASTER_BYTES = 4.0
"""Where parameters have fewer bits the optimizer keeps a copy of them in float32."""

ADDRESS_BYTES = 16
"""Of a token copy are kept its expert, its weight, and its place in the sending order and back: four bytes each."""

NAMES = {
    "gathered": "gathered experts",
    "kept": "kept tokens",
    "buffers": "buffers of a round",
    "in_use": "weights in use",
    "sums": "sums of gradients",
    "arriving": "arriving gradients",
}
"""What messages call the parts that are not called by their own names."""


@dataclass(frozen=True)
class Memory(Parts):
    """Counts the bytes on one rank, of the experts of these layers alone: no attention and no embedding.

    Layers run one after the other, so that what one of them needs while it runs counts once: replicas, and what follows
    `kept`. It has its most in products of the backward pass or where gradients of replicas come home.

    Args:
        weights: the bytes of the home experts of all layers.
        gradients: the bytes of their gradients; 0 without a backward pass, as are the next and `kept`.
        optimizer: the bytes of the optimizer's state of all home experts.
        replicas: the bytes of the slots beyond home experts, or of their gradients on their way home.
        gathered: the bytes of the experts that expert domains gather, of all layers if they are kept, else of two; with
            a backward pass of the gradients of one layer, too; and of what a codec remembers of all layers.
        kept: the bytes of what all layers keep between forward and backward: their tokens and where the copies go, or,
            where nothing is computed again, the copies and hidden activations; in a pipeline of all microbatches that
            the first stage has begun and not ended.
        buffers: the bytes of tokens, of copies as they are sent and received, and of hidden activations.
        in_use: the bytes of weights as products take them: those of one layer out of the stack of all, and, with
            replicas, one kind of all slots in one array; in the backward pass those of gate and up.
        sums: the bytes of the sums of gradients of all slots; in a loop over rounds with one kind of the round.
        arriving: the bytes of the gradients of replicas that a rank has room for, and of one sum of them.
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
        """Gives the bytes of each part that there is, by what messages call it."""
        return {NAMES.get(name, name): value for name, value in asdict(self).items() if value}

    @property
    def words(self) -> str:
        """Says each part that there is, in GB."""
        return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in self.by_name.items())


def memory_of(system: System, model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> Memory:
    """Counts the memory of a rank, for which nothing needs to be simulated.

    Args:
        system: its replica slots and its dispatch say what a layer needs while it runs.
        model: the sizes of the layers of one rank; see `Parallel.share`.
        cluster: its ranks share the experts.
        migration: which experts are gathered.
        step: without a backward pass there are no gradients, no optimizer, and nothing that is kept for them.
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
    backward = [layer.of_rows(), layer.of_weights(), layer.gradients_come_home()]
    phases = backward if step.backward else [layer.forward()]
    return always + max(phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class _Layer:
    """Counts what one layer needs while it runs, in the phases that may need most."""

    system: System
    model: ModelShape
    cluster: Cluster
    migration: Migration

    @property
    def loops(self) -> bool:
        """Tells whether a loop carries sums and outputs from one round to the next."""
        return self.system.dispatch.max_rounds != 1

    @property
    def num_home(self) -> int:
        """Counts the experts that a rank serves without replicas: its own, and those that it has gathered."""
        gathered = self.migration.gathered_bytes(self.model, self.cluster) // self.model.expert_bytes
        return self.model.experts // self.cluster.num_ranks + gathered

    @property
    def replica_slots(self) -> int:
        # Where a rank has all experts there are no replicas.
        return self.system.replica_slots if self.num_home < self.model.experts else 0

    def forward(self) -> Memory:
        """Copies are sent while the outputs of earlier rounds are there, or rows become hidden activations."""
        copies, rows, hidden = self._sizes()
        sending = copies + rows + copies * self.loops
        computing = rows + (self.model.matrices - 1) * hidden + copies * self.loops
        return self._products(1, max(sending, computing, rows + copies))

    def of_rows(self) -> Memory:
        """Gradients of hidden activations become those of rows: one array per matrix that rows met, and the sum."""
        copies, rows, hidden = self._sizes()
        matrices = self.model.matrices
        # The gradients of weights are there already, so that nothing needs rows and the gradients of their outputs.
        # Where they are by far larger than rows they are not, and then they need the most by themselves.
        buffers = matrices * rows + matrices * hidden + copies * self.loops
        return replace(self._products(2, buffers), sums=self._sums())

    def of_weights(self) -> Memory:
        """Rows and the gradients of their outputs become gradients of weights; hidden activations have theirs, too."""
        copies, rows, hidden = self._sizes()
        phase = self._products(2, 2 * rows + 2 * self.model.matrices * hidden + copies * self.loops)
        # A loop adds one kind after the other to what it carries.
        return replace(phase, sums=self._sums() * (1 + self.loops / self.model.matrices))

    def gradients_come_home(self) -> Memory:
        """Gradients of replicas are sent as one array and land in another, beside the sums that they are added to."""
        if not self.replica_slots:
            return Memory()
        model, domain = self.model, self.cluster.topology(self._inside()).ranks_per_domain
        room = self.system.replicate.room_at_home(self.replica_slots, self.num_home, domain)
        return Memory(
            replicas=float(self.replica_slots * model.expert_bytes),
            buffers=float(self._sizes()[0] + self._tokens()),
            sums=self._sums(),
            arriving=float(room * model.expert_bytes + model.expert_bytes / model.itemsize * SUMS_BYTES),
        )

    def _products(self, kinds: int, buffers: int) -> Memory:
        """Counts products that need so many kinds of the weights of all slots, in one array if they are joined."""
        model, slots = self.model, self.replica_slots
        home = model.experts // self.cluster.num_ranks * model.expert_bytes
        joined = kinds * (self.num_home + slots) * model.expert_bytes / model.matrices
        joined = joined if slots and self.system.joins_weights else 0.0
        return Memory(
            replicas=float(slots * model.expert_bytes),
            buffers=float(buffers + self._tokens()),
            # One layer alone is no stack.
            in_use=float(joined + home * (model.layers > 1)),
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Returns the bytes of all copies of a rank, of the rows that it receives in a round, and of one activation."""
        model, copies = self.model, self.model.tokens * self.model.per_token
        rows = self.system.dispatch.buffer_rows(copies)
        return copies * model.row_bytes, rows * model.row_bytes, rows * model.inner * model.itemsize

    def _tokens(self) -> int:
        """Returns the bytes of a layer's tokens and of its outputs, or of both's gradients."""
        return 2 * self.model.tokens * self.model.row_bytes

    def _sums(self) -> float:
        parameters = (self.num_home + self.replica_slots) * self.model.expert_bytes / self.model.itemsize
        # A single round rounds as it writes them.
        return parameters * (SUMS_BYTES if self.loops else self.model.itemsize)

    def _inside(self) -> tuple[int, ...]:
        sizes = self.migration.sizes(self.cluster)
        return tuple(level.size // size for level, size in zip(self.cluster.levels, sizes, strict=True))


def _gathered_bytes(model: ModelShape, cluster: Cluster, migration: Migration, step: Step) -> float:
    home, gathered = model.experts // cluster.num_ranks * model.expert_bytes, migration.gathered_bytes(model, cluster)
    # Experts that are gathered again need two sets, as do those of inference: one in use, the next on its way.
    held = gathered * (model.layers if step.backward and not migration.gather_again else min(2, model.layers))
    if step.backward:
        held += gathered * model.gradient_itemsize // model.itemsize
    # Ranks keep what they decoded of every layer until its next gather, where differences are to be taken from it.
    if migration.codec.remembers:
        held += model.layers * (gathered + home)
    return float(held)


def _kept_bytes(model: ModelShape, step: Step) -> int:
    """Returns the bytes of what one layer keeps for the backward pass."""
    copies = model.tokens * model.per_token
    if step.recompute:
        return model.tokens * model.row_bytes + copies * ADDRESS_BYTES
    return copies * (model.row_bytes + (model.matrices - 1) * model.inner * model.itemsize + ADDRESS_BYTES)


def optimizer_bytes(model: ModelShape, step: Step) -> float:
    """Returns the bytes of the optimizer's state for each parameter.

    Args:
        model: the bytes of a parameter decide whether there is a copy in float32.
        step: what it says itself is taken, if it says something.
    """
    if step.optimizer_bytes is not None:
        return step.optimizer_bytes
    return MOMENTS_BYTES + (MASTER_BYTES if model.itemsize < MASTER_BYTES else 0.0)

"""Bytes that one rank holds in a step and moves in a layer, by name.

`memory_of` counts the arrays of a step. Each term is an array of programs compiled for H100, of which `jax-moe-lb
compile` lists the largest; `benchmarks/bench_memory_model.py` compares the sum with the compiler's. `traffic_of` counts
reads and writes of device memory. Caches are left out, as in `aot/memory.py`: an array counts once when it is written
and once for every operation that reads it. `benchmarks/bench_hbm_model.py` compares the sum with compiled programs.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.transport.exchange import Kernels

BreakdownT = TypeVar("BreakdownT", bound="ByteBreakdown")


@dataclass(frozen=True)
class ByteBreakdown:
    """Parts are numbers, each with a name, that are summed up and added part by part."""

    @property
    def total(self) -> float:
        """Returns the bytes of all of them together."""
        return sum(asdict(self).values())

    def __add__(self: BreakdownT, other: BreakdownT) -> BreakdownT:
        """Returns both, part by part."""
        return type(self)(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


SUMS_BYTES = 4
"""Sums over rows, rounds and replicas are kept in float32."""


@dataclass(frozen=True)
class HbmTraffic(ByteBreakdown):
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
    rows = system.dispatch.cost().buffer_rows(copies)
    home = model.experts // cluster.num_ranks
    slots = home + system.replica_slots
    each = _Arrays(
        tokens=float(model.tokens * model.row_bytes),
        copies=float(copies * model.row_bytes),
        rows=float(rows * model.row_bytes),
        hidden=float(rows * model.inner * model.itemsize),
        kind=float(slots * model.expert_bytes / model.matrices),
    )
    inner, joins, loops = model.matrices - 1, system.needs_contiguous_weights, system.dispatch.buffers.max_rounds != 1
    replicas, turns = system.replica_slots, system.dispatch.kernels is Kernels.LIBRARY
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
class Memory(ByteBreakdown):
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
        return self.system.dispatch.buffers.max_rounds != 1

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
        room = self.system.replicate.max_incoming_replicas(self.replica_slots, self.num_home, domain)
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
        joined = joined if slots and self.system.needs_contiguous_weights else 0.0
        return Memory(
            replicas=float(slots * model.expert_bytes),
            buffers=float(buffers + self._tokens()),
            # One layer alone is no stack.
            in_use=float(joined + home * (model.layers > 1)),
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Returns the bytes of all copies of a rank, of the rows that it receives in a round, and of one activation."""
        model, copies = self.model, self.model.tokens * self.model.per_token
        rows = self.system.dispatch.cost().buffer_rows(copies)
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

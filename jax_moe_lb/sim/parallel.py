"""`Parallel` says with whom a rank works beside its expert-parallel group: tensor, data and pipeline groups.

A `Cluster` describes the expert-parallel group alone. The other groups have links of their own here, as a rank uses
them while it exchanges no tokens. What a rank does with them are further stages of a report: `tensor sums`, after
attention and after the experts; `data sums`, of the gradients of home experts; `stages`, activations on their way to
the next stage of a pipeline; and `pipeline bubble`, in which a stage waits for its first microbatch or the others' last
ones.
"""

import math
from dataclasses import dataclass, field, replace

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape


@dataclass(frozen=True)
class Peers:
    """Peers are the ranks of one group; the default is a rank alone.

    Args:
        size: how many they are, this rank included.
        bytes_per_s: what a rank sends to the next of them, each way.
        latency_s: the seconds of one way.

    Raises:
        ValueError: a number is out of range, or several ranks have no rate.

    Examples:
        Four ranks inside a node sum 100 MB in 0.4 ms:

        >>> from jax_moe_lb.sim import Peers
        >>> round(Peers(4, bytes_per_s=360e9, latency_s=3e-6).sum_s(100e6), 4)
        0.0004
    """

    size: int = 1
    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; expected at least 1")
        if (self.size > 1 or self.bytes_per_s is not None) and not 0 < (self.bytes_per_s or 0.0) < math.inf:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; expected a finite rate above 0 of {self.size} ranks")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s is {self.latency_s}; expected a finite number of seconds, at least 0")

    def sent_in_sum(self, num_bytes: float) -> float:
        """Counts the bytes that a rank sends in an all-reduce, on a ring."""
        return 2 * num_bytes * (self.size - 1) / self.size

    def sum_s(self, num_bytes: float) -> float:
        """Computes the seconds of an all-reduce, on a ring with a latency for every hop."""
        return self.send_s(self.sent_in_sum(num_bytes), 2 * (self.size - 1))

    def send_s(self, num_bytes: float, hops: int = 1) -> float:
        """Computes the seconds in which a rank sends bytes, in hops that follow each other; 0 for a rank alone."""
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s + hops * self.latency_s


@dataclass(frozen=True)
class Parallel:
    """Says which groups there are beside the expert-parallel one; by default none.

    Give it to a `Step`, and simulate the `share` of a model that one rank has.

    Args:
        tensor: the ranks that split attention's heads and the inner width of every expert, and have the same tokens,
            as those of `Topology.tensor_axes`.
        data: the ranks of further expert-parallel groups that have the same experts at home, whose gradients they sum.
        pipeline: the ranks that have the other layers.
        microbatches: how many of them a step has; usually 4 to 8 for every stage of a pipeline.
        interleave: how many parts of the layers each stage has, usually 1 or 2: a pipeline waits that much less.

    Raises:
        ValueError: a number is out of range, or a pipeline has nothing to interleave.

    Examples:
        Eight stages between nodes, and the same experts in four groups:

        >>> from jax_moe_lb.sim import Parallel, Peers
        >>> between_nodes = Peers(8, bytes_per_s=50e9, latency_s=10e-6)
        >>> Parallel(pipeline=between_nodes, data=Peers(4, 50e9), microbatches=32).bubble
        0.21875
    """

    tensor: Peers = field(default_factory=Peers)
    data: Peers = field(default_factory=Peers)
    pipeline: Peers = field(default_factory=Peers)
    microbatches: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("microbatches", "interleave"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.interleave > 1 and self.pipeline.size == 1:
            raise ValueError(f"interleave is {self.interleave}; expected 1 where one stage has all layers")

    @property
    def turns_waited(self) -> float:
        """Counts for how many microbatches a stage waits in a step, for its first one and after its last."""
        return (self.pipeline.size - 1) / self.interleave

    @property
    def bubble(self) -> float:
        """Returns the time in which a stage waits, over that in which it works (Narayanan et al., SC 2021, 2.2)."""
        return self.turns_waited / self.microbatches

    @property
    def in_flight(self) -> int:
        """Counts the microbatches whose activations the first stage keeps at once, one forward, one backward."""
        return min(self.microbatches, self.pipeline.size)

    @property
    def of_one_microbatch(self) -> "Parallel":
        """Returns the groups without the pipeline's turns, as all systems wait for these alike."""
        return replace(self, pipeline=Peers(), microbatches=1, interleave=1)

    def share(self, model: ModelShape, cluster: Cluster) -> ModelShape:
        """Returns what a rank has of a model: some layers, of each expert a part of the inner width.

        Args:
            model: the whole model.
            cluster: how fast a rank computes what is before the experts.

        Raises:
            ValueError: there are more stages than layers, or the tensor group does not divide an inner width.
        """
        stages, parts = self.pipeline.size * self.interleave, self.tensor.size
        if stages > model.layers:
            raise ValueError(f"pipeline has {stages} parts; expected at most the model's {model.layers} layers")
        for name in ("inner", "shared_inner"):
            if getattr(model, name) % parts:
                raise ValueError(f"tensor.size is {parts}; expected a divisor of {name} {getattr(model, name)}")
        # A step waits for the stages that have one layer more.
        layers = math.ceil(model.layers / stages) * self.interleave
        inner, shared = model.inner // parts, model.shared_inner // parts
        before_s = model.before_experts_s(cluster) / parts if parts > 1 else model.pre_expert_s
        return replace(model, layers=layers, inner=inner, shared_inner=shared, pre_expert_s=before_s)

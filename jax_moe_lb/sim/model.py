"""A simulated model and training step: sizes of a layer, passes, and parallelism beside experts.

A `Cluster` describes the expert-parallel group alone. Tensor, data and pipeline groups (`Parallel`) have links of their
own, which a rank uses while it exchanges no tokens. They add stages to a report: `tensor sums`, after attention and
after the experts; `data sums`, of the gradients of home experts; `stages`, activations on their way to the next
pipeline stage; and `pipeline bubble`.
"""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.transport.compression import Codec

DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}
"""These dtypes have so many bytes; only their size matters."""

ATTENTION_PRODUCTS = 4
"""Every token is multiplied with so many `H x H` matrices: for queries, keys, values and output."""


@dataclass(frozen=True)
class ModelShape:
    """A model shape has the sizes of layers that are all alike, with one microbatch per step.

    Fill it in for `simulate`, `replay` and `skewed_counts`; `sim/presets` has some models.

    Args:
        layers: the MoE layers of the model.
        hidden: `H`, the width of the model.
        inner: `F`, the inner width of an expert.
        experts: `E`, the experts of a layer.
        per_token: `K`, the experts of a token, usually 1 to 8.
        tokens: `T`, the tokens of each rank, 4096 to 8192 in the presets.
        itemsize: the bytes of a number, in weights and in tokens as they travel; usually 2, for bfloat16.
        gradient_itemsize: the bytes of a number in the experts' gradients; usually 4, for float32.
        gated: whether experts have three matrices (SwiGLU), which is usual, or two.
        pre_expert_s: the seconds between the experts of one layer and the router's result of the next, forward; `None`
            computes them from the floating-point operations of attention.
        sequence: the tokens that attend to each other, where `pre_expert_s` is `None`.
        other_s: the seconds of a step outside these layers: optimizer, embedding, output.
        shared_inner: the inner width of the experts that all tokens pass on their own rank, together; 0 without any.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import ModelShape
        >>> model = ModelShape(layers=58, hidden=7168, inner=2048, experts=256, per_token=8, tokens=4096)
        >>> model.row_bytes, model.expert_bytes
        (14336, 88080384)
    """

    layers: int
    hidden: int
    inner: int
    experts: int
    per_token: int
    tokens: int
    itemsize: int = 2
    gradient_itemsize: int = 4
    gated: bool = True
    pre_expert_s: float | None = None
    sequence: int = 4096
    other_s: float = 0.0
    shared_inner: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "inner", "experts", "per_token", "tokens", "itemsize", "gradient_itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.shared_inner < 0:
            raise ValueError(f"shared_inner is {self.shared_inner}; expected at least 0")
        if self.itemsize not in DTYPES:
            raise ValueError(f"itemsize is {self.itemsize}; expected one of {', '.join(map(str, DTYPES))}")
        if self.per_token > self.experts:
            raise ValueError(f"per_token is {self.per_token}; expected at most the {self.experts} experts")
        for name in ("pre_expert_s", "other_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number of seconds, at least 0")

    @property
    def matrices(self) -> int:
        """Counts the matrices of one expert."""
        return 3 if self.gated else 2

    @property
    def row_bytes(self) -> int:
        """Counts the bytes of one token copy as it travels."""
        return self.hidden * self.itemsize

    @property
    def row_flops(self) -> int:
        """Counts the floating-point operations of one token copy through its expert, forward."""
        return 2 * self.matrices * self.hidden * self.inner

    @property
    def shared_flops(self) -> int:
        """Counts the floating-point operations of one token through the experts that all tokens pass, forward."""
        return 2 * self.matrices * self.hidden * self.shared_inner

    @property
    def expert_bytes(self) -> int:
        """Counts the bytes of one expert's weights."""
        return self.matrices * self.hidden * self.inner * self.itemsize

    @property
    def expert_gradient_bytes(self) -> int:
        """Counts the bytes of one expert's gradients."""
        return self.matrices * self.hidden * self.inner * self.gradient_itemsize

    @property
    def facts(self) -> LayerCost:
        """Returns what a layer of the model tells its balancer."""
        return LayerCost(
            num_copies=self.tokens * self.per_token,
            expert_bytes=self.expert_bytes,
            gradient_bytes=self.expert_gradient_bytes,
            token_bytes=self.row_bytes,
            token_flops=self.row_flops,
        )

    def encoded_bytes(self, codec: Codec, num_experts: int) -> int:
        """Counts the bytes of experts as they travel through a codec, which is asked with shapes alone.

        Args:
            codec: what they are encoded with.
            num_experts: how many travel together.
        """
        up = jax.ShapeDtypeStruct((num_experts, self.hidden, self.inner), DTYPES[self.itemsize])
        down = jax.ShapeDtypeStruct((num_experts, self.inner, self.hidden), DTYPES[self.itemsize])
        found = []

        def ask(experts: Experts) -> None:
            found.append(codec.encoded_bytes(experts))

        # Nothing is allocated so, however large the experts are.
        jax.eval_shape(lambda up, down: ask(Experts(up, down, up if self.gated else None)), up, down)
        return found[0]

    def before_experts_s(self, cluster: Cluster) -> float:
        """Computes the seconds of attention and router of one layer, forward, on one rank."""
        if self.pre_expert_s is not None:
            return self.pre_expert_s
        products = 2 * ATTENTION_PRODUCTS * self.hidden**2 + 2 * self.hidden * self.experts
        # Scores and their products with the values; half of them, as no token sees later ones.
        attention = 2 * self.hidden * self.sequence
        return self.tokens * (products + attention) / cluster.flops_per_s


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


@dataclass(frozen=True)
class Step:
    """A step says which passes are simulated.

    Give it to `simulate` and `replay` where something else than this library's training step is wanted.

    Args:
        backward: whether there is a backward pass; without it this is inference.
        recompute: whether the backward pass sends token copies and computes hidden activations again, as this
            library does; else it has kept both.
        exchange_counts: whether ranks tell each other their counts, as this library does in every layer. HybridEP's
            model leaves that out.
        optimizer_bytes: the bytes of the optimizer's state that a rank keeps for each parameter of its home experts,
            where the step has a backward pass. `None`, the default, is Adam: 8 for two moments in float32, and 4 more
            for a copy in float32 where parameters have fewer bytes. Give less where the state is split over groups.
        parallel: the groups beside the expert-parallel one; none by default.

    Raises:
        ValueError: `optimizer_bytes` is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Step
        >>> Step(backward=False).recompute
        True
    """

    backward: bool = True
    recompute: bool = True
    exchange_counts: bool = True
    optimizer_bytes: float | None = None
    parallel: Parallel = field(default_factory=Parallel)

    def __post_init__(self) -> None:
        if self.optimizer_bytes is not None and not 0 <= self.optimizer_bytes < math.inf:
            raise ValueError(f"optimizer_bytes is {self.optimizer_bytes}; expected a finite number, at least 0")

"""Shapes of a simulated model, passes of a training step, and parallel groups beside expert parallelism.

A `Cluster` describes only the expert-parallel group. Tensor, data and pipeline groups (`Parallel`) have links of their
own, which carry no tokens of the expert-parallel exchanges. They add stages to a report:

- `tensor sums`: all-reduces after attention and after the experts,
- `data sums`: all-reduces of the gradients of home experts,
- `stages`: transfers of activations to the next pipeline stage,
- `pipeline bubble`: idle time of a pipeline stage.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.checks import Count, Natural, NonNegative, checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.transport.compression import Codec

DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}
"""Dtype by bytes per element. Only the size matters, so one dtype per size suffices."""

ATTENTION_PRODUCTS = 4
"""Number of `H x H` projections per token: query, key, value and output."""


@dataclass(frozen=True)
@checked_fields
class ModelShape:
    """Sizes of a model with identical MoE layers and one microbatch per step.

    Pass it to `simulate`, `replay` and `skewed_counts`; `sim/presets` has some models.

    Args:
        layers: Number of MoE layers.
        hidden: Model width `H`.
        inner: Inner width `F` of an expert.
        experts: Number of experts `E` per layer.
        per_token: Number of experts `K` per token, usually 1 to 8.
        tokens: Tokens `T` per rank and microbatch, 4096 to 8192 in the presets.
        itemsize: Bytes per element of weights and of tokens in transfer: 1, 2 (default, bfloat16) or 4.
        gradient_itemsize: Bytes per element of the gradients of home experts, in memory and in sums over data-parallel
            groups: 1, 2 or 4 (default, float32). Gradients of replicas and of gathered experts travel in `itemsize`.
        gated: If True (default), experts have three matrices (SwiGLU), else two.
        pre_expert_s: Seconds of the forward pass from the experts of one layer to the router output of the next. If
            None (default), it is computed from the floating-point operations of attention and router.
        sequence: Sequence length of attention, 4096 by default. Used only if `pre_expert_s` is None.
        other_s: Seconds of a step outside these layers, such as optimizer, embedding and output; 0 by default.
        shared_inner: Total inner width of the shared experts; 0 (default) for none. Every token passes them on its own
            rank.

    Raises:
        ValueError: A size is below 1, an itemsize has no dtype, `per_token` exceeds `experts`, or a time is negative or
            infinite.

    Examples:
        >>> from jax_moe_lb.sim import ModelShape
        >>> model = ModelShape(layers=58, hidden=7168, inner=2048, experts=256, per_token=8, tokens=4096)
        >>> model.row_bytes, model.expert_bytes
        (14336, 88080384)
    """

    layers: Count
    hidden: Count
    inner: Count
    experts: Count
    per_token: Count
    tokens: Count
    itemsize: Count = 2
    gradient_itemsize: Count = 4
    gated: bool = True
    pre_expert_s: NonNegative | None = None
    sequence: Count = 4096
    other_s: NonNegative = 0.0
    shared_inner: Natural = 0

    def __post_init__(self) -> None:
        for name in ("itemsize", "gradient_itemsize"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)}; expected one of {', '.join(map(str, DTYPES))}")
        if self.per_token > self.experts:
            raise ValueError(f"per_token is {self.per_token}; expected at most the {self.experts} experts")

    @property
    def matrices(self) -> int:
        """Number of matrices of one expert."""
        return 3 if self.gated else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token copy in transfer."""
        return self.hidden * self.itemsize

    @property
    def row_flops(self) -> int:
        """Floating-point operations of one token copy in the forward pass of the expert."""
        return 2 * self.matrices * self.hidden * self.inner

    @property
    def shared_flops(self) -> int:
        """Floating-point operations of one token in the forward pass of the shared experts."""
        return 2 * self.matrices * self.hidden * self.shared_inner

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return self.matrices * self.hidden * self.inner * self.itemsize

    @property
    def expert_gradient_bytes(self) -> int:
        """Bytes of the gradients of one home expert."""
        return self.matrices * self.hidden * self.inner * self.gradient_itemsize

    @property
    def facts(self) -> LayerCost:
        """Cost of one layer, as input of the balancer."""
        return LayerCost(
            num_copies=self.tokens * self.per_token,
            expert_bytes=self.expert_bytes,
            gradient_bytes=self.expert_bytes,
            token_bytes=self.row_bytes,
            token_flops=self.row_flops,
        )

    def encoded_bytes(self, codec: Codec, num_experts: int) -> int:
        """Count the bytes of encoded experts, or of the gradients, from the shapes alone.

        Args:
            codec: Codec of the experts, or its `of_gradients`.
            num_experts: Number of experts encoded together.

        Returns:
            The number of bytes.
        """
        return _encoded_bytes(codec, (num_experts, self.hidden, self.inner), self.itemsize, self.gated)

    def with_tokens(self, tokens: int) -> "ModelShape":
        """Return the model with other tokens per rank; `pre_expert_s` changes in proportion.

        Args:
            tokens: Tokens `T` per rank and microbatch.
        """
        before_s = self.pre_expert_s
        return replace(self, tokens=tokens, pre_expert_s=before_s and before_s * tokens / self.tokens)

    def before_experts_s(self, cluster: Cluster) -> float:
        """Compute the seconds of attention and router of one layer in the forward pass, on one rank."""
        if self.pre_expert_s is not None:
            return self.pre_expert_s
        products = 2 * ATTENTION_PRODUCTS * self.hidden**2 + 2 * self.hidden * self.experts
        # Scores and their products with the values; half of each, because attention is causal.
        attention = 2 * self.hidden * self.sequence
        return self.tokens * (products + attention) / cluster.flops_per_s


@lru_cache(maxsize=64)
def _encoded_bytes(codec: Codec, shape: tuple[int, int, int], itemsize: int, gated: bool) -> int:
    """Count the bytes of encoded experts of shape `[E, H, F]`, once for all choices of a search."""
    num_experts, hidden, inner = shape
    up = jax.ShapeDtypeStruct(shape, DTYPES[itemsize])
    down = jax.ShapeDtypeStruct((num_experts, inner, hidden), DTYPES[itemsize])
    found = []

    def ask(experts: Experts) -> None:
        found.append(codec.encoded_bytes(experts))

    # `eval_shape` calls the codec with abstract arrays, so experts of any size take no memory.
    jax.eval_shape(lambda up, down: ask(Experts(up, down, up if gated else None)), up, down)
    return found[0]


@dataclass(frozen=True)
@checked_fields
class Peers:
    """Ranks of one parallel group, and the link from each rank to the next; a single rank by default.

    Args:
        size: Number of ranks, this rank included; 1 by default.
        bytes_per_s: Rate of the link to the next rank in each direction, in bytes per second. Required if `size` is
            above 1.
        latency_s: Latency of one hop, in seconds; 0 by default.

    Raises:
        ValueError: A number is out of range, or `bytes_per_s` is missing for several ranks.

    Examples:
        An all-reduce of 100 MB over four ranks of a node takes 0.4 ms:

        >>> from jax_moe_lb.sim import Peers
        >>> round(Peers(4, bytes_per_s=360e9, latency_s=3e-6).sum_s(100e6), 4)
        0.0004
    """

    size: Count = 1
    bytes_per_s: float | None = None
    latency_s: NonNegative = 0.0

    def __post_init__(self) -> None:
        if (self.size > 1 or self.bytes_per_s is not None) and not 0 < (self.bytes_per_s or 0.0) < math.inf:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; expected a finite rate above 0 of {self.size} ranks")

    def sent_in_sum(self, num_bytes: float) -> float:
        """Count the bytes that one rank sends in a ring all-reduce of `num_bytes` bytes."""
        return 2 * num_bytes * (self.size - 1) / self.size

    def sum_s(self, num_bytes: float) -> float:
        """Compute the seconds of a ring all-reduce, with one latency per hop."""
        return self.send_s(self.sent_in_sum(num_bytes), 2 * (self.size - 1))

    def send_s(self, num_bytes: float, hops: int = 1) -> float:
        """Compute the seconds to send `num_bytes` bytes over `hops` sequential hops; 0 if there is no rate."""
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s + hops * self.latency_s


@dataclass(frozen=True)
@checked_fields
class Parallel:
    """Parallel groups beside the expert-parallel group; none by default.

    Pass it to a `Step`, and simulate one rank's `share` of the model.

    Args:
        tensor: Tensor-parallel group. Its ranks split the attention heads and the inner width of every expert, and
            hold the same tokens, like the ranks of `Topology.tensor_axes`.
        data: Ranks of other expert-parallel groups with the same home experts. They all-reduce the gradients of these
            experts.
        pipeline: Pipeline group. Its ranks hold the other layers.
        microbatches: Microbatches per step, usually 4 to 8 per pipeline stage; 1 by default.
        interleave: Parts of the layers per pipeline stage, usually 1 (default) or 2. The pipeline bubble shrinks by
            this factor.

    Raises:
        ValueError: A number is below 1, or `interleave` is above 1 without a pipeline.

    Examples:
        Eight pipeline stages on different nodes, and four data-parallel groups:

        >>> from jax_moe_lb.sim import Parallel, Peers
        >>> between_nodes = Peers(8, bytes_per_s=50e9, latency_s=10e-6)
        >>> Parallel(pipeline=between_nodes, data=Peers(4, 50e9), microbatches=32).bubble
        0.21875
    """

    tensor: Peers = field(default_factory=Peers)
    data: Peers = field(default_factory=Peers)
    pipeline: Peers = field(default_factory=Peers)
    microbatches: Count = 1
    interleave: Count = 1

    def __post_init__(self) -> None:
        if self.interleave > 1 and self.pipeline.size == 1:
            raise ValueError(f"interleave is {self.interleave}; expected 1, as one pipeline stage has all layers")

    @property
    def turns_waited(self) -> float:
        """Idle time of a stage in one step, in microbatches: before its first one and after its last one."""
        return (self.pipeline.size - 1) / self.interleave

    @property
    def bubble(self) -> float:
        """Ratio of a stage's idle time to its busy time.

        Reference: Narayanan et al., SC 2021, section 2.2.
        """
        return self.turns_waited / self.microbatches

    @property
    def in_flight(self) -> int:
        """Number of microbatches with live activations on the first stage (1F1B schedule)."""
        return min(self.microbatches, self.pipeline.size)

    @property
    def of_one_microbatch(self) -> "Parallel":
        """These groups without pipeline and microbatches, as all systems have the same pipeline bubble."""
        return replace(self, pipeline=Peers(), microbatches=1, interleave=1)

    def share(self, model: ModelShape, cluster: Cluster) -> ModelShape:
        """Return the part of a model held by one rank: some layers, and a slice of the inner width per expert.

        Args:
            model: Shape of the whole model.
            cluster: Cluster whose compute rate gives the seconds before the experts.

        Returns:
            Shape with the rank's number of layers, inner widths and `pre_expert_s`.

        Raises:
            ValueError: There are more stages than layers, or `tensor.size` does not divide an inner width.
        """
        stages, parts = self.pipeline.size * self.interleave, self.tensor.size
        if stages > model.layers:
            raise ValueError(f"pipeline has {stages} parts; expected at most the model's {model.layers} layers")
        for name in ("inner", "shared_inner"):
            if getattr(model, name) % parts:
                raise ValueError(f"tensor.size is {parts}; expected a divisor of {name} {getattr(model, name)}")
        # The slowest stages have the most layers, so round up.
        layers = math.ceil(model.layers / stages) * self.interleave
        inner, shared = model.inner // parts, model.shared_inner // parts
        before_s = model.before_experts_s(cluster) / parts if parts > 1 else model.pre_expert_s
        return replace(model, layers=layers, inner=inner, shared_inner=shared, pre_expert_s=before_s)


@dataclass(frozen=True)
@checked_fields
class Step:
    """Passes and options of a simulated step; a training step of this library by default.

    Pass it to `simulate` and `replay` to simulate inference or another library's training step.

    Args:
        backward: If True (default), the step has a backward pass; if False, it is inference.
        recompute: If True (default, as in this library), the backward pass sends token copies again and rematerializes
            hidden activations. If False, both are residuals.
        exchange_counts: If True (default, as in this library), every layer all-gathers the counts. HybridEP's model
            has no such exchange.
        optimizer_bytes: Bytes of optimizer state per parameter of a rank's home experts, if the step has a backward
            pass. None (default) stands for Adam: 8 bytes for two moments in float32, plus 4 for a float32 copy of
            parameters of fewer bytes. Use a smaller number if data-parallel groups shard the state.
        parallel: Groups beside the expert-parallel group; none by default.

    Raises:
        ValueError: `optimizer_bytes` is negative or infinite.

    Examples:
        >>> from jax_moe_lb.sim import Step
        >>> Step(backward=False).recompute
        True
    """

    backward: bool = True
    recompute: bool = True
    exchange_counts: bool = True
    optimizer_bytes: NonNegative | None = None
    parallel: Parallel = field(default_factory=Parallel)

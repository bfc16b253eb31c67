"""One MoE layer with expert domains across two datacenters, forward and backward, and what it should move."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Experts, TopK, Topology, moe, plain
from jax_moe_lb.core import Level
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing import ForceBalanced
from jax_moe_lb.sim import Work
from jax_moe_lb.sim.stream_model import Latency, latency
from jax_moe_lb.transport import Codec, ExpertDomains, GatherExpertDomain, hybrid_mesh

MESH_SHAPE, MESH_AXES = (2, 2), ("dc", "gpu")
RANKS_PER_DC = MESH_SHAPE[1]
NUM_RANKS = math.prod(MESH_SHAPE)

EXCHANGES = 2
"""Of the forward pass: there and back."""

BACKWARD_EXCHANGES = 3
"""Of the backward pass: the copies again, the gradients of their outputs, and back those of the copies."""

SYSTEM: System = plain(headroom=1.0)
"""Routing is balanced by force. Room to spare would travel as well: exchanges between processes are padded."""


@dataclass(frozen=True)
class Sizes:
    """Of a layer of plain GELU experts in float32, on four ranks.

    Args:
        num_tokens: `T`, per rank.
        width: `H`.
        inner: `F`.
        num_experts: `E`.
        per_tok: `K`.
    """

    num_tokens: int
    width: int
    inner: int
    num_experts: int = 16
    per_tok: int = 2

    @property
    def token_bytes(self) -> int:
        """Of the copies of a rank's tokens."""
        return 4 * self.num_tokens * self.per_tok * self.width

    @property
    def one_expert_bytes(self) -> int:
        """Of its two matrices."""
        return 8 * self.width * self.inner

    @property
    def expert_bytes(self) -> int:
        """Of a rank's home experts."""
        return self.one_expert_bytes * self.num_experts // NUM_RANKS

    def encoded_bytes(self, codec: Codec) -> int:
        """Of the same as they travel."""
        home = self.num_experts // NUM_RANKS
        up, down = (home, self.width, self.inner), (home, self.inner, self.width)
        found: list[int] = []
        shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (up, down)]
        # No array, so that no backend starts: ranks are forked from here.
        jax.eval_shape(lambda *weights: found.append(codec.encoded_bytes(Experts(*weights))), *shapes)
        return found[0]


@dataclass(frozen=True)
class Choice:
    """How large domains are and what travels in them.

    Args:
        dc: members of a domain along the datacenters, 1 or 2.
        gpu: and inside them.
        ratio: of the codec.
    """

    dc: int
    gpu: int
    ratio: float = 1.0

    @property
    def codec(self) -> Codec:
        """With a shared expert."""
        return Codec(self.ratio)

    @property
    def compresses(self) -> bool:
        """Whether anything is encoded at all."""
        return self.ratio > 1 and self.dc * self.gpu > 1

    def __str__(self) -> str:
        return f"{self.dc} x {self.gpu}" + (f", CR {self.ratio:.0f}" if self.dc * self.gpu > 1 else "")


PLAIN = Choice(1, 1)
"""Plain expert parallelism."""

RATIOS = (1.0, 10.0, 50.0)

CHOICES = (PLAIN, *(Choice(dc, gpu, ratio) for dc, gpu in ((1, 2), (2, 1), (2, 2)) for ratio in RATIOS))
"""All admissible domain sizes."""


def work_of(sizes: Sizes, ratio: float) -> Work:
    """For the model of domain sizes: forward and backward, with nothing that hides a gather."""
    return Work(
        float(sizes.token_bytes),
        float(sizes.encoded_bytes(Codec(ratio))),
        pre_expert_s=0.0,
        gradient_bytes=float(sizes.expert_bytes),
        backward_exchanges=BACKWARD_EXCHANGES,
    )


def between_datacenters(sizes: Sizes, choice: Choice, payload_bytes_per_s: float) -> Latency:
    """The model's view of the link between: every rank has its share of it."""
    level = Level("dc", MESH_SHAPE[0], payload_bytes_per_s / RANKS_PER_DC)
    return latency(work_of(sizes, choice.ratio), level, choice.dc)


def summed_bytes(sizes: Sizes, choice: Choice) -> float:
    """What all-reduces over all ranks send over every link of their ring; the model leaves them out.

    The gradients of the router's kernel, and the shared expert of a codec.
    """
    summed = 4 * sizes.width * sizes.num_experts + (sizes.one_expert_bytes if choice.compresses else 0)
    return 2 * (NUM_RANKS - 1) / NUM_RANKS * summed


def wan_bytes(sizes: Sizes, choice: Choice) -> float:
    """What each datacenter sends to the other in one step."""
    at = between_datacenters(sizes, choice, 1.0)
    home = sizes.expert_bytes * (choice.dc - 1)
    exchanges = (EXCHANGES + BACKWARD_EXCHANGES) * at.exchange_bytes
    return RANKS_PER_DC * (at.gather_bytes + home + exchanges) + summed_bytes(sizes, choice)


def wan_s(sizes: Sizes, choice: Choice, payload_bytes_per_s: float) -> float:
    """Seconds on the link between."""
    model_s = between_datacenters(sizes, choice, payload_bytes_per_s).total_s
    return model_s + summed_bytes(sizes, choice) / payload_bytes_per_s


def whole_mesh() -> Mesh:
    """Ranks by datacenter, on the first devices."""
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=axis_types, devices=jax.devices()[:NUM_RANKS])


def domains_of(choice: Choice) -> tuple[Mesh, ExpertDomains]:
    """The split mesh."""
    base = whole_mesh()
    mesh = hybrid_mesh(base, {"dc": choice.dc, "gpu": choice.gpu})
    return mesh, ExpertDomains.from_mesh(mesh, Topology.from_mesh(base, MESH_AXES))


def jitted_step(choice: Choice, sizes: Sizes) -> tuple[Wrapped, tuple]:
    """`(x, kernel, experts) -> (gradients, outputs)`, and arguments for it; every process holds its part of them."""
    mesh, domains = domains_of(choice)
    migrate = GatherExpertDomain(domains, choice.codec)
    router, between = ForceBalanced(TopK(sizes.per_tok)), domains.between
    by_token = PartitionSpec(between.data_axes + between.expert_axes)
    specs = (by_token, PartitionSpec(), PartitionSpec(domains.expert_axes))

    def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> jax.Array:
        return moe(x, kernel, migrate(experts), router, SYSTEM, between)[0]

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=by_token)

    def loss(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = run(*args)
        return jnp.square(y).sum(), y

    rng = np.random.default_rng(0)
    num_tokens, width, inner, num_experts = NUM_RANKS * sizes.num_tokens, sizes.width, sizes.inner, sizes.num_experts
    x, kernel = rng.standard_normal((num_tokens, width), np.float32), np.zeros((width, num_experts), np.float32)
    shapes = [(num_experts, width, inner), (num_experts, inner, width)]
    # Experts resemble each other, as trained ones do.
    up, down = (
        0.1 * rng.standard_normal(s[1:], np.float32) + 0.01 * rng.standard_normal(s, np.float32) for s in shapes
    )

    def place(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    experts = Experts(place(up, specs[2]), place(down, specs[2]))
    args = (place(x, specs[0]), place(kernel, specs[1]), experts)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)), args

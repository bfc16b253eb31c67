"""One MoE layer with expert domains across two datacenters, forward and backward, and its expected traffic."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Buffers, Experts, MoEParams, TopK, Topology, moe, plain
from jax_moe_lb.core import Level
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing import ForceBalanced
from jax_moe_lb.sim import Work
from jax_moe_lb.sim.stream_model import Latency, latency
from jax_moe_lb.transport import Codec, CodecBase, ExpertDomains, GatherExpertDomain, hybrid_mesh

MESH_SHAPE, MESH_AXES = (2, 2), ("dc", "gpu")
RANKS_PER_DC = MESH_SHAPE[1]
NUM_RANKS = math.prod(MESH_SHAPE)

EXCHANGES = 2
"""Exchanges of the forward pass: dispatch and combine."""

BACKWARD_EXCHANGES = 3
"""Exchanges of the backward pass: the copies again, the gradients of their outputs, and the gradients of the copies."""

SYSTEM: System = plain(Buffers(headroom=1.0), dispatch="direct")
"""Routing is force-balanced. Headroom would be sent as well, as exchanges between processes are padded."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer of GELU experts in float32, on four ranks."""

    num_tokens: int
    width: int
    inner: int
    num_experts: int = 16
    per_tok: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of the token copies of a rank."""
        return 4 * self.num_tokens * self.per_tok * self.width

    @property
    def one_expert_bytes(self) -> int:
        """Bytes of an expert's two matrices."""
        return 8 * self.width * self.inner

    @property
    def expert_bytes(self) -> int:
        """Bytes of a rank's home experts."""
        return self.one_expert_bytes * self.num_experts // NUM_RANKS

    def encoded_bytes(self, codec: Codec) -> int:
        """Return the bytes of a rank's encoded home experts."""
        home = self.num_experts // NUM_RANKS
        up, down = (home, self.width, self.inner), (home, self.inner, self.width)
        found: list[int] = []
        shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (up, down)]
        # Use abstract shapes only, as a backend must not start before ranks are forked.
        jax.eval_shape(lambda *weights: found.append(codec.encoded_bytes(Experts(*weights))), *shapes)
        return found[0]


@dataclass(frozen=True)
class Choice:
    """Domain sizes and compression ratio."""

    dc: int
    gpu: int
    ratio: float = 1.0

    @property
    def codec(self) -> Codec:
        """Codec with a shared expert, and with whole gradients."""
        return Codec(self.ratio, CodecBase.SHARED, gradient_ratio=1.0) if self.ratio > 1 else Codec()

    @property
    def compresses(self) -> bool:
        """Whether experts are encoded."""
        return self.ratio > 1 and self.dc * self.gpu > 1

    def __str__(self) -> str:
        return f"{self.dc} x {self.gpu}" + (f", CR {self.ratio:.0f}" if self.dc * self.gpu > 1 else "")


PLAIN = Choice(1, 1)
"""Plain expert parallelism."""

RATIOS = (1.0, 10.0, 50.0)

CHOICES = (PLAIN, *(Choice(dc, gpu, ratio) for dc, gpu in ((1, 2), (2, 1), (2, 2)) for ratio in RATIOS))
"""All valid domain sizes."""


def work_of(sizes: Sizes, ratio: float) -> Work:
    """Return the work for the model of domain sizes: forward and backward, without overlap of gathers."""
    sent = float(sizes.token_bytes), float(sizes.encoded_bytes(Codec(ratio)))
    gradients = float(sizes.expert_bytes)
    return Work(*sent, pre_expert_s=0.0, gradient_bytes=gradients, backward_exchanges=BACKWARD_EXCHANGES)


def between_datacenters(sizes: Sizes, choice: Choice, payload_bytes_per_s: float) -> Latency:
    """Return the model's latency of the link between datacenters; each rank has an equal share of it."""
    level = Level("dc", MESH_SHAPE[0], payload_bytes_per_s / RANKS_PER_DC)
    return latency(work_of(sizes, choice.ratio), level, choice.dc)


def summed_bytes(sizes: Sizes, choice: Choice) -> float:
    """Return the bytes sent over every link by ring all-reduces, which the model omits.

    They are the gradients of the router's kernel, and the shared expert of a codec.
    """
    summed = 4 * sizes.width * sizes.num_experts + (sizes.one_expert_bytes if choice.compresses else 0)
    return 2 * (NUM_RANKS - 1) / NUM_RANKS * summed


def wan_bytes(sizes: Sizes, choice: Choice) -> float:
    """Return the bytes sent by each datacenter to the other in one step."""
    at = between_datacenters(sizes, choice, 1.0)
    home = sizes.expert_bytes * (choice.dc - 1)
    exchanges = (EXCHANGES + BACKWARD_EXCHANGES) * at.exchange_bytes
    return RANKS_PER_DC * (at.gather_bytes + home + exchanges) + summed_bytes(sizes, choice)


def wan_s(sizes: Sizes, choice: Choice, payload_bytes_per_s: float) -> float:
    """Return the time on the link between datacenters, in seconds."""
    model_s = between_datacenters(sizes, choice, payload_bytes_per_s).total_s
    return model_s + summed_bytes(sizes, choice) / payload_bytes_per_s


def whole_mesh() -> Mesh:
    """Return the mesh of ranks by datacenter, on the first devices."""
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=axis_types, devices=jax.devices()[:NUM_RANKS])


def placed(mesh: Mesh, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Return an array on all processes, of which each makes its own part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def domains_of(choice: Choice) -> tuple[Mesh, ExpertDomains]:
    base = whole_mesh()
    mesh = hybrid_mesh(base, {"dc": choice.dc, "gpu": choice.gpu})
    return mesh, ExpertDomains.from_mesh(mesh, Topology.from_mesh(base, MESH_AXES))


def jitted_step(choice: Choice, sizes: Sizes) -> tuple[Wrapped, tuple]:
    """Return `(x, kernel, experts) -> (gradients, outputs)` and its arguments, sharded over processes."""
    mesh, domains = domains_of(choice)
    migrate = GatherExpertDomain(domains, choice.codec)
    router, between = ForceBalanced(TopK(sizes.per_tok)), domains.between
    by_token = PartitionSpec(between.data_axes + between.expert_axes)
    specs = (by_token, PartitionSpec(), PartitionSpec(domains.expert_axes))

    def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> jax.Array:
        return moe(x, MoEParams(kernel, migrate(experts)), router, SYSTEM, between)[0]

    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=by_token)

    def loss(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = run(*args)
        return jnp.square(y).sum(), y

    rng = np.random.default_rng(0)
    num_tokens, width, inner, num_experts = NUM_RANKS * sizes.num_tokens, sizes.width, sizes.inner, sizes.num_experts
    x, kernel = rng.standard_normal((num_tokens, width), np.float32), np.zeros((width, num_experts), np.float32)
    shapes = [(num_experts, width, inner), (num_experts, inner, width)]
    # Experts share a common component, like trained ones.
    up, down = (
        0.1 * rng.standard_normal(s[1:], np.float32) + 0.01 * rng.standard_normal(s, np.float32) for s in shapes
    )

    experts = Experts(placed(mesh, up, specs[2]), placed(mesh, down, specs[2]))
    args = (placed(mesh, x, specs[0]), placed(mesh, kernel, specs[1]), experts)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)), args

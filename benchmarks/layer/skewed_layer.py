"""One layer, its gradients, and tokens with expert preferences, for measurements of whole systems."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Experts, MoEParams, MoEState, Stats, System, TopK, Topology, moe
from jax_moe_lb.core.types import State
from jax_moe_lb.routing.routers import Router

LOGIT_SCALE = 20.0
"""Scale of the logits stored in tokens, which keeps the experts' inputs near 1."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    num_ranks: int
    num_tokens: int
    width: int
    inner: int
    num_experts: int
    per_tok: int

    @property
    def router(self) -> TopK:
        return TopK(self.per_tok)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one SwiGLU expert in float32."""
        return 3 * self.width * self.inner * 4


def jitted_step(mesh: Mesh, system: System, router: Router) -> Wrapped:
    """Return `(state, x, kernel, experts) -> (gradients, statistics, state)`, forward and backward of one layer."""
    topology = Topology.from_mesh(mesh)
    by_rank, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(state: State, x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, Stats, State]:
        y, stats, after = moe(x, MoEParams(kernel, experts), router, system, topology, MoEState(state))
        return y, stats, after.balancer

    specs = (whole, by_rank, whole, by_rank)
    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=(by_rank, whole, whole))

    def loss(x: jax.Array, kernel: jax.Array, experts: Experts, state: State) -> tuple[jax.Array, tuple[Stats, State]]:
        y, *rest = run(state, x, kernel, experts)
        return jnp.square(y).mean(), tuple(rest)

    def step(state: State, *args: jax.Array) -> tuple[tuple, Stats, State]:
        gradients, rest = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*args, state)
        return gradients, *rest

    return jax.jit(step)


def logits_by_popularity(weights: np.ndarray, sizes: Sizes, seed: int) -> np.ndarray:
    """Return logits `[R * T, E]` whose top-k experts are sampled by weight without replacement, on every rank."""
    noise = np.random.default_rng(seed).gumbel(size=(sizes.num_ranks * sizes.num_tokens, sizes.num_experts))
    return np.log(weights)[None] + noise


def weights_of(mesh: Mesh, sizes: Sizes) -> tuple[jax.Array, Experts]:
    """Return a router kernel that reads logits from the first channels of a token, and small random experts."""
    rng = np.random.default_rng(0)
    kernel = np.zeros((sizes.width, sizes.num_experts), np.float32)
    kernel[: sizes.num_experts] = LOGIT_SCALE * np.eye(sizes.num_experts)
    inner = (sizes.num_experts, sizes.width, sizes.inner)
    up, gate, down = (0.05 * rng.standard_normal(inner, np.float32) for _ in range(3))
    place = lambda array: _placed(array, mesh, PartitionSpec("expert"))  # noqa: E731
    experts = Experts(place(up), place(down.reshape(sizes.num_experts, sizes.inner, sizes.width)), place(gate))
    return _placed(kernel, mesh, PartitionSpec()), experts


def tokens_of(mesh: Mesh, sizes: Sizes, logits: np.ndarray) -> jax.Array:
    """Return random tokens whose first `E` channels are the scaled logits `[R * T, E]`."""
    x = np.random.default_rng(1).standard_normal((len(logits), sizes.width), np.float32)
    x[:, : sizes.num_experts] = logits / LOGIT_SCALE
    return _placed(x, mesh, PartitionSpec("expert"))


def _placed(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Shard an array held by every process."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

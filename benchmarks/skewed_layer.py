"""One layer, its gradients, and tokens that prefer some experts: what whole systems are measured on."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Experts, Stats, System, TopK, Topology, moe
from jax_moe_lb.core.types import State
from jax_moe_lb.routing.routers import Router

LOGIT_SCALE = 20.0
"""Tokens hold their logits over this, so that the experts' inputs stay near 1."""

FLOP_PER_WEIGHT = 22
"""Of a SwiGLU expert, per row and `H x F`: three products forward, eight in the backward pass, which starts again from
the rows; two operations each."""


@dataclass(frozen=True)
class Sizes:
    """Of a layer.

    Args:
        num_ranks: `R`.
        num_tokens: `T`, per rank.
        width: `H`.
        inner: `F`.
        num_experts: `E`.
        per_tok: `K`.
    """

    num_ranks: int
    num_tokens: int
    width: int
    inner: int
    num_experts: int
    per_tok: int

    @property
    def router(self) -> TopK:
        """The experts of the highest logits."""
        return TopK(self.per_tok)

    @property
    def flops_per_rank(self) -> int:
        """Of the experts' products in one step, forward and backward, at the mean load."""
        return FLOP_PER_WEIGHT * self.width * self.inner * self.num_tokens * self.per_tok

    @property
    def expert_bytes(self) -> int:
        """Of one SwiGLU expert in float32."""
        return 3 * self.width * self.inner * 4


def jitted_step(mesh: Mesh, system: System, router: Router) -> Wrapped:
    """`(state, x, kernel, experts) -> (gradients, statistics, state)`, forward and backward of one layer."""
    topology = Topology.from_mesh(mesh)
    by_rank, whole = PartitionSpec("expert"), PartitionSpec()

    def one_rank(state: State, x: jax.Array, kernel: jax.Array, experts: Experts) -> tuple[jax.Array, Stats, State]:
        return moe(x, kernel, experts, router, system, topology, state=state)

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
    """`[R * T, E]`; their `K` highest are experts drawn by weight without replacement, on every rank alike."""
    noise = np.random.default_rng(seed).gumbel(size=(sizes.num_ranks * sizes.num_tokens, sizes.num_experts))
    return np.log(weights)[None] + noise


def weights_of(mesh: Mesh, sizes: Sizes) -> tuple[jax.Array, Experts]:
    """A router's kernel that reads logits off the first channels of a token, and small random experts."""
    rng = np.random.default_rng(0)
    kernel = np.zeros((sizes.width, sizes.num_experts), np.float32)
    kernel[: sizes.num_experts] = LOGIT_SCALE * np.eye(sizes.num_experts)
    inner = (sizes.num_experts, sizes.width, sizes.inner)
    up, gate, down = (0.05 * rng.standard_normal(inner, np.float32) for _ in range(3))
    place = lambda array: _placed(array, mesh, PartitionSpec("expert"))  # noqa: E731
    experts = Experts(place(up), place(down.reshape(sizes.num_experts, sizes.inner, sizes.width)), place(gate))
    return _placed(kernel, mesh, PartitionSpec()), experts


def tokens_of(mesh: Mesh, sizes: Sizes, logits: np.ndarray) -> jax.Array:
    """Random tokens whose first `E` channels are these logits, `[R * T, E]`, over their scale."""
    x = np.random.default_rng(1).standard_normal((len(logits), sizes.width), np.float32)
    x[:, : sizes.num_experts] = logits / LOGIT_SCALE
    return _placed(x, mesh, PartitionSpec("expert"))


def _placed(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Of an array that every process holds, each device's part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

"""Layers in the style of other projects, for comparison: one rank's part each, to be called inside `jax.shard_map`.

All take `(x, kernel, experts, per_tok)`: this rank's tokens `[T, H]`, the router's kernel `[H, E]` and its `L` home
experts, on a mesh axis `expert`. They route like `TopK`, and compute in the dtype of the tokens.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from benchmarks.layer.dispatches import sending_copies
from jax_moe_lb import Experts, MoEParams, System, TopK, Topology, moe

AXIS = "expert"
OfRank = Callable[[jax.Array, jax.Array, Experts, int], jax.Array]
Layer = Callable[[jax.Array, jax.Array, Experts], jax.Array]
"""`(x, kernel, experts) -> y` on global arrays."""


def over_ranks(mesh: Mesh, of_rank: OfRank, per_tok: int) -> Layer:
    """Return the layer on global arrays, with tokens and experts sharded over ranks."""
    by_rank, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        functools.partial(of_rank, per_tok=per_tok), mesh=mesh, in_specs=(by_rank, whole, by_rank), out_specs=by_rank
    )


def ours(system: System, mesh: Mesh) -> OfRank:
    topology = Topology.from_mesh(mesh)

    def of_rank(x: jax.Array, kernel: jax.Array, experts: Experts, per_tok: int) -> jax.Array:
        return moe(x, MoEParams(kernel, experts), TopK(per_tok), sending_copies(system), topology)[0]

    return of_rank


def routed(x: jax.Array, kernel: jax.Array, per_tok: int) -> tuple[jax.Array, jax.Array]:
    """Return experts and weights of each token, `[T, K]`: softmax of all logits, renormalised over the chosen ones."""
    logits = jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32), precision="highest")
    chosen, experts = jax.lax.top_k(logits, per_tok)
    return experts, jax.nn.softmax(chosen)


def gshard(x: jax.Array, kernel: jax.Array, experts: Experts, per_tok: int, factor: float = 1.25) -> jax.Array:
    """Apply GShard's layer (arXiv 2006.16668): one-hot products into a buffer of fixed capacity, dropping the rest."""
    num_experts = kernel.shape[1]
    chosen, weights = routed(x, kernel, per_tok)
    capacity = math.ceil(factor * x.shape[0] * per_tok / num_experts)
    # First choices precede second ones in the queue of an expert.
    is_chosen = jax.nn.one_hot(chosen.T, num_experts, dtype=jnp.int32)
    place = jnp.cumsum(is_chosen.reshape(-1, num_experts), 0).reshape(is_chosen.shape) - 1
    kept = jax.nn.one_hot(jnp.where(is_chosen > 0, place, -1), capacity, dtype=x.dtype)
    combine = jnp.einsum("ktec,tk->tec", kept, weights.astype(x.dtype))
    rows = jnp.einsum("tec,th->ech", kept.sum(0), x)
    rows = jax.lax.all_to_all(rows, AXIS, split_axis=0, concat_axis=1, tiled=True)
    outputs = jax.lax.all_to_all(_ffn(rows, experts), AXIS, split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("tec,ech->th", combine, outputs)


def dense_one_hot(x: jax.Array, kernel: jax.Array, experts: Experts, per_tok: int) -> jax.Array:
    """Apply every expert to every token: all ranks gather all tokens, and mostly zero weights select."""
    num_home = experts.up.shape[0]
    chosen, weights = routed(x, kernel, per_tok)
    by_expert = (jax.nn.one_hot(chosen, kernel.shape[1], dtype=x.dtype) * weights[..., None].astype(x.dtype)).sum(1)
    tokens, by_expert = (jax.lax.all_gather(array, AXIS, tiled=True) for array in (x, by_expert))
    mine = jax.lax.dynamic_slice_in_dim(by_expert, jax.lax.axis_index(AXIS) * num_home, num_home, 1)
    outputs = _ffn(jnp.broadcast_to(tokens, (num_home, *tokens.shape)), experts)
    return jax.lax.psum_scatter(jnp.einsum("eth,te->th", outputs, mine), AXIS, tiled=True)


def ragged_dot_ring(x: jax.Array, kernel: jax.Array, experts: Experts, per_tok: int) -> jax.Array:
    """Apply `lax.ragged_dot` to the copies of all tokens for this rank, in a worst-case buffer."""
    num_home = experts.up.shape[0]
    chosen, weights = (jax.lax.all_gather(a, AXIS, tiled=True) for a in routed(x, kernel, per_tok))
    tokens = jax.lax.all_gather(x, AXIS, tiled=True)
    local = chosen.reshape(-1) - jax.lax.axis_index(AXIS) * num_home
    local = jnp.where((local >= 0) & (local < num_home), local, num_home)
    # Top-k experts are distinct, so a token has at most `L` copies for this rank.
    room = tokens.shape[0] * min(per_tok, num_home)
    order = jnp.argsort(local, stable=True)[:room]
    sizes = jnp.bincount(local, length=num_home + 1)[:num_home].astype(jnp.int32)
    rows = tokens[order // per_tok]
    gate, up = (jax.lax.ragged_dot(rows, matrices, sizes) for matrices in (experts.gate, experts.up))
    outputs = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts.down, sizes)
    # XLA leaves rows beyond the groups, which belong to other ranks, unspecified.
    is_mine = jnp.arange(room) < sizes.sum()
    outputs = jnp.where(is_mine[:, None], outputs * weights.reshape(-1)[order, None].astype(x.dtype), 0)
    return jax.lax.psum_scatter(jnp.zeros_like(tokens).at[order // per_tok].add(outputs), AXIS, tiled=True)


def _ffn(rows: jax.Array, experts: Experts) -> jax.Array:
    """Apply each expert to its rows of `[L, N, H]`."""
    gate, up = (jnp.einsum("enh,ehf->enf", rows, matrices) for matrices in (experts.gate, experts.up))
    return jnp.einsum("enf,efh->enh", jax.nn.silu(gate) * up, experts.down)

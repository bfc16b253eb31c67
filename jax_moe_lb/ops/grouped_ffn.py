"""The experts' feed-forward network over rows sorted by slot.

It has three forms. A CPU with the custom call multiplies per group, over the rows that exist. A CPU without it walks
through the groups in blocks of rows, since `lax.ragged_dot` there multiplies every row with every expert. Everything
else uses `lax.ragged_dot`, or tokamax where it is installed.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._custom_calls import is_built
from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.grouped_matmul import grouped_matmul, grouped_outer
from jax_moe_lb.types import GroupSizes, Rows, iota, wide_dtype

BLOCK_ROWS = (128, 96, 64, 32, 16)
"""Rows of a block: a group is cut into blocks of the first size and one of the smallest size that holds the rest."""

Matmul = Callable[[Array, Array, Array], Array]
Carry = TypeVar("Carry")


@jax.custom_vjp
def grouped_ffn(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    """Sends each row through the expert of its group.

    `moe` calls it for the rows that a rank has received; call it yourself in a transport of your own.

    Args:
        rows: `[A, H]`, sorted by group. Rows beyond `group_sizes.sum()` may hold anything, even NaN.
        experts: the weights of the `S` groups, in the dtype of `rows`.
        group_sizes: `[S]` int32, the rows of each group. It may be 0, and then the expert's gradient is exactly 0.

    Returns:
        The outputs, `[A, H]`, which are 0 in rows beyond `group_sizes.sum()`. Only `rows` and `experts` are kept for
        the backward pass, which computes the hidden activations again.
    """
    return _forward(rows, experts, group_sizes)


def _forward(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    on_cpu = per_group if is_built("cpu") else blocked
    return jax.lax.platform_dependent(rows, experts, group_sizes, cpu=on_cpu, default=ragged)


def _save(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> tuple[Rows, tuple[Rows, Experts, GroupSizes]]:
    return _forward(rows, experts, group_sizes), (rows, experts, group_sizes)


def grouped_ffn_gradients(
    rows: Rows, experts: Experts, group_sizes: GroupSizes, upstream: Rows
) -> tuple[Rows, Experts]:
    """Computes the gradients of `grouped_ffn` for rows and experts.

    Use it in a backward pass that is written by hand, as that of the rounds is: it never rounds what is summed over
    rounds.

    Args:
        rows: `[A, H]`, as `grouped_ffn` was given them.
        experts: the weights of the `S` groups.
        group_sizes: `[S]` int32, the rows of each group.
        upstream: `[A, H]`, the gradients of the outputs, in the dtype of `rows`. Like `rows`, they may hold anything
            beyond `group_sizes.sum()`.

    Returns:
        The gradients of the rows, in their dtype, and those of the experts, in float32 at least.
    """
    on_cpu = per_group_gradients if is_built("cpu") else blocked_gradients
    return jax.lax.platform_dependent(rows, experts, group_sizes, upstream, cpu=on_cpu, default=ragged_gradients)


def _backward(saved: tuple[Rows, Experts, GroupSizes], upstream: Rows) -> tuple[Rows, Experts, None]:
    rows, experts, group_sizes = saved
    # Autodiff wants cotangents in the dtype of the weights; who sums over rounds calls the wide form itself.
    row_gradients, expert_gradients = grouped_ffn_gradients(rows, experts, group_sizes, upstream)
    return row_gradients, jax.tree.map(lambda g, w: g.astype(w.dtype), expert_gradients, experts), None


grouped_ffn.defvjp(_save, _backward)


def dense_ffn(
    rows: Float[Array, "*B H"], expert: Experts, matmul: Callable[[Array, Array], Array] = jnp.matmul
) -> Array:
    """Sends all rows through one expert: the reference that every other form is held against.

    Args:
        rows: `[..., H]`, none of which is left out.
        expert: the weights of one expert, without the leading dimension of experts.
        matmul: the product that is used, of rows and a matrix. Another one than `jnp.matmul` may read weights that do
            have a leading dimension, as `per_group` does.
    """
    return matmul(activate(*(matmul(rows, weights) for weights in inner_weights(expert))), expert.down)


def inner_weights(experts: Experts) -> tuple[Array, ...]:
    """Returns the weights that rows are multiplied with first: `up`, and `gate` where experts have one."""
    return (experts.up,) if experts.gate is None else (experts.up, experts.gate)


def activate(up: Array, gate: Array | None = None) -> Array:
    """Returns the hidden activations, given the products of rows with `inner_weights`: SwiGLU with a gate, else GELU.

    They are 0 where the products are, so rows that were left out of the products stay left out.
    """
    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up


# ---- grouped products, for a CPU with the custom call ------------------------


def per_group(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    """Computes `grouped_ffn` out of one product per group, all hidden activations at once, in `O(A F)` memory.

    It is the form for CPUs with the custom call. The products leave out rows of no group, and the activation keeps
    their zeros, so nothing else is masked.
    """
    return dense_ffn(rows, experts, lambda x, weights: grouped_matmul(x, weights, group_sizes))


def per_group_gradients(rows: Rows, experts: Experts, group_sizes: GroupSizes, upstream: Rows) -> tuple[Rows, Experts]:
    """Computes `grouped_ffn_gradients` out of one product per group, as `per_group`."""
    inner = inner_weights(experts)
    hidden, pull_back = jax.vjp(activate, *(grouped_matmul(rows, weights, group_sizes) for weights in inner))
    upstreams = pull_back(grouped_matmul(upstream, experts.down, group_sizes, transposed=True))
    back = [
        grouped_matmul(part, weights, group_sizes, transposed=True)
        for part, weights in zip(upstreams, inner, strict=True)
    ]
    inner_gradients = [grouped_outer(rows, part, group_sizes) for part in upstreams]
    down = grouped_outer(hidden, upstream, group_sizes)
    return sum(back[1:], start=back[0]), Experts(inner_gradients[0], down, *inner_gradients[1:])


# ---- blocks, for a CPU without it --------------------------------------------


def blocked(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    """Computes `grouped_ffn` in blocks of rows: at most one padded block per group, in `O(A)` rows of memory.

    It is the form for CPUs without the custom call.
    """

    def block(start: Array, x: Array, expert: Experts, out: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(out, dense_ffn(x, expert), start, 0)

    def group(g: Array, start: Array, end: Array, out: Array) -> Array:
        expert = jax.tree.map(lambda w: w[g], experts)
        return _walk(padded, start, end, functools.partial(block, expert=expert), out)

    # A last block reaches beyond its group and, in the last group, beyond the rows. Without the padding `dynamic_slice`
    # would clamp its start, and the block would hold other rows than those it stands for.
    padded = _pad(rows)
    return _each_group(group_sizes, group, jnp.zeros_like(padded))[: rows.shape[0]]


def blocked_gradients(rows: Rows, experts: Experts, group_sizes: GroupSizes, upstream: Rows) -> tuple[Rows, Experts]:
    """Computes `grouped_ffn_gradients` in blocks of rows, as `blocked`."""

    def group(g: Array, start: Array, end: Array, carry: tuple[Array, Experts]) -> tuple[Array, Experts]:
        expert = jax.tree.map(lambda w: w[g], experts)

        def block(start: Array, x: Array, out: tuple[Array, Experts]) -> tuple[Array, Experts]:
            row_gradients, sums = out
            x, dy = x[:, : rows.shape[1]], x[:, rows.shape[1] :]
            dx, gradients = jax.vjp(dense_ffn, x, expert)[1](dy)
            row_gradients = jax.lax.dynamic_update_slice_in_dim(row_gradients, dx, start, 0)
            # Summed over blocks in float32 at least: in bfloat16 a long group would lose its small addends.
            return row_gradients, jax.tree.map(lambda a, d: a + d.astype(a.dtype), sums, gradients)

        row_gradients, totals = carry
        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, wide_dtype(w)), expert)
        row_gradients, sums = _walk(padded, start, end, block, (row_gradients, zeros))
        return row_gradients, jax.tree.map(lambda t, s: t.at[g].set(s), totals, sums)

    # Side by side, so that one slice and one mask serve both.
    padded = _pad(jnp.concatenate([rows, upstream], axis=1))
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, wide_dtype(w)), experts)
    row_gradients, totals = _each_group(group_sizes, group, (_pad(jnp.zeros_like(rows)), zeros))
    return row_gradients[: rows.shape[0]], totals


def _each_group(group_sizes: GroupSizes, body: Callable, carry: Carry) -> Carry:
    """Runs `body(group, start, end, carry)` for each group in turn; empty ones cost nothing."""
    ends = group_sizes.cumsum(dtype=jnp.int32)

    def step(g: Array, carry: Carry) -> Carry:
        end, size = ends[g], group_sizes[g]
        # A slot that got no rows costs nothing: its weights are not even read.
        return jax.lax.cond(size > 0, lambda c: body(g, end - size, end, c), lambda c: c, carry)

    return jax.lax.fori_loop(0, group_sizes.shape[0], step, carry)


def _walk(padded: Array, start: Array, end: Array, block: Callable, carry: Carry) -> Carry:
    """Runs `block(row, rows, carry)` over rows `start` to `end`.

    The last block reaches beyond `end`: those rows come as zeros, and what is written
    there is written again by the group they belong to.
    """

    def step(size: int, at: Array, carry: Carry) -> Carry:
        x = jax.lax.dynamic_slice_in_dim(padded, at, size)
        inside = at + iota(size) < end
        # Rows beyond the group are those of the next one, or garbage: as zeros they add nothing to gradients of
        # weights.
        return block(at, jnp.where(inside[:, None], x, 0), out=carry)

    largest = BLOCK_ROWS[0]
    num_whole = (end - start) // largest
    rest = start + num_whole * largest
    carry = jax.lax.fori_loop(0, num_whole, lambda i, c: step(largest, start + i * largest, c), carry)
    for size, smaller in zip(BLOCK_ROWS, (*BLOCK_ROWS[1:], 0), strict=True):
        holds = (end - rest > smaller) & (end - rest <= size)
        # A loop of at most one step updates its carry in place. The body must depend on
        # the step, or the compiler takes its work out of the loop and always does it.
        carry = jax.lax.fori_loop(
            0, holds.astype(jnp.int32), lambda i, c, size=size: step(size, rest + i * size, c), carry
        )
    return carry


def _pad(rows: Array) -> Array:
    return jnp.pad(rows, ((0, BLOCK_ROWS[0]), (0, 0)))


# ---- ragged_dot, for accelerators -------------------------------------------


def has_tokamax() -> bool:
    """Says whether `ragged` multiplies with tokamax, that is, whether it is installed."""
    return importlib.util.find_spec("tokamax") is not None


def ragged_dot() -> Matmul:
    """Returns the product that `ragged` multiplies with: that of tokamax where it is installed, else JAX's own."""
    if has_tokamax():
        # The package is optional, so only who multiplies with it imports it.
        import tokamax

        return tokamax.ragged_dot
    return jax.lax.ragged_dot


def ragged(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    """Computes `grouped_ffn` out of ragged matrix products.

    It is the form for accelerators, and for CPUs far too slow: XLA:CPU multiplies every row with every expert.
    """
    valid = _valid_rows(rows, group_sizes)
    multiply = ragged_dot()
    # Rows that nobody wrote may hold NaN, and 0 times NaN is NaN. They are masked on the way in and out, and so, as the
    # transpose of a mask is a mask, in both directions of autodiff.
    out = dense_ffn(jnp.where(valid, rows, 0), experts, lambda x, w: multiply(x, w, group_sizes))
    return jnp.where(valid, out, 0)


def ragged_gradients(rows: Rows, experts: Experts, group_sizes: GroupSizes, upstream: Rows) -> tuple[Rows, Experts]:
    """Computes `grouped_ffn_gradients` out of ragged matrix products, as `ragged`."""
    gradients = jax.vjp(lambda rows, experts: ragged(rows, experts, group_sizes), rows, experts)[1](upstream)
    # `ragged_dot` promises nothing about the gradient of a group without rows, and ours is exactly 0.
    used = (group_sizes > 0)[:, None, None]
    expert_gradients = jax.tree.map(lambda d: jnp.where(used, d, 0).astype(wide_dtype(d)), gradients[1])
    return gradients[0], expert_gradients


def _valid_rows(rows: Rows, group_sizes: GroupSizes) -> Array:
    return (iota(rows.shape[0]) < group_sizes.sum(dtype=jnp.int32))[:, None]

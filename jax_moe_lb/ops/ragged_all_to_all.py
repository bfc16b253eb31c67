"""Exact-size exchange of rows between the ranks of a mesh axis.

`jax.lax.ragged_all_to_all` where the backend runs it. XLA:CPU does not: there the same
exchange is made of padded `all_to_all` steps, as many as the largest pair needs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.types import iota

Sizes = Int[Array, "U"]


def ragged_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: tuple[str, ...],
) -> Shaped[Array, "Q *X"]:
    """Sends slices of `operand` to the ranks of `axis_name`; returns `output` with what arrived written over it.

    The signature and meaning of `jax.lax.ragged_all_to_all`. Not differentiable: the
    transports that call it know their own transposes.

    Args:
        operand: rows to send.
        output: rows that nothing is written to keep this value.
        input_offsets: `[U]`, `U` a multiple of `R`: where in `operand` a slice starts. Slices
            `i * U / R` to `(i + 1) * U / R` go to rank `i`.
        send_sizes: `[U]`, rows of each slice.
        output_offsets: `[U]`, where in the *receiver's* `output` each slice lands.
        recv_sizes: `[U]`, rows that arrive, in the order of the senders.
        axis_name: mesh axes, outermost first.
    """
    args = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)

    def native(*args: Array) -> Array:
        return jax.lax.ragged_all_to_all(*args, axis_name=axis_name)

    def padded(*args: Array) -> Array:
        return padded_all_to_all(*args, axis_name=axis_name)

    return jax.lax.platform_dependent(*args, cpu=padded, default=native)


def padded_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: tuple[str, ...],
) -> Shaped[Array, "Q *X"]:
    """`ragged_all_to_all` out of `all_to_all` alone, in `O(P + Q)` rows of memory."""
    num_ranks = jax.lax.axis_size(axis_name)
    landings = _transpose(output_offsets, axis_name)
    # One slice per pair of ranks at a time.
    for update in range(input_offsets.shape[0] // num_ranks):
        pick = slice(update, None, input_offsets.shape[0] // num_ranks)
        output = _exchange_one(
            operand, output, input_offsets[pick], send_sizes[pick], landings[pick], recv_sizes[pick], axis_name
        )
    return output


def _exchange_one(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    starts: Sizes,
    sizes: Sizes,
    landings: Sizes,
    arriving: Sizes,
    axis_name: tuple[str, ...],
) -> Shaped[Array, "Q *X"]:
    """One slice from every rank to every rank, `chunk` rows of each at a time."""
    num_rows, num_ranks = operand.shape[0], sizes.shape[0]
    if num_rows == 0 or output.shape[0] == 0:
        return output
    chunk = -(-num_rows // num_ranks)
    lane = iota(chunk)[None]
    output = _copy_own(operand, output, starts, sizes, landings, axis_name)
    me = jax.lax.axis_index(axis_name)
    others = jnp.where(iota(num_ranks) == me, 0, sizes)
    num_steps = jax.lax.pmax((others.max() + chunk - 1) // chunk, axis_name)
    from_me = (iota(num_ranks) == me)[:, None]

    def step(i: Array, output: Array) -> Array:
        offset = i * chunk + lane
        rows = operand.at[starts[:, None] + offset].get(mode="clip")
        rows = jax.lax.all_to_all(rows, axis_name, 0, 0)
        arrives = (offset < arriving[:, None]) & ~from_me
        into = jnp.where(arrives, landings[:, None] + offset, output.shape[0])
        return output.at[into].set(rows, mode="drop")

    return jax.lax.fori_loop(0, num_steps, step, output)


def _copy_own(
    operand: Array, output: Array, starts: Sizes, sizes: Sizes, landings: Sizes, axis_name: tuple[str, ...]
) -> Array:
    """What a rank keeps never travels, however much it is."""
    me = jax.lax.axis_index(axis_name)
    place = iota(output.shape[0]) - landings[me]
    kept = (place >= 0) & (place < sizes[me])
    rows = operand.at[starts[me] + place].get(mode="clip")
    return jnp.where(kept.reshape(-1, *[1] * (output.ndim - 1)), rows, output)


def _transpose(per_peer: Sizes, axis_name: tuple[str, ...]) -> Sizes:
    """`[U]` by destination becomes `[U]` by source."""
    return jax.lax.all_to_all(per_peer, axis_name, 0, 0, tiled=True)

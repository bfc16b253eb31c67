"""Exact-size exchange of rows between the ranks of a mesh axis.

It is `jax.lax.ragged_all_to_all` where the backend runs it. XLA:CPU does not: between the devices of one process a
custom call copies exactly the rows that exist; between processes, or where the custom call was not built, XLA's other
collectives do it (`ragged_by_steps.py`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jax_moe_lb._custom_calls import call, is_built, like
from jax_moe_lb._varying import vary_like
from jax_moe_lb.ops.one_way import other_manual_axes
from jax_moe_lb.ops.ragged_by_steps import one_way_all_to_all, padded_all_to_all

Sizes = Int[Array, "U"]
"""One number for each of the `U` slices that a rank sends, or that it receives."""

LANES = 128
"""A TPU's vector has so many words."""


def ragged_all_to_all(
    operand: Shaped[Array, "P *X"],
    output: Shaped[Array, "Q *X"],
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    *,
    axis_name: tuple[str, ...],
    disjoint: bool = False,
    site: str | None = None,
    timeout_s: float = 120.0,
) -> Shaped[Array, "Q *X"]:
    """Sends slices of `operand` to the ranks of `axis_name`; returns `output` with what arrived written over it.

    Use it wherever ranks send each other different numbers of rows. It has the signature and meaning of
    `jax.lax.ragged_all_to_all`. It is not differentiable: the transports that call it know their own transposes.
    Between processes on CPUs groups side by side must call it equally often: see `one_way.agreed`.

    Args:
        operand: `[P, ...]`, the rows to send.
        output: `[Q, ...]`, whose rows keep their value where nothing is written. It varies over the mesh axes that the
            result varies over.
        input_offsets: `[U]` int32, `U` a multiple of `R`: where in `operand` a slice starts. Slices `i * U / R` to
            `(i + 1) * U / R` go to rank `i`.
        send_sizes: `[U]` int32, the rows of each slice.
        output_offsets: `[U]` int32, where in the *receiver's* `output` each slice lands.
        recv_sizes: `[U]` int32, the rows that arrive, in the order of the senders.
        axis_name: the mesh axes of the ranks, outermost first.
        disjoint: whether no row of `operand` is in two slices. Where the exchange is made of XLA's other collectives,
            all slices for a rank then travel as one.
        site: the name of this exchange in messages; its axes by default.
        timeout_s: how long the custom call waits for ranks that do not come, in seconds, before all ranks that did come
            stop with an error that names those that did not. 120, the default, is far more than an exchange takes.

    Raises:
        ValueError: `U` is not a multiple of `R`. Where the custom call runs, offsets and sizes that are out of range,
            or that sender and receiver disagree on, stop the program on all ranks.
    """
    num_ranks = jax.lax.axis_size(axis_name)
    if send_sizes.shape[0] % num_ranks:
        raise ValueError(f"send_sizes has {send_sizes.shape[0]} entries; expected a multiple of the {num_ranks} ranks")
    args = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)

    # Of its own it cannot be mapped where only some operands are.
    @jax.custom_batching.sequential_vmap
    def on_accelerators(*args: Array) -> Array:
        return jax.lax.ragged_all_to_all(*args, axis_name=axis_name)

    def in_process(*args: Array) -> Array:
        return _in_process(*args, axis_name=axis_name, site=site or "axis " + ", ".join(axis_name), timeout_s=timeout_s)

    def by_steps(*args: Array) -> Array:
        return exchange_by_steps(*args, axis_name=axis_name, disjoint=disjoint)

    on_cpu = in_process if moves_in_process() else by_steps
    return jax.lax.platform_dependent(*args, cpu=on_cpu, default=on_accelerators)


def unwritten(rows: Array, num_rows: int) -> Array:
    """Makes rows for an exchange to write, which hold anything until then; on CPUs zeros.

    Args:
        rows: `[P, ...]`, rows of the same shape and dtype, which vary over the same mesh axes.
        num_rows: how many.
    """
    return vary_like(jax.lax.empty((num_rows, *rows.shape[1:]), rows.dtype), rows)


def unwritten_later(rows: Array, num_rows: int) -> Array:
    """Makes what `unwritten` makes, for an exchange that comes much later.

    The compiler for TPUs makes what nobody has to write long before it is needed, and so keeps it longer: there it is
    cleared.

    Args:
        rows: `[P, ...]`, as of `unwritten`.
        num_rows: how many.
    """

    def cleared(rows: Array) -> Array:
        return jnp.zeros_like(rows, shape=(num_rows, *rows.shape[1:]))

    return jax.lax.platform_dependent(rows, tpu=cleared, default=lambda rows: unwritten(rows, num_rows))


def as_words(rows: Shaped[Array, "A W"]) -> Shaped[Array, "A *X"]:
    """Returns rows in the shape in which a TPU exchanges them: `[A, P, W / P]`, `P` of them in each word of 4 bytes.

    There the words of a row lie side by side, where products have those of eight rows. Gather rows of an exchange in
    this shape, and hand them from one round of a loop to the next in it: then they are not turned around for that.
    Elsewhere it costs nothing.

    Args:
        rows: `[A, W]`. Their shape stays as it is where a row is no whole number of a TPU's vectors.
    """
    num_rows, width = rows.shape
    if rows.dtype.itemsize > 4 or width * rows.dtype.itemsize % (4 * LANES):
        return rows
    per_word = 4 // rows.dtype.itemsize
    return rows.reshape(num_rows, per_word, width // per_word)


def as_rows(words: Shaped[Array, "A *X"]) -> Shaped[Array, "A W"]:
    """Returns what `as_words` was given."""
    return words.reshape(words.shape[0], math.prod(words.shape[1:]))


def moves_in_process() -> bool:
    """Says whether an exchange on CPUs copies each row once: all devices belong to this process, and the call was
    built.
    """
    return is_built("cpu") and jax.process_count() == 1


def exchange_by_steps(*args: Array, axis_name: tuple[str, ...], disjoint: bool = False) -> Array:
    """Computes `ragged_all_to_all` out of XLA's other collectives, in the form for one process or for several."""
    by_steps = one_way_all_to_all if jax.process_count() > 1 else padded_all_to_all
    return by_steps(*args, axis_name=axis_name, disjoint=disjoint)


def _in_process(
    operand: Array, output: Array, *where: Array, axis_name: tuple[str, ...], site: str, timeout_s: float
) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    others = other_manual_axes(axis_name)
    rank, group = jax.lax.axis_index(axis_name), jax.lax.axis_index(others) if others else jnp.int32(0)
    # Over axes that are not manual here every device makes the same call with the same data.
    num_lanes = math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    return call(
        "ragged_exchange",
        like(output),
        operand,
        output,
        *where,
        # Ranks of one group meet each other, and nobody else.
        jnp.stack([rank, group]),
        # The result is written over `output`, whose other rows so keep their value without a copy.
        aliases={1: 0},
        num_ranks=jax.lax.axis_size(axis_name),
        num_lanes=num_lanes,
        site=f"ragged_exchange at {site}",
        timeout_s=np.float64(timeout_s),
    )

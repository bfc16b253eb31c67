"""Rule that chooses `Direct`, `Once` or `Forward` for a layer, and the chunks on TPUs."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax

from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Buffers
from jax_moe_lb.transport.forward import Forward
from jax_moe_lb.transport.lists import rows_with_padding
from jax_moe_lb.transport.once import Once
from jax_moe_lb.transport.wave_rows import share_in_member

LEAST_SAVED = 0.25
"""Share of rows that `Once` must save under uniform routing to be chosen between nodes."""

LEAST_SAVED_INSIDE = 0.4
"""The same share inside one node. With 8 H100 and 8 experts per token it saves a third of the rows. The step estimated
from the compiled program is then shorter with `Direct`, whose exchanges run beside more of the products.
"""

TPUS_OF_ONCE = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
"""Kinds of TPUs on which `Once` is faster than `Direct`: copies of rows take less time there than the links save."""

TPUS_OF_CHUNKS = (*TPUS_OF_ONCE, "TPU v5", "TPU v5p")
"""Kinds of TPUs on which two chunks shorten a step, estimated from the compiled program."""

LEAST_CHUNK = 4096
"""Copies of a chunk, on average, from which two chunks are chosen: smaller exchanges take mostly latency."""


@dataclass(frozen=True)
@checked_fields
class AutoDispatch(Direct):
    """Dispatch chosen by `dispatch_by_rule`, with these options; the default of named systems.

    `moe` chooses when a program is traced. The simulator counts it as `Direct`: call `System.by_rule` first.

    Examples:
        >>> from jax_moe_lb import Buffers, exact
        >>> exact(2).dispatch == AutoDispatch(Buffers())
        True
    """


class DispatchChoice(NamedTuple):
    """Dispatch of a layer, and why.

    Args:
        dispatch: chosen dispatch, with the options of the given one.
        reason: condition of the rule, as text.

    Examples:
        >>> dispatch, reason = dispatch_by_rule(Topology.flat(4), 64, 2)
        >>> type(dispatch).__name__, reason
        ('Direct', 'Direct: Once would send 1.8 of 2 rows per token')
    """

    dispatch: Dispatch
    reason: str


def dispatch_by_rule(
    topology: Topology,
    num_experts: int,
    per_token: int | None,
    given: Dispatch = AutoDispatch(),
    tokens: jax.ShapeDtypeStruct | None = None,
) -> DispatchChoice:
    """Choose the dispatch of a layer.

    The first rule that holds decides:

    1. Another dispatch than `AutoDispatch`: the given dispatch.
    2. Chunks: `Direct`.
    3. Several nodes of several ranks, and domains inside nodes: `Forward`. On TPUs nodes are slices.
    4. A TPU v5e, v5p or v6e: the given dispatch if `tokens` are unknown. The choice of the next rules has two chunks
       if a chunk has 4,096 copies or more.
    5. A TPU v5e or v6e: the next rules, and `Direct` if no kernel copies rows of these tokens. Another TPU: `Direct`.
    6. Under uniform routing a token visits so few ranks that `Once` sends 25 % less rows or more, inside one node of
       GPUs 40 %: `Once`.
    7. `Direct`.

    `moe` applies it to the systems of `jax_moe_lb.systems`, named or called. Pass `dispatch=` to decide otherwise.

    Args:
        topology: ranks, nodes and domains of the layer. The innermost level is a node.
        num_experts: `E`.
        per_token: `K`; `None` if unknown, which rules out `Once`.
        given: dispatch of the system; `AutoDispatch()` by default.
        tokens: `[T, H]`, shape and dtype of the tokens of a rank. They decide on TPUs only. The kernels copy rows in
            bfloat16 of a width that is a multiple of 2,048. `None` (default) if unknown.

    Examples:
        >>> from jax_moe_lb.core import Level
        >>> nodes = Topology((Level("node", 4), Level("gpu", 8)), ranks_per_domain=8)
        >>> dispatch_by_rule(nodes, 256, 8).reason
        'Forward: 4 nodes of 8 ranks, and domains inside them'
        >>> [dispatch_by_rule(Topology.flat(ranks), 256, 8).reason for ranks in (4, 8)]
        ['Once: 3.6 of 8 rows per token, uniformly routed', 'Direct: Once would send 5.3 of 8 rows per token']
    """
    if type(given) is not AutoDispatch:
        return DispatchChoice(given, f"{type(given).__name__}: requested")
    options = given.buffers, given.transfer, given.saved
    direct = Direct(*options)
    if given.buffers.chunks > 1:
        return DispatchChoice(direct, "Direct: chunks")
    is_tpu = topology.platform == "tpu"
    members, ranks = topology.levels[-1].size, topology.num_ranks
    nodes = ranks // members
    # Between slices all rows of an exchange travel through hosts, so one exchange stays inside them.
    is_apart = not is_tpu or (topology.crosses_slices and topology.slice_axes == topology.expert_axes[:-1])
    if nodes > 1 and members > 1 and topology.ranks_per_domain <= members and is_apart:
        name = "slices" if is_tpu else "nodes"
        return DispatchChoice(Forward(*options), f"Forward: {nodes} {name} of {members} ranks, and domains inside them")
    if is_tpu and tokens is None and topology.device_kind in TPUS_OF_CHUNKS:
        return DispatchChoice(given, "AutoDispatch: the tokens of a rank decide on this TPU")
    buffers = _in_chunks(given.buffers, topology, tokens, per_token)
    options = buffers, given.transfer, given.saved
    direct = Direct(*options)
    if is_tpu and topology.device_kind not in TPUS_OF_ONCE:
        return DispatchChoice(direct, "Direct: a TPU other than v5e and v6e")
    if per_token is None or ranks == 1:
        return DispatchChoice(direct, "Direct: one rank, or an unknown number of experts per token")
    # A function may return more choices than there are experts, some without an expert.
    rows = ranks * share_in_member(num_experts, min(per_token, num_experts), ranks)
    of_all = f"{rows:.1f} of {per_token} rows per token"
    if is_tpu and (reason := _without_kernel(tokens, per_token, ranks, buffers)):
        return DispatchChoice(direct, f"Direct: no kernel copies rows, {reason}")
    least = LEAST_SAVED_INSIDE if nodes == 1 and not is_tpu else LEAST_SAVED
    if rows < (1 - least) * per_token:
        return DispatchChoice(Once(*options), f"Once: {of_all}, uniformly routed")
    return DispatchChoice(direct, f"Direct: Once would send {of_all}")


def _in_chunks(
    buffers: Buffers, topology: Topology, tokens: jax.ShapeDtypeStruct | None, per_token: int | None
) -> Buffers:
    """Return buffers of two chunks, for TPUs on which these shorten a step, if each has enough copies."""
    num_copies = 0 if tokens is None else tokens.shape[0] * (per_token or 0)
    gains = topology.platform == "tpu" and topology.device_kind in TPUS_OF_CHUNKS and topology.num_ranks > 1
    return replace(buffers, chunks=2) if gains and num_copies >= 2 * LEAST_CHUNK else buffers


def _without_kernel(
    tokens: jax.ShapeDtypeStruct | None, per_token: int, num_ranks: int, buffers: Buffers
) -> str | None:
    """Return the reason why no kernel for TPUs copies the rows of `Once`, or `None`."""
    # Only for TPUs, since it imports Mosaic.
    from jax_moe_lb.kernels.tpu_rows import why_not

    assert tokens is not None
    num_copies = tokens.shape[0] * per_token
    num_rows = rows_with_padding(buffers.rows(num_copies), per_token, num_ranks)
    of_chunk = rows_with_padding(buffers.chunk_rows(num_copies), per_token, num_ranks)
    # Rows of all chunks, as they return; the row and the weight of each copy of a chunk.
    return why_not(tokens.dtype, tokens.shape[1], max(num_rows, 2 * of_chunk))

"""EPLB's greedy rule, on fixed homes: experts of the highest load per copy get replicas on the lightest ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.checks import check_domain, home_experts_per_rank
from jax_moe_lb.planners.native import alike, run_planner
from jax_moe_lb.types import AnyArray, Placement, Quota, host_iota, iota, namespace

TokensOfExperts = Int[AnyArray, "E"]


def eplb_plus(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Fills the empty slots with replicas, and splits every expert's tokens evenly over its copies.

    `EPLBPlus` calls it; its rule stands in `ffi/planning/eplb_plus.h` too.

    What the placement holds stays where it is. The share of an expert is its tokens over its
    copies (the ranks that hold it), rounded up. In every domain on its own:

    1. Replicate: as long as there are empty slots left, the expert of the highest share, of those
       at home in this domain, gets one copy more. Left out are experts whose share is at most
       1 and those with as many copies as there are ranks that hold it or could.
    2. Pack (longest processing time first): the new copies, highest share first, go to the rank with
       the lowest load of those that have an empty slot and do not hold the expert. The load of a
       rank is the sum of the shares of what it holds. A copy that fits on no rank is not made.
    3. Split: see `round_robin`.

    Ties go to the lower expert and rank.

    Args:
        tokens: `[E]` integers, the token copies of each expert, at least 0; their sum must stay below `2**31`.
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; several slots of an expert on a rank
            count as one.
        domain: how many ranks a domain has; it divides `R`.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. An expert with tokens and
        no slot stops the program on a CPU with the custom call, like every bad value; on a GPU with it all entries are
        then -1, and elsewhere that expert's row of the quota is 0.

    Raises:
        ValueError: shapes that do not fit, or a domain that does not divide the ranks.
    """
    _check(tokens.shape[0], placement.shape, domain)
    shapes = placement.shape, (tokens.shape[0], placement.shape[0])
    placement, quota = run_planner("eplb_plus", shapes, tokens, placement, reference=eplb_plus_reference, domain=domain)
    return placement, quota


def eplb_plus_reference(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Computes `eplb_plus` as two loops over copies, all domains side by side; it runs where no custom call does."""
    tokens, placement = alike(tokens, placement)
    held = holds(placement, tokens.shape[0]).T
    num_ranks, num_domains = placement.shape[0], placement.shape[0] // domain
    b = iota(num_domains)
    # Only the diagonal blocks, a domain's own experts on its own ranks, since no copy is packed into another domain.
    # Those that are there already still count as copies and in loads.
    inside = held.reshape(num_domains, -1, num_domains, domain)[b, :, b]
    blocks = placement.reshape(num_domains, domain, -1)
    copies = held.sum(1, dtype=jnp.int32).reshape(num_domains, -1)
    planned = _replicate(tokens.reshape(num_domains, -1), copies, inside, (blocks < 0).sum(2, dtype=jnp.int32))
    share = _share(tokens.reshape(num_domains, -1), planned)
    load = jnp.where(held, share.reshape(-1, 1), 0).sum(0, dtype=jnp.int32).reshape(num_domains, domain)
    start = _Packing(planned - copies, blocks, inside, load)
    packed = jax.lax.while_loop(lambda p: (p.pending > 0).any(), lambda p: _place(p, share), start)
    placement = packed.placement.reshape(num_ranks, -1)
    return placement, round_robin(tokens, placement)


def round_robin(tokens: TokensOfExperts, placement: Placement) -> Quota:
    """Splits evenly: each of an expert's `n` copies serves `tokens // n`, the first `tokens % n` by rank one more.

    Use it where a placement is given and says nothing about shares, as EPLB's does.

    Args:
        tokens: `[E]` integers, the token copies of each expert.
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; several slots of an expert on a rank
            count as one copy.

    Returns:
        The quota, `[E, R]` int32; the row of an expert without a slot is 0.
    """
    xp = namespace(tokens)
    held = holds(placement, tokens.shape[0]).T.astype(np.int32)
    # At least 1, so that an expert without a slot divides by something; its row is 0 by `held`.
    copies = xp.maximum(held.sum(1, dtype=np.int32), 1)
    before = held.cumsum(1, dtype=np.int32) - held
    extra = before < (tokens % copies)[:, None]
    return held * ((tokens // copies)[:, None] + extra.astype(np.int32))


def holds(placement: Placement, num_experts: int) -> Bool[AnyArray, "R E"]:
    """Says whether a rank has a slot for an expert, `[R, E]`.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one.
        num_experts: `E`.
    """
    return (placement[:, :, None] == host_iota(num_experts)[None, None]).any(1)


def _check(num_experts: int, placement: tuple[int, ...], domain: int) -> None:
    num_ranks, slots = placement
    if num_ranks < 1 or slots < 1:
        raise ValueError(f"placement has shape {placement}; expected [R, S], both at least 1")
    home_experts_per_rank(num_experts, num_ranks, "tokens")
    check_domain(domain, num_ranks)


def _share(tokens: Int[Array, "B P"], copies: Int[Array, "B P"]) -> Int[Array, "B P"]:
    # At least 1, so that an expert without a slot divides by something.
    copies = jnp.maximum(copies, 1)
    return tokens // copies + (tokens % copies > 0).astype(jnp.int32)


def _replicate(
    tokens: Int[Array, "B P"], copies: Int[Array, "B P"], inside: Bool[Array, "B P M"], empty: Int[Array, "B M"]
) -> Int[Array, "B P"]:
    """Decides how many copies each of a domain's experts shall have."""
    b = iota(tokens.shape[0])
    # More copies than ranks that hold the expert or could would find no slot when they are packed.
    limit = copies + ((empty > 0)[:, None] & ~inside).sum(2, dtype=jnp.int32)

    def gains(planned: Array, left: Array) -> Array:
        return (planned < limit) & (_share(tokens, planned) > 1) & (left > 0)[:, None]

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        planned, left = carry
        able = gains(planned, left)
        # Where no expert gains, all lines are 0 and expert 0 is chosen, which then gets `more = 0`: domains that are
        # done wait for the others without a change.
        expert = _argmax(jnp.where(able, _share(tokens, planned), 0))
        more = able[b, expert].astype(jnp.int32)
        return planned.at[b, expert].add(more), left - more

    start = (copies, empty.sum(1, dtype=jnp.int32))
    return jax.lax.while_loop(lambda carry: gains(*carry).any(), step, start)[0]


@pytree
class _Packing:
    """Carries the second loop, over all `B = R / M` domains with `P` experts each.

    Args:
        pending: how many copies of each expert have no slot yet.
        placement: the expert in each slot, numbered over all domains; -1 for an empty one.
        inside: whether a rank of the domain holds an expert of it.
        load: the sum of the shares of what a rank holds, in token copies.
    """

    pending: Int[Array, "B P"]
    placement: Int[Array, "B M S"]
    inside: Bool[Array, "B P M"]
    load: Int[Array, "B M"]


def _place(p: _Packing, share: Int[Array, "B P"]) -> _Packing:
    """Packs one copy in every domain that has any left."""
    b = iota(share.shape[0])
    # -1 is below every share, so that an expert without copies to place is chosen only where no other has any.
    local = _argmax(jnp.where(p.pending > 0, share, -1))
    fits = (p.placement < 0).any(2) & ~p.inside[b, local] & (p.pending[b, local] > 0)[:, None]
    # No load reaches the largest integer, since the tokens of the expert to be placed are not yet part of it.
    rank = jax.lax.argmin(jnp.where(fits, p.load, jnp.iinfo(jnp.int32).max), 1, jnp.int32)
    placed = fits[b, rank]
    slot = _argmax((p.placement[b, rank] < 0).astype(jnp.int32))
    expert = local + b * share.shape[1]
    held = p.placement[b, rank, slot]
    return _Packing(
        # An expert that fits nowhere now never will, as slots only fill up; at 0 the loop goes on to the next one.
        pending=p.pending.at[b, local].set(jnp.where(placed, p.pending[b, local] - 1, 0)),
        placement=p.placement.at[b, rank, slot].set(jnp.where(placed, expert, held)),
        inside=p.inside.at[b, local, rank].max(placed),
        load=p.load.at[b, rank].add(jnp.where(placed, share[b, local], 0)),
    )


def _argmax(values: Int[Array, "B N"]) -> Int[Array, "B"]:
    """Returns the lowest index of each line's maximum: ties go to the lower expert and rank, as in C++."""
    return jax.lax.argmax(values, 1, jnp.int32)

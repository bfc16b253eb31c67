"""The rules of a plan are checked on the host and inside a jitted program, so that a bad plan never reaches a copy.

Both checks read the same list of rules. The jitted one costs a few integer reductions;
only when a rule is broken does it call the host, which names what is wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.manual_axes import vary_like, varying_axes
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import Split, rows_of_all
from jax_moe_lb.core.topology import check_domain, check_total, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, host_iota, iota, saturated


def check_counts(counts: AnyArray) -> None:
    """Refuses counts that no plan can be made from; call it on counts from files.

    Args:
        counts: `[R, E]`, concrete.

    Raises:
        ValueError: they are not two-dimensional, not integers, negative, or their sum is beyond int32; the message
            names the entry.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E]")
    if not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"counts has dtype {counts.dtype}; expected integers")
    if (counts < 0).any():
        rank, expert = np.argwhere(counts < 0)[0]
        raise ValueError(
            f"counts of rank {rank}, expert {expert} is {counts[rank, expert]}; expected a number of tokens, at least 0"
        )
    check_total(counts)


def check_plan(plan: Plan, counts: AnyArray, dynamic: AnyArray | None = None) -> None:
    """Refuses a plan that loses tokens, serves from an empty slot, breaks a domain or takes static experts from home.

    Call it on plans of a balancer of your own, or on plans from a file; `moe` checks every plan by itself.

    Args:
        plan: the plan of one layer, of concrete arrays, not traced ones.
        counts: `[R, E]` integers, the counts that it was made for.
        dynamic: `[E]` booleans, false for static experts, which only their homes may serve; `None`: all are dynamic.

    Raises:
        ValueError: the plan breaks a rule; the message names the field, the expert, the rank and the numbers.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Plan, Topology
        >>> from jax_moe_lb.core import check_plan, plain_plan
        >>> counts = np.array([[3, 1], [2, 0]], np.int32)
        >>> plan = plain_plan(counts, Topology.flat(2))
        >>> check_plan(plan, counts)
        >>> check_plan(plan, counts + 1)
        Traceback (most recent call last):
        ...
        ValueError: plan.quota of expert 0 sums to 5 tokens; expected the 7 of counts
    """
    counts = np.asarray(counts)
    check_counts(counts)
    _check_shapes(plan, counts.shape)
    plan = jax.tree.map(np.asarray, plan)
    for broken, describe in _rules(plan, counts, dynamic, np):
        if broken.any():
            raise ValueError(describe(*np.argwhere(broken)[0]))
    if plan.rails is not None:
        _check_rails(plan, plan.rails, counts)


def ensure_legal(plan: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None = None) -> Plan:
    """Returns the same plan, or raises at run time with the message of `check_plan`, whose arguments these are.

    It works inside `jax.jit` and `jax.shard_map`, with `plan` and `counts` equal on all ranks, so that either all of
    them stop or none does.
    """
    plan, legal = is_legal(plan, counts, dynamic)
    stop = ensure(legal, check_plan, plan, counts, dynamic)
    return jax.tree.map(lambda leaf: leaf + stop, plan)


def is_legal(plan: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None = None) -> tuple[Plan, Bool[Array, ""]]:
    """Says inside a program whether `check_plan` would pass, whose arguments these are; it does not look at rails.

    Returns:
        The plan in int32, and whether it is legal.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    _check_shapes(plan, counts.shape)
    plan = jax.tree.map(lambda leaf: jnp.asarray(saturated(leaf), jnp.int32), plan)
    return plan, jnp.stack([~broken.any() for broken, _ in _rules(plan, counts, dynamic, jnp)]).all()


def fallback_to_plain(
    plan: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None = None
) -> tuple[Plan, Bool[Array, ""]]:
    """Returns the plan if it is legal, else one that serves everything at home, and whether it is.

    Use it where a program shall not stop; the host must be told. The arguments are those of `check_plan`.
    """
    plan, legal = is_legal(plan, counts, dynamic)
    at_home = _at_home(plan, counts)
    return jax.tree.map(lambda made, safe: jnp.where(legal, made, safe), plan, at_home), legal


def _at_home(plan: Plan, counts: Counts) -> Plan:
    """The plan of plain expert parallelism, with the fields and shapes of another one."""
    ranks, home = iota(plan.num_ranks), plan.num_home
    experts = iota(plan.num_experts)
    placement = jnp.full_like(plan.placement, -1).at[:, :home].set(experts.reshape(-1, home))
    served = counts.sum(0, dtype=jnp.int32)[:, None]
    quota = jnp.where(experts[:, None] // home == ranks[None], served, 0)
    # Weights come from home, and rails that no rank's rows add up to are given up for the receiver's own.
    relay = None if plan.relay is None else jnp.where(placement >= 0, ranks[:, None], -1)
    rails = None if plan.rails is None else jnp.zeros_like(plan.rails)
    return replace(plan, placement=placement, quota=quota, relay=relay, rails=rails)


def check_routed(wrong: AnyArray, num_experts: Any) -> None:
    """Refuses what a router got wrong.

    Args:
        wrong: `[R, 4]`, for each rank the number of expert ids out of range, the lowest and the highest of them (0
            where there are none), and whether some routing weight is not finite.
        num_experts: `E`.

    Raises:
        ValueError: an id is out of range or a weight not finite; the message names the rank.
    """
    for rank, (num_bad, lowest, highest, bad_weights) in enumerate(np.asarray(wrong).tolist()):
        if num_bad:
            bad = lowest if lowest < -1 else highest
            raise ValueError(
                f"expert ids of rank {rank} include {bad} ({num_bad} bad ones); "
                f"expected 0 to {int(num_experts) - 1}, or -1 for no expert"
            )
        if bad_weights:
            raise ValueError(f"router logits of rank {rank} give weights that are not finite; expected finite logits")


def check_homes(homes: Any) -> None:
    """Refuses places of a layer's experts, `[E]`, that are no permutation."""
    homes = np.asarray(homes)
    checked_permutation("homes", homes[None], (1, homes.shape[0]))


def checked_permutation(name: str, permutation: Any, shape: tuple[int, int]) -> Int[np.ndarray, "layers E"]:
    """Checks the permutation of each layer and makes it int32.

    Args:
        name: what messages call it.
        permutation: integers, `[layers, E]`.
        shape: `(layers, E)`.

    Raises:
        ValueError: it has another shape or no integers, or a number is missing or there twice.
    """
    permutation = np.asarray(permutation)
    if permutation.shape != shape or not np.issubdtype(permutation.dtype, np.integer):
        raise ValueError(f"{name} is {permutation.dtype}{list(permutation.shape)}; expected integers {list(shape)}")
    wrong = (np.sort(permutation, 1) != host_iota(shape[1])[None]).any(1)
    if wrong.any():
        layer = int(np.argmax(wrong))
        values, counts = np.unique(permutation[layer], return_counts=True)
        odd = values[(counts > 1) | (values < 0) | (values >= shape[1])][0]
        raise ValueError(
            f"{name} of layer {layer} has {odd} {counts[values == odd][0]} times; "
            f"expected a permutation of 0 to {shape[1] - 1}"
        )
    return permutation.astype(np.int32)


def ensure(
    ok: Bool[jax.Array, ""], check: Callable[..., None], *args: Any, ranks: tuple[str, ...] = ()
) -> Int[jax.Array, ""]:
    """Computes zero; if not `ok` on some rank of the mesh, calls `check` on the host of all, where it raises.

    Add the zero to what is used next, so that no compiler can drop the check.

    Args:
        ok: whether the check would pass on this rank; equal on all ranks of its expert-parallel group.
        check: refuses what is wrong in `args` with a ValueError.
        *args: pytrees of arrays, equal on all ranks of the group.
        ranks: the mesh axes of the ranks of a group, where `ok` and `args` vary over these too; `check` then gets what
            the first rank has that is not ok.
    """
    groups, names_groups = _group_axes(ok, ranks)
    axes = groups + ranks

    # Mapped over, one check follows the other: a condition on several answers at once would call the host for all.
    @jax.custom_batching.sequential_vmap
    def checked(ok: Bool[jax.Array, ""], args: Any) -> Int[jax.Array, ""]:
        # If one group stopped and the others went on, they would wait for it in their next common exchange until XLA
        # gives up and ends the process.
        everywhere = jax.lax.pmin(ok.astype(jnp.int32), axes) == 1 if axes else ok

        def stop(args: Any) -> jax.Array:
            # All ranks are here, so all of them can learn what is wrong in the first place that is, and say the same.
            first, shared = _of_first_fault(ok, args, axes) if axes else (jnp.int32(0), args)
            call = partial(_refuse, check, _size(groups) if names_groups else 1)
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            answer = jax.pure_callback(call, shape, first // _size(ranks), *shared, vmap_method="sequential")
            return vary_like(answer, everywhere)

        # Neither a constant nor what a callback returns has the manual axes of `everywhere`; both branches must share
        # them.
        zero = vary_like(np.int32(0), everywhere)
        return jax.lax.cond(everywhere, lambda args: zero, stop, args)

    return checked(ok, args)


def _group_axes(ok: Bool[jax.Array, ""], ranks: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The manual mesh axes over which `ok` may differ between groups, and whether they tell these apart alone."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # Without `check_vma` no type says over which axes a value varies; then every manual axis may be one. With it the
    # index of a rank says so, but not on an axis of one rank with `jax_remove_size_one_mesh_axis_from_type`.
    is_checked = any(varying_axes(jax.lax.axis_index(name)) for name in manual)
    varying = varying_axes(ok) if is_checked else manual
    return tuple(name for name in manual if name in varying and name not in ranks), is_checked


def _size(axes: tuple[str, ...]) -> int:
    return jax.lax.axis_size(axes) if axes else 1


def _of_first_fault(ok: Bool[jax.Array, ""], args: Any, axes: tuple[str, ...]) -> tuple[Int[jax.Array, ""], Any]:
    """The number of the first place on the axes that is not ok, and what it has."""
    me = jax.lax.axis_index(axes).astype(jnp.int32)
    first = jax.lax.pmin(jnp.where(ok, jnp.iinfo(jnp.int32).max, me), axes)

    def shared(leaf: Any) -> jax.Array:
        # The sum has one term that is not 0.
        leaf = jnp.asarray(leaf)
        return jax.lax.psum(jnp.where(me == first, leaf.astype(jnp.int32), 0), axes).astype(leaf.dtype)

    return first, jax.tree.map(shared, args)


def _refuse(check: Callable[..., None], num_groups: int, group: Any, *args: Any) -> np.ndarray:
    try:
        check(*jax.tree.map(np.asarray, args))
    except ValueError as error:
        raise ValueError(f"group {int(group)} of {num_groups}: {error}" if num_groups > 1 else str(error)) from None
    return np.zeros((), np.int32)


def _check_shapes(plan: Plan, counts_shape: tuple[int, ...]) -> None:
    num_ranks, num_experts = counts_shape
    home = home_experts_per_rank(num_experts, num_ranks)
    placement, quota, domain = plan.placement, plan.quota, plan.domain
    if placement.ndim != 2 or placement.shape[0] != num_ranks or placement.shape[1] < home:
        raise ValueError(f"plan.placement has shape {placement.shape}; expected [{num_ranks}, S] with S >= {home}")
    if quota.shape != (num_experts, num_ranks):
        raise ValueError(f"plan.quota has shape {quota.shape}; expected [E, R] = {(num_experts, num_ranks)}")
    for name, array in (("placement", placement), ("quota", quota), ("relay", plan.relay), ("rails", plan.rails)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"plan.{name} has dtype {array.dtype}; expected integers")
    if plan.relay is not None and plan.relay.shape != placement.shape:
        raise ValueError(f"plan.relay has shape {plan.relay.shape}; expected that of placement, {placement.shape}")
    if plan.rails is not None and (plan.rails.ndim != 3 or plan.rails.shape[:2] != (num_ranks, num_ranks)):
        raise ValueError(f"plan.rails has shape {plan.rails.shape}; expected [{num_ranks}, {num_ranks}, N]")
    check_domain(domain, num_ranks, "plan.domain")
    if not isinstance(plan.split, Split):
        raise ValueError(f"plan.split is {plan.split!r}; expected a Split")


def _rules(
    plan: Plan, counts: Counts, dynamic: AnyArray | None, xp: Any
) -> Iterator[tuple[AnyArray, Callable[..., str]]]:
    """Lists every rule as (entries that break it, what to say of one such entry)."""
    placement, quota, home = plan.placement, plan.quota, plan.num_home
    ranks = host_iota(plan.num_ranks)[:, None]
    expected_home = host_iota(plan.num_experts).reshape(-1, home)
    # Entries out of range break one rule; the other rules must not index with them.
    in_range = (placement >= -1) & (placement < plan.num_experts)
    expert = xp.where(in_range, placement, -1)
    copies = _copies(expert, plan.num_experts)
    routed = counts.sum(0, dtype=np.int64 if xp is np else np.int32)
    served = quota.sum(1, dtype=routed.dtype)

    yield (
        ~in_range,
        lambda r, s: (
            f"plan.placement of rank {r}, slot {s} is {placement[r, s]}; "
            f"expected an expert below {plan.num_experts}, or -1 for an empty slot"
        ),
    )
    yield (
        expert[:, :home] != expected_home,
        lambda r, s: (
            f"plan.placement of rank {r}, slot {s} is {placement[r, s]}; expected its home expert {expected_home[r, s]}"
        ),
    )
    yield (
        copies > 1,
        lambda r, e: f"plan.placement puts expert {e} {copies[r, e]} times on rank {r}; expected at most once",
    )
    yield (
        (expert >= 0) & (expert // home // plan.domain != ranks // plan.domain),
        lambda r, s: (
            f"plan.placement of rank {r}, slot {s} is expert {placement[r, s]}, whose home is rank "
            f"{placement[r, s] // home}; expected one from inside its domain of {plan.domain} ranks"
        ),
    )
    yield (
        quota < 0,
        lambda e, r: f"plan.quota of expert {e}, rank {r} is {quota[e, r]}; expected at least 0",
    )
    yield (
        (quota > 0) & (copies.T == 0),
        lambda e, r: f"plan.quota of expert {e}, rank {r} is {quota[e, r]}; expected 0: no slot of the rank holds it",
    )
    yield (
        ~_sums_to(quota, routed),
        lambda e: f"plan.quota of expert {e} sums to {served[e]} tokens; expected the {routed[e]} of counts",
    )
    if dynamic is not None:
        at_home = host_iota(plan.num_experts)[:, None] // home == host_iota(plan.num_ranks)
        yield (
            (quota > 0) & ~dynamic[:, None] & ~xp.asarray(at_home),
            lambda e, r: (
                f"plan.quota of expert {e}, rank {r} is {quota[e, r]}; "
                f"expected 0: the expert is static, served by its home, rank {e // home}, alone"
            ),
        )
    if plan.relay is not None:
        yield from _relay_rules(plan, plan.relay, copies)
    if plan.rails is not None:
        rails = plan.rails
        yield (
            rails < 0,
            lambda r, t, n: f"plan.rails of rank {r} to {t}, rail {n} is {rails[r, t, n]}; expected at least 0",
        )


def _sums_to(quota: AnyArray, routed: AnyArray) -> AnyArray:
    """Whether the quotas of each expert, at least 0, sum to the tokens routed to it."""
    # In halves of 16 bits: whole sums of wrong quotas could wrap round in 32 bits to the number that is expected.
    high, low = (part.sum(1, dtype=routed.dtype) for part in (quota >> 16, quota & 0xFFFF))
    return (high + (low >> 16) == routed >> 16) & (low & 0xFFFF == routed & 0xFFFF)


def _relay_rules(plan: Plan, relay: AnyArray, copies: AnyArray) -> Iterator[tuple[AnyArray, Callable[..., str]]]:
    placement = plan.placement
    inside = (relay >= 0) & (relay < plan.num_ranks)
    # A wrong entry must index something, too: `inside` refuses it.
    source = relay.clip(0, plan.num_ranks - 1)
    yield (
        (placement >= 0) & (~inside | (copies[source, placement.clip(0, plan.num_experts - 1)] == 0)),
        lambda r, s: (
            f"plan.relay of rank {r}, slot {s} is {relay[r, s]}; expected a rank that holds expert {placement[r, s]}"
        ),
    )


def _copies(expert: AnyArray, num_experts: int) -> AnyArray:
    """Counts the slots of each rank that hold each expert, `[R, E]`."""
    ranks = np.broadcast_to(host_iota(expert.shape[0])[:, None], expert.shape)
    if isinstance(expert, np.ndarray):
        copies = np.zeros((expert.shape[0], num_experts + 1), np.int32)
        np.add.at(copies, (ranks, expert), 1)
        return copies[:, :-1]
    # Empty slots count in a column of their own, which is cut off: a scatter has no condition.
    zeros = jnp.zeros((expert.shape[0], num_experts + 1), jnp.int32)
    return zeros.at[ranks, jnp.where(expert < 0, num_experts, expert)].add(1)[:, :-1]


def _check_rails(plan: Plan, rails: AnyArray, counts: Counts) -> None:
    # This runs on the host alone: asking the rule for every rank would be too much for each step of a program.
    expected = rows_of_all(np.asarray(counts), np.asarray(plan.quota), plan.domain, plan.split)
    sprayed = np.asarray(rails).sum(-1)
    if (sprayed != expected).any():
        source, to = np.argwhere(sprayed != expected)[0]
        raise ValueError(
            f"plan.rails from rank {source} to rank {to} sums to {sprayed[source, to]} tokens; "
            f"expected the {expected[source, to]} that it sends there"
        )

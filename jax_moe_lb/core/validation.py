"""Legality checks of plans, on the host and inside jitted programs, before a plan is executed.

Both checks evaluate the same list of rules. The check in a program costs a few integer reductions and does not call the
host. A program returns the result as data; the host then evaluates the same rules for the error message.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import Split, rows_of_all
from jax_moe_lb.core.topology import check_domain, check_host_counts, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, as_int32, host_iota, iota, namespace


def check_counts(counts: AnyArray) -> None:
    """Check counts from outside the program, such as from a file."""
    counts = np.asarray(counts)
    if counts.ndim != 2:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E]")
    if not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"counts has dtype {counts.dtype}; expected integers")
    check_host_counts(counts)


def check_plan(plan: Plan, counts: AnyArray, dynamic: AnyArray | None = None) -> None:
    """Check that a plan is legal for some counts.

    A legal plan serves every routed token copy, from occupied slots only. Replicas stay inside the domain and static
    experts are served at home. Call it on plans of a custom balancer or from a file; `moe` checks every plan itself.

    Args:
        plan: plan of one layer, with concrete arrays.
        counts: `[R, E]` integers, the counts of the plan.
        dynamic: `[E]` bool, False for static experts, which only their home serves; `None` (default): all experts are
            dynamic.

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
    # Unsigned integers have no -1.
    plan = jax.tree.map(lambda leaf: np.asarray(leaf, np.int64), plan)
    for broken, describe in _rules(plan, counts, dynamic, np):
        if broken.any():
            raise ValueError(describe(*np.argwhere(broken)[0]))
    if plan.rails is not None:
        _check_rails(plan, plan.rails, counts)


def check_plans(plans: Sequence[Plan], counts: Sequence[Counts]) -> None:
    """Check the plans of several groups of ranks as `check_plan` does, for all of them at once."""
    # Plans with relays or rails are checked one by one.
    if any(plan.relay is not None or plan.rails is not None or plan.domain != plans[0].domain for plan in plans):
        for plan, routed in zip(plans, counts, strict=True):
            check_plan(plan, routed)
        return
    for plan, routed in zip(plans, counts, strict=True):
        check_counts(routed)
        _check_shapes(plan, routed.shape)
    # Unsigned integers have no -1.
    stack = partial(np.stack, dtype=np.int64)
    placement, quota = stack([plan.placement for plan in plans]), stack([plan.quota for plan in plans])
    stacked = replace(plans[0], placement=placement, quota=quota)
    broken = [rule.any((-2, -1) if rule.ndim > 2 else -1) for rule, _ in _rules(stacked, np.stack(counts), None, np)]
    for at in np.flatnonzero(np.any(broken, axis=0)).tolist():
        check_plan(plans[at], counts[at])


def is_legal(plan: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None = None) -> tuple[Plan, Bool[Array, ""]]:
    """Return the plan in int32, and whether `check_plan` accepts it, excluding the check of rails."""
    # It runs inside a program; the arguments are those of `check_plan`.
    _check_shapes(plan, counts.shape)
    plan = jax.tree.map(lambda leaf: jnp.asarray(as_int32(leaf)), plan)
    return plan, jnp.stack([~broken.any() for broken, _ in _rules(plan, counts, dynamic, jnp)]).all()


def fallback_to_plain(
    plan: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None = None
) -> tuple[Plan, Bool[Array, ""]]:
    """Return the plan if it is legal, else the plan of plain expert parallelism, and whether it is legal."""
    # The plain plan gives the same outputs. Return the boolean to the host, which raises the error of `check_plan`. The
    # arguments are those of `check_plan`.
    plan, legal = is_legal(plan, counts, dynamic)
    at_home = _at_home(plan, counts)
    return jax.tree.map(lambda made, safe: jnp.where(legal, made, safe), plan, at_home), legal


def _at_home(plan: Plan, counts: Counts) -> Plan:
    """Return the plan of plain expert parallelism with the fields and shapes of `plan`."""
    ranks, home = iota(plan.num_ranks), plan.num_home
    experts = iota(plan.num_experts)
    # Padded, since a write to all slots would have empty indices; see `add_to_first`.
    empty_slots = (0, 0), (0, plan.slots - home)
    placement = jnp.pad(experts.reshape(-1, home), empty_slots, constant_values=-1)
    served = counts.sum(0, dtype=jnp.int32)[:, None]
    quota = jnp.where(experts[:, None] // home == ranks[None], served, 0)
    # Copy weights from home. Zero rails stand for the receiver's own rail, since no valid rails are known.
    relay = None if plan.relay is None else jnp.where(placement >= 0, ranks[:, None], -1)
    rails = None if plan.rails is None else jnp.zeros_like(plan.rails)
    return replace(plan, placement=placement, quota=quota, relay=relay, rails=rails)


def check_routed(wrong: AnyArray, num_experts: Any) -> None:
    """Check the routing of all ranks."""
    for rank, (num_bad, lowest, highest, bad_weights, nodes) in enumerate(np.asarray(wrong).tolist()):
        if num_bad:
            bad = lowest if lowest < -1 else highest
            raise ValueError(
                f"expert ids of rank {rank} include {bad} ({num_bad} bad ones); "
                f"expected 0 to {int(num_experts) - 1}, or -1 for no expert"
            )
        if bad_weights:
            raise ValueError(f"router logits of rank {rank} give weights that are not finite; expected finite logits")
        if nodes:
            raise ValueError(
                f"a token of rank {rank} has experts on {nodes} nodes; expected at most max_nodes of the dispatch. "
                "Pass Forward(max_nodes=None) with a router without this limit."
            )


def check_homes(homes: Any) -> None:
    """Check that `homes`, `[E]`, is a permutation of the places."""
    homes = np.asarray(homes)
    checked_permutation("homes", homes[None], (1, homes.shape[0]))


def checked_permutation(name: str, permutation: Any, shape: tuple[int, int]) -> Int[np.ndarray, "layers E"]:
    """Check the permutation per layer and return it in int32."""
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
        raise ValueError(f"plan.relay has shape {plan.relay.shape}; expected {placement.shape}, the shape of placement")
    if plan.rails is not None and (plan.rails.ndim != 3 or plan.rails.shape[:2] != (num_ranks, num_ranks)):
        raise ValueError(f"plan.rails has shape {plan.rails.shape}; expected [{num_ranks}, {num_ranks}, N]")
    check_domain(domain, num_ranks, "plan.domain")
    if not isinstance(plan.split, Split):
        raise ValueError(f"plan.split is {plan.split!r}; expected a Split")


def _rules(
    plan: Plan, counts: Int[AnyArray, "*B R E"], dynamic: AnyArray | None, xp: Any
) -> Iterator[tuple[AnyArray, Callable[..., str]]]:
    """Yield every rule as (mask of violating entries, message for one such entry)."""
    # Plans without relays and rails may be stacked along leading dimensions; the messages are those of a single plan.
    placement, quota = plan.placement, plan.quota
    num_ranks, num_experts = placement.shape[-2], quota.shape[-2]
    home, ranks = num_experts // num_ranks, host_iota(num_ranks)[:, None]
    expected_home = host_iota(num_experts).reshape(-1, home)
    # Out-of-range entries violate the first rule. The other rules must not index with them.
    in_range = (placement >= -1) & (placement < num_experts)
    expert = xp.where(in_range, placement, -1)
    copies = _copies(expert, num_experts)
    routed = counts.sum(-2, dtype=np.int64 if xp is np else np.int32)
    served = quota.sum(-1, dtype=routed.dtype)

    yield (
        ~in_range,
        lambda r, s: (
            f"plan.placement of rank {r}, slot {s} is {placement[r, s]}; "
            f"expected an expert below {num_experts}, or -1 for an empty slot"
        ),
    )
    yield (
        expert[..., :home] != expected_home,
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
        (quota > 0) & (copies.swapaxes(-1, -2) == 0),
        lambda e, r: f"plan.quota of expert {e}, rank {r} is {quota[e, r]}; expected 0: no slot of the rank holds it",
    )
    yield (
        ~_sums_to(quota, routed),
        lambda e: f"plan.quota of expert {e} sums to {served[e]} tokens; expected the {routed[e]} of counts",
    )
    if dynamic is not None:
        at_home = host_iota(num_experts)[:, None] // home == host_iota(num_ranks)
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
    """Return whether the nonnegative quotas per expert sum to the routed tokens."""
    # Sum 16-bit halves: 32-bit sums of invalid quotas could wrap around to the expected number.
    high, low = (part.sum(-1, dtype=routed.dtype) for part in (quota >> 16, quota & 0xFFFF))
    return (high + (low >> 16) == routed >> 16) & (low & 0xFFFF == routed & 0xFFFF)


def _relay_rules(plan: Plan, relay: AnyArray, copies: AnyArray) -> Iterator[tuple[AnyArray, Callable[..., str]]]:
    placement = plan.placement
    inside = (relay >= 0) & (relay < plan.num_ranks)
    # Clip invalid entries for indexing; `inside` reports them.
    source = relay.clip(0, plan.num_ranks - 1)
    yield (
        (placement >= 0) & (~inside | (copies[source, placement.clip(0, plan.num_experts - 1)] == 0)),
        lambda r, s: (
            f"plan.relay of rank {r}, slot {s} is {relay[r, s]}; expected a rank holding expert {placement[r, s]}"
        ),
    )
    yield (
        (placement >= 0) & ~_reaches_home(plan, source),
        lambda r, s: (
            f"plan.relay of rank {r}, slot {s} is {relay[r, s]}; "
            f"expected a chain of relays from the home of expert {placement[r, s]}"
        ),
    )


def _reaches_home(plan: Plan, source: AnyArray) -> AnyArray:
    """Return whether the relays per slot lead to the home of the expert, `[R, S]`."""
    num_ranks, num_experts = plan.num_ranks, plan.num_experts
    rank, home = host_iota(num_ranks)[:, None], host_iota(num_experts) // plan.num_home
    expert = plan.placement.clip(-1, num_experts - 1)
    before: AnyArray = np.repeat(rank, num_experts + 1, 1)
    # Empty slots write to an extra column, dropped afterwards.
    if isinstance(source, np.ndarray):
        before[rank, expert] = source
    else:
        before = jnp.asarray(before).at[rank, jnp.where(expert < 0, num_experts, expert)].set(source)
    xp = namespace(source)
    before = xp.where(rank == home, rank, before[:, :-1])
    for _ in range(num_ranks.bit_length()):
        # Each pass doubles the number of relays followed.
        before = before[before, host_iota(num_experts)[None]]
    return before[rank, expert] == xp.asarray(home)[expert]


def _copies(expert: AnyArray, num_experts: int) -> AnyArray:
    """Return the number of slots of each rank holding each expert, `[*B, R, E]`."""
    if isinstance(expert, np.ndarray):
        slots = expert.reshape(-1, expert.shape[-1])
        copies = np.zeros((len(slots), num_experts + 1), np.int32)
        np.add.at(copies, (np.arange(len(slots))[:, None], slots), 1)
        return copies[:, :-1].reshape(*expert.shape[:-1], num_experts)
    ranks = np.broadcast_to(host_iota(expert.shape[0])[:, None], expert.shape)
    # A scatter has no mask, so empty slots count in an extra column, dropped afterwards.
    zeros = jnp.zeros((expert.shape[0], num_experts + 1), jnp.int32)
    return zeros.at[ranks, jnp.where(expert < 0, num_experts, expert)].add(1)[:, :-1]


def _check_rails(plan: Plan, rails: AnyArray, counts: Counts) -> None:
    # Host only: evaluating the rule for every rank is too expensive for each step of a program.
    expected = rows_of_all(np.asarray(counts), np.asarray(plan.quota), plan.domain, plan.split)
    sprayed = np.asarray(rails).sum(-1)
    if (sprayed != expected).any():
        source, to = np.argwhere(sprayed != expected)[0]
        raise ValueError(
            f"plan.rails from rank {source} to rank {to} sums to {sprayed[source, to]} tokens; "
            f"expected {expected[source, to]}, the tokens sent by the split rule"
        )

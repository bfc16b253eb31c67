"""EPLB and EPLB+: replicas by the load of earlier steps, or of this microbatch.

`History` sums expert loads over the last steps without overflow. `EPLB` replans its replicas every few steps from this
history. `EPLBPlus` applies the same rule to the exact load of every microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import BoolScalar, Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, Placement, State, host_iota, namespace, pytree
from jax_moe_lb.planners.eplb import eplb_plus, holds, round_robin

MAX_EVERY = 46340
"""Maximum number of steps, and base of the sums: as many remainders below it fit int32, and as many quotients."""


@pytree
class History:
    """Load of every expert since the last plan."""

    # The sum over experts of one step must fit int32; the sum over all steps may exceed it.

    steps: Int[AnyArray, "*D"]  # the number of steps
    whole: Int[AnyArray, "*D E"]  # `tokens // MAX_EVERY`, summed over the steps
    rest: Int[AnyArray, "*D E"]  # `tokens % MAX_EVERY`, summed over the steps


def check_every(every: int) -> None:
    """Check that `every`, the number of steps between plans, is between 1 and `MAX_EVERY`."""
    if not 1 <= every <= MAX_EVERY:
        raise ValueError(f"every is {every}; expected 1 to {MAX_EVERY} steps")


def no_history(num_experts: int) -> History:
    """Return the history of `num_experts` experts before the first step."""
    zeros = np.zeros(num_experts, np.int32)
    return History(np.zeros((), np.int32), zeros, zeros)


def mean(history: History) -> Int[AnyArray, "E"]:
    """Return the mean tokens of the experts in a step, `[E]` int32, rounded down; 0 before the first step."""
    # Divide by the steps in the history: a restored one may have more than `every`.
    steps, base = namespace(history.steps).maximum(history.steps, np.int32(1)), np.int32(MAX_EVERY)
    # Each term fits int32, where `whole * base + rest` may not.
    left = history.whole % steps * base + history.rest % steps
    tokens = history.whole // steps * base + history.rest // steps + left // steps
    # A damaged state may have more tokens than fit int32, which planners refuse: it counts as one without loads.
    fits = (history.whole // steps).astype(np.float32).sum() <= np.float32(MAX_EVERY + 2)
    return tokens * fits.astype(np.int32)


def observe(history: History, tokens: Int[AnyArray, "E"], every: int) -> History:
    """Return the history after one further step; it restarts after `every` steps."""
    # Multiply instead of branching: the same line runs in NumPy and in a program.
    keep = (history.steps < every).astype(np.int32)
    whole, rest = history.whole * keep, history.rest * keep
    steps = namespace(keep).asarray(history.steps * keep + 1)
    base = np.int32(MAX_EVERY)
    return History(steps, whole + tokens // base, rest + tokens % base)


def checked(state: State, expected: State, counts: Counts) -> State:
    """Check the state of a balancer, and make it vary over the mesh axes of `counts`."""
    kinds: list[Any] = [jax.tree.structure(tree) for tree in (state, expected)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"state is {kinds[0]}; expected {kinds[1]}, the structure returned by init")
    for (path, leaf), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}; "
                f"expected {want.dtype}{list(want.shape)}, for counts {list(counts.shape)}"
            )
    # Balancers return the state through conditionals, whose branches must vary over the same mesh axes.
    return vary_like(state, counts)


@pytree
class _State:
    history: History  # loads since the last plan
    held: Bool[AnyArray, "*D R E"]  # true if the rank holds a replica of the expert under the last plan


@dataclass(frozen=True)
@checked_fields
class EPLB(Balancer):
    """EPLB: replicas of the busiest experts of earlier steps, with an even split over copies.

    Use it if the same experts stay busy for many steps, or as the common baseline. It plans from earlier microbatches
    only, so it balances poorly if the busy experts change between microbatches.

    It is DeepSeek's EPLB with fixed homes. The first copy of every expert is at home and never moves. The rest of the
    algorithm fills every other slot with the expert of the highest load per copy. It then packs these replicas,
    heaviest first, onto the ranks of the lowest load (`planners/eplb.py`).

    Domains select between its two policies. With one domain, packing is global. With several it is hierarchical: each
    domain is packed with its own experts. EPLB's first step, moving groups of experts between domains, is omitted. No
    rank gets two copies of an expert. `jax_moe_lb.planners.rebalance_experts` is the original algorithm, which packs
    all copies.

    A step is one call, for one layer and microbatch. The first `every` steps have no replicas. Steps `every`, `2 *
    every`, ... start with a new plan, from the mean load of the previous `every` steps.

    Replicas of another balancer (`Chain`) are kept and count as copies; its quotas are replaced.

    Args:
        every: steps between plans, and steps of history; 1 to 46340. The default 3 is the value of UltraEP's paper for
            EPLB in training; it uses 50 in prefill. A restored state keeps its loads if the value changes.

    Raises:
        ValueError: `every` is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import EPLB
        >>> from jax_moe_lb.core import load, plain_plan
        >>> topology, balancer = Topology.flat(num_ranks=4), EPLB(every=2)
        >>> state = balancer.init((4, 4))
        >>> for tokens in ([12, 2, 4, 2], [14, 2, 2, 2], [16, 0, 2, 2]):
        ...     counts = np.array([tokens, [0] * 4, [0] * 4, [0] * 4], np.int32)
        ...     start = plain_plan(counts, topology, slots=2)
        ...     plan, state = balancer.rebalance(counts, start, topology, state)
        ...     print(load(plan))
        [12  2  4  2]
        [14  2  2  2]
        [5 4 5 6]
    """

    every: int = 3

    def __post_init__(self) -> None:
        check_every(self.every)

    def init(self, counts_shape: tuple[int, int]) -> _State:
        """Return the state before the first step, without history or replicas."""
        return _State(no_history(counts_shape[1]), np.zeros(counts_shape, bool))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, _State]:
        """Return the placement of the last planning step with the quota of this microbatch; see `Balancer.rebalance`.

        Raises:
            ValueError: the state does not match the shapes or dtypes of `init`.
        """
        del topology
        state = checked(state, self.init(counts.shape), counts)
        tokens = counts.sum(0, dtype=np.int32)
        # Both branches of the conditional must vary over the same mesh axes.
        before = vary_like(plan.placement, tokens)

        def replan() -> Bool[AnyArray, "R E"]:
            placement, _ = eplb_plus(mean(state.history), before, plan.domain)
            # Keep the experts held per rank, not their slots: another balancer may fill different slots next time.
            return holds(placement, counts.shape[1]) & ~holds(before, counts.shape[1])

        # A conditional skips the cost of planning in the steps between plans.
        held = _cond(state.history.steps >= self.every, replan, lambda: state.held)
        placement = fill(before, held, plan.domain)
        after = replace(plan, placement=placement, quota=round_robin(tokens, placement))
        return after, _State(observe(state.history, tokens, self.every), held)


def _cond(choose: BoolScalar, replan: Callable[[], AnyArray], keep: Callable[[], AnyArray]) -> AnyArray:
    if namespace(choose) is np:
        return replan() if choose else keep()
    return jax.lax.cond(choose, replan, keep)


def fill(placement: Placement, held: Bool[AnyArray, "R E"], domain: int) -> Placement:
    """Fill the empty slots of each rank with the replicas, in the order of experts."""
    num_ranks, num_experts = held.shape
    xp = namespace(placement)
    home_domain = host_iota(num_experts) // (num_experts // num_ranks) // domain
    allowed = home_domain[None] == host_iota(num_ranks)[:, None] // domain
    wanted = held & allowed & ~holds(placement, num_experts)
    # An index of a nonexistent expert follows the last replica.
    experts = xp.sort(xp.where(wanted, host_iota(num_experts)[None], np.int32(num_experts)), axis=1)
    experts = xp.concatenate([experts, xp.full_like(experts[:, :1], num_experts)], axis=1)
    empty = placement < 0
    # Occupied slots are numbered, too, and empty slots can outnumber the experts to place.
    number = xp.clip(empty.cumsum(1, dtype=np.int32) - 1, 0, num_experts)
    chosen = xp.take_along_axis(experts, number, axis=1)
    return xp.where(empty & (chosen < num_experts), chosen, placement)


@dataclass(frozen=True)
@checked_fields
class EPLBPlus(Balancer):
    """EPLB+: replicas of the experts of the highest load per copy, in all slots, with an even split.

    Use it as the baseline EPLB+ of the UltraEP paper, or if tokens must be split evenly. It runs EPLB's algorithm on
    the load of the microbatch instead of history. Copies are packed onto ranks by longest processing time first. The
    even split is worse than a quota: a copy takes its share even on an overloaded rank.

    Homes are fixed: the first copy of an expert is at home, and only the others are packed, onto the remaining load.
    The original EPLB packs all copies (`rebalance_experts`). Replicas of another balancer (`Chain`) are kept and count
    as copies; its quotas are replaced.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import EPLBPlus
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[4, 0, 1, 0], [3, 1, 1, 0], [3, 1, 1, 0], [3, 0, 1, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = EPLBPlus().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 13, 2, 4 and 0
        [6 5 5 3]

    Reference:
        UltraEP, arXiv 2606.04101, section 7.
    """

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately; see `Balancer.rebalance`."""
        del topology
        placement, quota = eplb_plus(counts.sum(0, dtype=jnp.int32), plan.placement, plan.domain)
        return replace(plan, placement=placement, quota=quota), state

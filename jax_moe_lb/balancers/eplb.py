"""EPLB and EPLB+: redundant experts by the load of earlier steps, or of this microbatch.

`History` sums expert loads over the last steps without overflow. `EPLB` places replicas anew every few steps by that
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
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, Placement, State, host_iota, namespace, pytree
from jax_moe_lb.planners.eplb import eplb_plus, holds, round_robin

MAX_EVERY = 46340
"""The largest number of steps whose remainders, each below it, sum to an int32."""


@pytree
class History:
    """The load of every expert in the steps since the last plan; one step's sum must fit int32, that of all need not.

    Args:
        steps: how many steps they are.
        whole: `[E]` int32, `tokens // every`, summed over the steps.
        rest: `[E]` int32, `tokens % every`, summed over the steps.
    """

    steps: Int[AnyArray, "*D"]
    whole: Int[AnyArray, "*D E"]
    rest: Int[AnyArray, "*D E"]


def check_every(every: int) -> None:
    """Refuses a number of steps that cannot be one between plans."""
    if not 1 <= every <= MAX_EVERY:
        raise ValueError(f"every is {every}; expected 1 to {MAX_EVERY} steps")


def no_history(num_experts: int) -> History:
    """Returns the history before the first step, for `E` experts."""
    zeros = np.zeros(num_experts, np.int32)
    return History(np.zeros((), np.int32), zeros, zeros)


def mean(history: History, every: int) -> Int[AnyArray, "E"]:
    """Returns the tokens of each expert per step, rounded down; call it once there are `every` steps."""
    return history.whole + history.rest // every


def observe(history: History, tokens: Int[AnyArray, "E"], every: int) -> History:
    """Returns the history after one step more; the first step after `every` steps starts anew.

    Args:
        history: what was known before the step.
        tokens: `[E]` int32, the load of the step.
        every: the steps between two plans.
    """
    # A factor and not a branch: the same line runs on NumPy arrays and in a program.
    keep = (history.steps < every).astype(np.int32)
    whole, rest = history.whole * keep, history.rest * keep
    steps = namespace(keep).asarray(history.steps * keep + 1)
    return History(steps, whole + tokens // every, rest + tokens % every)


def checked(state: State, expected: Any, counts: Counts) -> State:
    """Refuses a state that is not this balancer's, and lets it vary over the mesh axes of `counts`.

    Args:
        state: what the balancer was given.
        expected: what its `init` returns.
        counts: `[R, E]`, of this microbatch.

    Raises:
        ValueError: a state of another kind, or a leaf of another shape or dtype; the message names it.
    """
    kinds: list[Any] = [jax.tree.structure(tree) for tree in (state, expected)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"state is {kinds[0]}; expected {kinds[1]}, as of init")
    for (path, leaf), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}; "
                f"expected {want.dtype}{list(want.shape)}, for counts {list(counts.shape)}"
            )
    # Balancers return it through conditionals, whose branches must vary over the same mesh axes.
    return vary_like(state, counts)


@pytree
class _State:
    """What `EPLB` remembers.

    Args:
        history: the loads since the last plan.
        held: `[R, E]`, whether a rank has a replica of an expert, under the last plan.
    """

    history: History
    held: Bool[AnyArray, "*D R E"]


@dataclass(frozen=True)
class EPLB(Balancer):
    """Keeps replicas of the experts that were busiest, for `every` steps, and splits tokens evenly over copies.

    Use it where the same experts stay hot for many steps, or as the baseline that most papers compare with. History
    does not see the microbatch that it is used for: that is EPLB's weakness, where hot experts change from one to the
    next.

    It is DeepSeek's EPLB on top of fixed homes. Its first copy of every expert is the one at home, which never moves.
    What is left of the algorithm is to replicate, for every slot beyond the home experts, the expert of the highest
    load per copy, and to pack these replicas, heaviest first, onto the ranks with the lowest load
    (`planners/eplb.py`). Its two policies are a matter of domains: with one domain the packing is global; with
    several it is hierarchical, each domain packed with its own experts, without EPLB's first step, which would move
    groups of experts between domains. No rank gets two copies of an expert. `jax_moe_lb.planners.rebalance_experts` is
    EPLB's own algorithm, which packs all copies afresh.

    A step is a call, that is one layer and microbatch. There is no replica until the first `every` steps are over; then
    steps `every`, `2 * every`, ... begin with a new plan, from the mean load of the `every` steps before.

    Replicas that another balancer made (`Chain`) stay and count as copies; its quotas do not.

    Args:
        every: the steps between plans, which are the steps of history too; 1 to 46340. 3, the default, is what
            UltraEP's paper uses for it in training; it uses 50 in prefill.

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
        """Returns the state before the first step: no history, and no replicas."""
        return _State(no_history(counts_shape[1]), np.zeros(counts_shape, bool))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, _State]:
        """Returns the placement of the last planning step, with the quota of this microbatch; see `Balancer.rebalance`.

        Raises:
            ValueError: a state of another shape than that of `init`.
        """
        del topology
        state = checked(state, self.init(counts.shape), counts)
        tokens = counts.sum(0, dtype=np.int32)
        # Both branches of the conditional must vary over the same mesh axes.
        before = vary_like(plan.placement, tokens)

        def replan() -> Bool[AnyArray, "R E"]:
            placement, _ = eplb_plus(mean(state.history, self.every), before, plan.domain)
            # Kept is who holds what, not in which slot: slots that another balancer fills may differ next time.
            return holds(placement, counts.shape[1]) & ~holds(before, counts.shape[1])

        # A branch, so that the steps between two plans do not pay for one.
        held = _cond(state.history.steps >= self.every, replan, lambda: state.held)
        placement = _fill(before, held, plan.domain)
        after = replace(plan, placement=placement, quota=round_robin(tokens, placement))
        return after, _State(observe(state.history, tokens, self.every), held)


def _cond(choose: Any, replan: Callable[[], AnyArray], keep: Callable[[], AnyArray]) -> AnyArray:
    """`jax.lax.cond`, or on a host the branch itself."""
    if namespace(choose) is np:
        return replan() if choose else keep()
    return jax.lax.cond(choose, replan, keep)


def _fill(placement: Placement, held: Bool[AnyArray, "R E"], domain: int) -> Placement:
    """Each rank's replicas, by expert, in its empty slots, from the first on."""
    num_ranks, num_experts = held.shape
    xp = namespace(placement)
    home_domain = host_iota(num_experts) // (num_experts // num_ranks) // domain
    allowed = home_domain[None] == host_iota(num_ranks)[:, None] // domain
    wanted = held & allowed & ~holds(placement, num_experts)
    # Past the last replica comes an expert that does not exist.
    experts = xp.sort(xp.where(wanted, host_iota(num_experts)[None], np.int32(num_experts)), axis=1)
    experts = xp.concatenate([experts, xp.full_like(experts[:, :1], num_experts)], axis=1)
    empty = placement < 0
    # Slots that are not empty are numbered too, and more slots may be empty than there are experts to put in.
    number = xp.clip(empty.cumsum(1, dtype=np.int32) - 1, 0, num_experts)
    chosen = xp.take_along_axis(experts, number, axis=1)
    return xp.where(empty & (chosen < num_experts), chosen, placement)


@dataclass(frozen=True)
class EPLBPlus(Balancer):
    """Fills all slots with replicas of the experts of the highest load per copy, and splits tokens evenly.

    Use it as the baseline that the UltraEP paper (arXiv 2606.04101, section 7) calls EPLB+, or where tokens must be
    split evenly. It is EPLB's algorithm, with the microbatch's own load in place of history. Copies are packed onto
    ranks with the longest processing time first. Its even split is what it has in common with EPLB, and what a quota
    does better: a copy takes its share even where its rank has too much already.

    Here homes stay: an expert's first copy is at home, and only the others are packed, onto the loads that homes leave.
    EPLB packs all copies afresh (`rebalance_experts`). Replicas that another balancer made (`Chain`) stay too and count
    as copies; its quotas do not.

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
    """

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        del topology
        placement, quota = eplb_plus(counts.sum(0, dtype=jnp.int32), plan.placement, plan.domain)
        return replace(plan, placement=placement, quota=quota), state

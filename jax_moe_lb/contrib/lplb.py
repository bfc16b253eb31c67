"""LPLB: replicas on a fixed graph of ranks, and a linear program per microbatch for the split of tokens."""

from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.balancers.eplb import History, check_every, checked, mean, no_history, observe
from jax_moe_lb.balancers.host_callback import HostCallback
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.extras import require_tools
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.stats import HostErrors
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, Placement, State, host_iota, namespace, pytree


@pytree
class _State:
    history: History  # loads since the last plan
    load: Int[AnyArray, "*D E"]  # tokens per step of each expert, the basis of the last plan


@dataclass(frozen=True)
@checked_fields
class LPLB(Balancer):
    """LPLB: replicas on a fixed graph of ranks, with the split of the lowest maximum load.

    Use it as a baseline. A host callback solves the linear program, which takes milliseconds. An expert has at most one
    replica, so under extreme skew balancers with several replicas per expert balance better.

    It follows DeepSeek's LPLB. The k-th replica slot of a rank copies from the rank at the k-th distance in the domain.
    It holds the k-th heaviest home expert of this source rank, by the load of the steps before the last plan (before
    the first plan, its k-th expert). The graph has one edge per replicated expert. For every microbatch, a linear
    program splits the tokens of each expert between home and replica, with the lowest maximum load of each domain.
    HiGHS solves it on the host (`spread`). The original LPLB also moves home experts between ranks at intervals; here
    homes are fixed.

    Args:
        every: steps between rankings of the experts, and steps of history; 1 to 46340, 3 by default.
        distances: the k-th replica slot of rank `r` copies from the rank `distances[k]` after it in the domain,
            cyclically. Further slots, and those with a multiple of the domain size, stay empty. `None` (default): 1, 2,
            4, ... below the domain size, then the rest of 1, 2, 3, ...

    Raises:
        ValueError: `every` or a distance is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.contrib import LPLB
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[3, 1, 1, 0], [3, 1, 1, 1], [3, 0, 1, 1], [3, 0, 1, 0]], np.int32)
        >>> topology, balancer = Topology.flat(num_ranks=4), LPLB()
        >>> start = plain_plan(counts, topology, slots=2)
        >>> plan, state = balancer.rebalance(counts, start, topology, balancer.init(counts.shape))
        >>> print(load(plan))  # of 12, 2, 4 and 2
        [6 2 6 6]
    """

    every: int = 3
    distances: tuple[int, ...] | None = None
    _spread: HostCallback = field(default_factory=lambda: HostCallback(spread), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_tools()
        check_every(self.every)
        for k, distance in enumerate(self.distances or ()):
            if distance < 1:
                raise ValueError(f"distances of slot {k} is {distance}; expected at least 1")

    def init(self, counts_shape: tuple[int, int]) -> _State:
        """Return the state before the first step, without history."""
        return _State(no_history(counts_shape[1]), np.zeros(counts_shape[1], np.int32))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, _State]:
        """Return the replicas of the last ranking with the quota of this microbatch's linear program.

        See `Balancer.rebalance`.

        Raises:
            ValueError: the state does not match the shapes or dtypes of `init`. With NumPy arrays, also if HiGHS found
                no solution; in a program this is a fault, see `HostCallback`.
        """
        state = checked(state, self.init(counts.shape), counts)
        xp = namespace(counts)
        load = xp.where(state.history.steps >= self.every, mean(state.history), state.load)
        distances = _distances(plan.domain) if self.distances is None else self.distances
        placement = _add_edges(vary_like(plan.placement, load), load, distances, plan.domain)
        start = replace(plan, placement=placement)
        plan, _ = self._spread.rebalance(counts, start, topology, ())
        history = observe(state.history, counts.sum(0, dtype=np.int32), self.every)
        return plan, _State(history, load)

    @property
    def host_errors(self) -> tuple[HostErrors, ...]:
        """The linear program, solved on the host."""
        return self._spread.host_errors


def _distances(members: int) -> tuple[int, ...]:
    doubling = [2**k for k in range(members.bit_length()) if 2**k < members]
    return tuple(doubling + [d for d in range(1, members) if d not in doubling])


def _add_edges(
    placement: Placement, load: Int[AnyArray, "E"], distances: tuple[int, ...], members: int
) -> Int[AnyArray, "R S"]:
    """Fill the empty slots of the graph with replicas of experts without another copy."""
    num_ranks, slots = placement.shape
    num_home = load.shape[0] // num_ranks
    num_edges = min(slots - num_home, num_home, len(distances))
    xp = namespace(load)
    # Counts are nonnegative, so their negatives fit int32.
    heaviest = xp.argsort(-load.reshape(num_ranks, num_home), axis=1, stable=True).astype(np.int32)
    rank = np.arange(num_ranks)[:, None]
    away = np.array(distances[:num_edges], np.int64).reshape(1, num_edges) % members
    source = rank // members * members + (rank + away) % members
    wanted = (source * num_home).astype(np.int32) + heaviest[source, np.arange(num_edges)[None]]
    copies = (placement[:, :, None] == host_iota(load.shape[0])[None, None]).sum((0, 1), dtype=np.int32)
    free = (placement[:, num_home : num_home + num_edges] < 0) & (copies[wanted] == 1) & (away > 0)
    edges = xp.where(free, wanted, placement[:, num_home : num_home + num_edges])
    return xp.concatenate([placement[:, :num_home], edges, placement[:, num_home + num_edges :]], axis=1)


def spread(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Return the plan with the quota of the lowest maximum load of every domain for the placement."""
    # Use it as the planner of a `HostCallback`, after any balancer whose placement should get its optimal quota. It
    # solves two linear programs per domain. The first finds the lowest maximum load. The second fixes this load,
    # rounded up, and maximizes the tokens served at home. It is a flow from experts to ranks with integer bounds, so
    # the vertex returned by the simplex method is integer, too. The maximum load is therefore the lowest of all integer
    # quotas.
    del topology
    tokens = counts.sum(0)
    quota = np.zeros((plan.num_experts, plan.num_ranks), np.int32)
    for first in range(0, plan.num_ranks, plan.domain):
        _spread_domain(tokens, plan.placement[first : first + plan.domain], first, quota)
    return replace(plan, quota=quota)


def _spread_domain(tokens: np.ndarray, placement: np.ndarray, first: int, quota: np.ndarray) -> None:
    """Set the quota of the experts of the domain starting at rank `first`."""
    rank, slot = np.nonzero(placement >= 0)
    expert = placement[rank, slot]
    shared = (np.bincount(expert, minlength=len(tokens)) > 1) & (tokens > 0)
    alone = ~shared[expert]
    # An expert with one copy has a fixed quota. Omitting it makes the linear programs smaller.
    quota[expert[alone], first + rank[alone]] = tokens[expert[alone]]
    rank, expert, slot = rank[~alone], expert[~alone], slot[~alone]
    if not rank.size:
        return
    fixed = quota[:, first : first + len(placement)].sum(0)
    is_replica = slot >= len(tokens) // quota.shape[1]
    served = _least_maximum(tokens, expert, rank, is_replica, fixed)
    for number, copies in groupby(np.lexsort((~is_replica, expert)).tolist(), key=lambda i: expert[i]):
        left = int(tokens[number])
        for i in copies:
            # The home is last and takes the remainder, so rounding loses no token.
            quota[number, first + rank[i]] = part = min(left, round(served[i])) if is_replica[i] else left
            left -= part


def _least_maximum(
    tokens: np.ndarray, expert: np.ndarray, rank: np.ndarray, is_replica: np.ndarray, fixed: np.ndarray
) -> np.ndarray:
    """Return the tokens per copy, integers up to rounding errors."""
    copies, ranks = np.arange(len(expert)), len(fixed)
    numbers, row = np.unique(expert, return_inverse=True)
    of_expert, on_rank = np.zeros((len(numbers), len(copies))), np.zeros((ranks, len(copies)))
    of_expert[row, copies], on_rank[rank, copies] = 1, 1
    level = _solve(
        np.append(np.zeros(len(copies)), 1.0),
        np.hstack([on_rank, -np.ones((ranks, 1))]),
        -fixed,
        np.hstack([of_expert, np.zeros((len(numbers), 1))]),
        tokens[numbers],
    )[-1]
    # The optimum is a mean over some of the ranks, so it is an integer or exceeds one by at least 1 / ranks.
    limit = np.ceil(level - 0.5 / ranks)
    return _solve(is_replica.astype(float), on_rank, limit - fixed, of_expert, tokens[numbers])


def _solve(cost: np.ndarray, a_ub: np.ndarray, b_ub: np.ndarray, a_eq: np.ndarray, b_eq: np.ndarray) -> np.ndarray:
    # Imported at its first use, as it takes a second and belongs to an extra.
    from scipy.optimize import linprog

    answer = linprog(cost, a_ub, b_ub, a_eq, b_eq, bounds=(0, None), method="highs-ds")
    if answer.x is None:
        raise ValueError(f"HiGHS found no quota: {answer.message}")
    return answer.x

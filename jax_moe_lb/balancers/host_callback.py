"""Balancer calling a NumPy function on the host in every step."""

import abc
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.plan_file import ARRAYS
from jax_moe_lb.core.split import Split
from jax_moe_lb.core.stats import HostErrors
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, namespace
from jax_moe_lb.core.validation import check_plan

HostPlanner = Callable[[np.ndarray, Plan, Topology], Plan]

FAILED, DIFFERS = -(2**31), 1 - 2**31
"""Entries of the plan after a failure on some rank, and after plans that differ between ranks. Both are illegal."""


@dataclass(frozen=True)
@checked_fields
class HostCallback(Balancer):
    """Balancer calling a user function on the host, for prototypes; slow.

    Use it to try a rule before writing it in JAX or C++. Tokens are split by the `split` of the input plan: a planner
    may omit the split and cannot change it. A planner that raises an error does not stop the program: plain expert
    parallelism serves the tokens, and `raise_on_fault` raises with the planner's own error as its cause.

    Args:
        planner: pure function of the counts `[R, E]`, the current plan (both NumPy) and the topology. Its plan is
            checked before use.

    Examples:
        >>> from dataclasses import replace
        >>> import numpy as np
        >>> from jax_moe_lb import HostCallback, Topology
        >>> from jax_moe_lb.core import load, plain_plan
        >>> def halve_the_first(counts, plan, topology):
        ...     placement, quota = plan.placement.copy(), plan.quota.copy()
        ...     placement[1, 1] = 0  # the replica slot of rank 1 holds expert 0
        ...     quota[0, :2] = quota[0, 0] - quota[0, 0] // 2, quota[0, 0] // 2
        ...     return replace(plan, placement=placement, quota=quota)
        >>> counts = np.array([[4, 0], [3, 1]], np.int32)
        >>> topology = Topology.flat(num_ranks=2)
        >>> plan = plain_plan(counts, topology, slots=2)
        >>> plan, _ = HostCallback(halve_the_first).rebalance(counts, plan, topology, ())
        >>> print(load(plan))
        [4 4]
    """

    planner: HostPlanner
    _errors: deque[ValueError] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False, compare=False)

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> None:
        """Return `None`: the effect of the function is unknown."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Call the planner and check its plan; see `Balancer.rebalance`.

        In a program, the plan is illegal if on some rank the planner failed, its plan is illegal, or the plan differs
        from the first rank's.

        Raises:
            ValueError: with NumPy arrays, the plan is illegal. Errors of the planner propagate.
        """
        if namespace(counts) is np:
            return _checked(self.planner(counts, plan, topology), counts, plan), state
        so_far, plan_of = ravel_pytree(plan)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        ranks = tuple(axis for axis in topology.expert_axes if axis in manual)
        rank = jax.lax.axis_index(ranks).astype(jnp.int32) if ranks else jnp.int32(0)
        call = partial(self._call, topology, bool(ranks))
        # Return one array: on TPUs JAX gives all results of a callback the sharding of the first, invalid for results
        # with another number of dimensions.
        result = jax.ShapeDtypeStruct((so_far.size + 2,), jnp.int32)
        words = jax.pure_callback(call, result, counts, plan, rank, vmap_method="sequential")
        answer, ending = words[:-2], vary_like(words[-2:], counts, rank)
        broken = _broken(ending[0], ending[1], rank, ranks)
        # A callback result has no manual axes. The counts have the axes on which it depends.
        answer = jnp.where(broken == 0, vary_like(answer, counts), broken)
        return plan_of(answer), state

    @property
    def host_errors(self) -> tuple[HostErrors, ...]:
        """Itself."""
        return (self,)

    def raise_error_of(self, plan: Plan) -> None:
        """Raise the error behind a plan; see `HostErrors`.

        Raises:
            ValueError: on some rank the planner failed, or its plan was illegal or differed from the first rank's. The
                cause is the error of the planner.
        """
        entry = int(np.asarray(plan.placement).flat[0])
        if entry == DIFFERS:
            raise ValueError(
                "HostCallback: planner returned plans differing between ranks; expected a pure function of its input"
            )
        if entry == FAILED:
            if not self._errors:
                raise ValueError("HostCallback: planner failed in another process; expected a plan")
            raise ValueError(str(self._errors[-1])) from self._errors[-1].__cause__

    def _call(self, topology: Topology, names_rank: bool, counts: Counts, plan: Plan, rank: Any) -> np.ndarray:
        """Return the plan, its checksum and whether the planner failed, concatenated in int32."""
        # It never raises: if one rank stopped alone, the others would wait for it.
        counts, plan = jax.tree.map(np.asarray, (counts, plan))
        answer, has_failed = plan, 0
        try:
            answer = _checked(_asked(self.planner, counts, plan, topology), counts, plan)
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            refusal = ValueError(f"HostCallback{f' on rank {rank}' if names_rank else ''}: {text}")
            refusal.__cause__ = error.__cause__
            self._errors.append(refusal)
            has_failed = 1
        content = b"".join(leaf.astype(np.int32).tobytes() for leaf in jax.tree.leaves(answer))
        ending = np.array([zlib.crc32(content), has_failed], np.uint32)
        return np.frombuffer(content + ending.tobytes(), np.int32)


def _asked(planner: HostPlanner, counts: Counts, plan: Plan, topology: Topology) -> Any:
    try:
        return planner(counts, plan, topology)
    # SystemExit would end this rank alone, too.
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where, why = f"{last.filename}, line {last.lineno}", " ".join(str(error).split())
        # Keep the planner's own frames only.
        own = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        raise ValueError(f"planner raised {type(error).__name__} in {where}: {why}") from own


def _checked(answer: object, counts: Counts, plan: Plan) -> Plan:
    """Check the planner's plan and return it with the shapes and dtypes of the input plan."""
    if not isinstance(answer, Plan):
        raise ValueError(f"planner returned {type(answer).__name__}; expected a Plan")
    # The receipt of a microbatch depends on the static part of the plan, which a callback cannot change.
    if answer.split not in (Split(), plan.split):
        raise ValueError(f"planner returned a plan with {answer.split}; expected {plan.split}, as in the input")
    if answer.domain != plan.domain:
        raise ValueError(f"planner returned a plan of domain {answer.domain}; expected {plan.domain}, as in the input")
    arrays = {name: getattr(answer, name) for name in ARRAYS}
    for name, array in arrays.items():
        if (array is None) != (getattr(plan, name) is None):
            wanted = "None" if array is not None else "an array"
            raise ValueError(f"planner returned {type(array).__name__} for {name}; expected {wanted}, as in the input")
    arrays = {name: None if array is None else np.asarray(array) for name, array in arrays.items()}
    answer = replace(answer, split=plan.split, **arrays)
    check_plan(answer, counts)
    return jax.tree.map(_same_type, answer, plan)


def _broken(
    fingerprint: jax.Array, has_failed: jax.Array, rank: jax.Array, ranks: tuple[str, ...]
) -> Int[jax.Array, ""]:
    """Return 0 if all ranks have the same plan, else `FAILED` or `DIFFERS`; equal on all ranks."""
    # With 64-bit types enabled, two Python integers would make an int64.
    good, failed, differs = (jnp.int32(code) for code in (0, FAILED, DIFFERS))
    if not ranks:
        return jnp.where(has_failed != 0, failed, good)
    of_first = jax.lax.psum(jnp.where(rank == 0, fingerprint, 0), ranks)
    problem = jnp.where(has_failed != 0, failed, jnp.where(fingerprint == of_first, good, differs))
    return jax.lax.pmin(problem, ranks)


def _same_type(answer: np.ndarray, before: np.ndarray) -> np.ndarray:
    if answer.shape != before.shape:
        raise ValueError(f"planner returned an array of shape {answer.shape}; expected {before.shape}, as in the input")
    return np.asarray(answer, before.dtype)


def served_at_home(counts: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return a placement without replicas and the quota of the homes, for a planner to edit."""
    placement, quota = plan.placement.copy(), np.zeros((plan.num_experts, plan.num_ranks), np.int64)
    placement[:, plan.num_home :] = -1
    quota[np.arange(plan.num_experts), np.arange(plan.num_experts) // plan.num_home] = counts.sum(0)
    return placement, quota


class PlannedOnHost(Balancer):
    """Base class of balancers that plan in NumPy on the host, as the planner of a `HostCallback`."""

    @abc.abstractmethod
    def plan_on_host(self, counts: np.ndarray, plan: Plan) -> Plan:
        """Return a legal plan with the slots and domains of another plan, whose replicas are dropped.

        Args:
            counts: `[R, E]` int32.
            plan: the other plan, in NumPy arrays.
        """

    @cached_property
    def _host(self) -> HostCallback:
        """Keep the last error of the planner."""
        return HostCallback(_PlannerOf(self))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately, from the counts alone; see `Balancer.rebalance`."""
        return self._host.rebalance(counts, plan, topology, state)

    @property
    def host_errors(self) -> tuple[HostErrors, ...]:
        """Its host callback."""
        return self._host.host_errors


@dataclass(frozen=True)
class _PlannerOf:
    # Equal for equal balancers, since statistics compare it, and pickled with its balancer.
    balancer: PlannedOnHost

    def __call__(self, counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
        return self.balancer.plan_on_host(counts, plan)

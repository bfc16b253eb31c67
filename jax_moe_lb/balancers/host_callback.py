"""Balancer calling a NumPy function on the host in every step."""

import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.plan_file import ARRAYS
from jax_moe_lb.core.split import Split
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, namespace
from jax_moe_lb.core.validation import check_plan, ensure

HostPlanner = Callable[[np.ndarray, Plan, Topology], Plan]

MOST_BYTES = 512
"""Maximum length of an error message shared between ranks, in bytes."""


@dataclass(frozen=True)
class HostCallback(Balancer):
    """Balancer calling a user function on the host, for prototypes; slow.

    Use it to try a rule before writing it in JAX or C++. Tokens are split by the `split` of the input plan: a planner
    may omit the split and cannot change it.

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

    def no_op_reason(self, topology: Topology, num_home: int, slots: int) -> None:
        """Return `None`: the effect of the function is unknown."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Call the planner and check its plan; see `Balancer.rebalance`.

        Raises:
            jax.errors.JaxRuntimeError: on some rank the planner failed, its plan is illegal, or the plan differs from
                the first rank's. All devices stop. The message names the first such rank and ends with the error of
                `check_plan` or of the planner.
            ValueError: with NumPy arrays, the plan is illegal. Errors of the planner propagate.
        """
        if namespace(counts) is np:
            return _checked(self.planner(counts, plan, topology), counts, plan), state
        so_far, plan_of = ravel_pytree(plan)
        call = partial(_call, self.planner, topology)
        # Return one array: on TPUs JAX gives all results of a callback the sharding of the first, invalid for results
        # with another number of dimensions.
        result = jax.ShapeDtypeStruct((so_far.size + 1 + MOST_BYTES // 4,), jnp.int32)
        words = jax.pure_callback(call, result, counts, plan, vmap_method="sequential")
        answer, fingerprint, problem = jnp.split(words, (so_far.size, so_far.size + 1))
        stop = _agreed(fingerprint[0], problem, counts, topology)
        # A callback result has no manual axes. The counts have the axes on which it depends.
        return jax.tree.map(lambda leaf: leaf + stop, vary_like(plan_of(answer), counts)), state


def _call(planner: HostPlanner, topology: Topology, counts: Counts, plan: Plan) -> np.ndarray:
    """Return the plan, its checksum and the error text in UTF-8, concatenated in int32.

    It never raises: if one rank stopped alone, the others would wait for it.
    """
    counts, plan = jax.tree.map(np.asarray, (counts, plan))
    answer, problem = plan, ""
    try:
        answer = _checked(_asked(planner, counts, plan, topology), counts, plan)
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    content = b"".join(leaf.astype(np.int32).tobytes() for leaf in jax.tree.leaves(answer))
    fingerprint = np.uint32(zlib.crc32(content)).tobytes()
    return np.frombuffer(content + fingerprint + problem.encode()[:MOST_BYTES].ljust(MOST_BYTES, b"\0"), np.int32)


def _asked(planner: HostPlanner, counts: Counts, plan: Plan, topology: Topology) -> Any:
    try:
        return planner(counts, plan, topology)
    # SystemExit would end this rank alone, too.
    except BaseException as error:
        # The traceback is not sent to other ranks, so the message names its last line.
        last = traceback.extract_tb(error.__traceback__)[-1]
        where, why = f"{last.filename}, line {last.lineno}", " ".join(str(error).split())
        raise ValueError(f"planner raised {type(error).__name__} in {where}: {why}") from None


def _checked(answer: Any, counts: Counts, plan: Plan) -> Plan:
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


def _agreed(fingerprint: jax.Array, problem: jax.Array, counts: Counts, topology: Topology) -> jax.Array:
    """Return zero, or stop all ranks if one has no plan or a plan differing from the first rank's."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    ranks = tuple(axis for axis in topology.expert_axes if axis in manual)
    rank = jax.lax.axis_index(ranks).astype(jnp.int32) if ranks else jnp.int32(0)
    fingerprint, problem = vary_like((fingerprint, problem), counts, rank)
    of_first = jnp.where(rank == 0, fingerprint, 0)
    of_first = jax.lax.psum(of_first, ranks) if ranks else of_first
    ok = (problem[0] == 0) & (fingerprint == of_first)
    return ensure(ok, partial(_refuse, bool(ranks)), rank, problem, ranks=ranks)


def _refuse(names_rank: bool, rank: np.ndarray, problem: np.ndarray) -> None:
    where = f" on rank {rank}" if names_rank else ""
    text = problem.tobytes().rstrip(b"\0").decode(errors="replace")
    differs = "planner returned a plan differing from rank 0; expected a pure function of its arguments"
    raise ValueError(f"HostCallback{where}: {text or differs}")


def _same_type(answer: np.ndarray, before: np.ndarray) -> np.ndarray:
    if answer.shape != before.shape:
        raise ValueError(f"planner returned an array of shape {answer.shape}; expected {before.shape}, as in the input")
    return np.asarray(answer, before.dtype)

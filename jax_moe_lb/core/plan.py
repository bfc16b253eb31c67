"""Plan of one layer and microbatch: integers assigning tokens to ranks."""

import os
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jax_moe_lb.core.checks import check_array
from jax_moe_lb.core.file_limits import FileLimits
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan_file import ARRAYS, read_arrays, write_arrays
from jax_moe_lb.core.split import Split, kept, nearest_first, rows_of_all
from jax_moe_lb.core.topology import Topology, check_host_counts, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, Load, as_int32, host_iota, iota, namespace, pytree

if TYPE_CHECKING:
    Scalar = Any
    IntScalar = Any
    BoolScalar = Any
else:
    Scalar = Float[AnyArray, ""] | float
    IntScalar = Int[AnyArray, ""] | np.integer
    BoolScalar = Bool[AnyArray, ""] | np.bool_
    """Scalar array in a jitted program, NumPy scalar on the host."""


@pytree
class Plan:
    """Placement and quota of one layer and microbatch, with optional relays and rails.

    Balancers return plans and `moe` executes them. Construct one to test a balancer or to use a fixed plan. All shapes
    are static, so one compilation serves every plan.

    Plans of several layers or steps can be stacked along leading dimensions; `save`, `load` and `jax.vmap` keep these.
    The properties below and the functions of this module take a plan without leading dimensions.

    Args:
        placement: `[R, S]` integers, the expert in each slot; -1 for an empty slot. The first `L` slots of a rank hold
            its home experts; the rank owns their parameters and optimizer state.
        quota: `[E, R]` integers, the token copies of each expert served by each rank (UltraEP's `U`).
        relay: `[R, S]` integers, the source rank of each slot's weights; `None` (default) copies all from home.
        rails: `[R, R, N]` integers, token copies from rank to rank on each rail; `None` (default) uses the rail of the
            receiver.
        domain: `M`, ranks per domain. Slots hold experts of their own block of `M` ranks only.
        split: rule deriving sources and destinations of token copies from the quota; `Split()` by default.

    Examples:
        Rank 1 gets a replica of expert 0 and serves half of its eight copies:

        >>> import numpy as np
        >>> from jax_moe_lb import Plan
        >>> from jax_moe_lb.core import check_plan, load
        >>> counts = np.array([[6, 1], [2, 1]], np.int32)
        >>> placement = np.array([[0, -1], [1, 0]], np.int32)
        >>> quota = np.array([[4, 4], [0, 2]], np.int32)
        >>> plan = Plan(placement, quota, domain=2)
        >>> check_plan(plan, counts)
        >>> load(plan)
        array([4, 6], dtype=int32)
        >>> plan.num_ranks, plan.num_experts, plan.num_home, plan.slots
        (2, 2, 1, 2)
    """

    placement: Int[AnyArray, "*B R S"]
    quota: Int[AnyArray, "*B E R"]
    relay: Int[AnyArray, "*B R S"] | None = None
    rails: Int[AnyArray, "*B R R N"] | None = None
    domain: int = field(default=0, metadata={"static": True})
    split: Split = field(default=Split(), metadata={"static": True})

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group, `R`."""
        return self.placement.shape[0]

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer, `E`."""
        return self.quota.shape[0]

    @property
    def num_home(self) -> int:
        """Number of home experts per rank, `L`."""
        return self.num_experts // self.num_ranks

    @property
    def slots(self) -> int:
        """Number of slots per rank, `S`."""
        return self.placement.shape[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all fields to an .npz file for `load`.

        Call it outside `jax.jit`, to inspect or replay plans later. Plans may be stacked along leading dimensions. The
        file is written under a temporary name and renamed when complete, so no reader sees a partial file.

        Args:
            path: path of the file; an existing file is replaced.

        Raises:
            OSError: the file cannot be written.

        Examples:
            >>> import pathlib, tempfile
            >>> import numpy as np
            >>> from jax_moe_lb import Plan, Topology
            >>> from jax_moe_lb.core import plain_plan
            >>> plan = plain_plan(np.ones((2, 4), np.int32), Topology.flat(2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     plan.save(pathlib.Path(folder) / "plan.npz")
            ...     again = Plan.load(pathlib.Path(folder) / "plan.npz")
            >>> again.quota.tolist() == plan.quota.tolist(), again.domain, again.split == plan.split
            (True, 2, True)
        """
        parts: dict[str, Any] = {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}
        parts |= {"domain": self.domain, "split_tier": self.split.tier, "split_locality": self.split.locality}
        write_arrays(Path(path), parts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], limits: FileLimits = FileLimits()) -> "Plan":
        """Read a file written by `save`.

        It checks dtypes and shapes. `check_plan` checks whether the plan is legal for some counts.

        Args:
            path: path of the file.
            limits: limits of the declared sizes (default: arrays of 512 MiB in all).

        Returns:
            The plan, as NumPy arrays with the saved dimensions.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, too large, or not a plan; the message names the file and the fault.
        """
        arrays = read_arrays(Path(path), limits)
        tier: Any = str(arrays["split_tier"])  # a member of `Tier`, unknown to the type checker
        split = Split(tier, bool(arrays["split_locality"]))
        fields: dict[str, Any] = {name: arrays[name] for name in ARRAYS if name in arrays}
        return cls(**fields, domain=int(arrays["domain"]), split=split)


def plain_plan(counts: Counts, topology: Topology, slots: int | None = None) -> Plan:
    """Return the plan of plain expert parallelism: every expert is served at home.

    Balancers start from it. Pass it to `Balancer.rebalance` when planning with recorded counts, or use it as the
    baseline of a balanced plan.

    Args:
        counts: `[R, E]` integers, the token copies by source rank and expert.
        topology: topology of the `R` ranks; its `ranks_per_domain` becomes the plan's domain.
        slots: `S`, slots per rank: `L` plus the replicas per rank (`System.replica_slots`). The default is `L`, without
            replicas.

    Returns:
        The plan, as NumPy arrays if `counts` is one.

    Raises:
        ValueError: `counts` is not `[R, E]` or negative, `E` is not a multiple of `R`, `slots < L` or `slots > E`.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.core import plain_plan
        >>> counts = np.array([[3, 1, 0, 2], [2, 0, 1, 1]], np.int32)
        >>> plan = plain_plan(counts, Topology.flat(2), slots=3)
        >>> plan.placement
        array([[ 0,  1, -1],
               [ 2,  3, -1]], dtype=int32)
        >>> plan.quota.T
        array([[5, 1, 0, 0],
               [0, 0, 1, 3]], dtype=int32)
    """
    check_array("counts", counts, (...,), jnp.integer)
    if counts.ndim != 2 or counts.shape[0] != topology.num_ranks:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E] with R = {topology.num_ranks}")
    check_host_counts(counts)
    num_ranks, num_experts = counts.shape
    home = home_experts_per_rank(num_experts, num_ranks)
    slots = home if slots is None else slots
    if not home <= slots <= num_experts:
        raise ValueError(f"slots is {slots}; expected {home}, a rank's home experts, to {num_experts}, all experts")
    placement = np.full((num_ranks, slots), -1, np.int32)
    placement[:, :home] = host_iota(num_experts).reshape(num_ranks, home)
    at_home = host_iota(num_experts)[:, None] // home == host_iota(num_ranks)
    xp = namespace(counts)
    quota = xp.where(xp.asarray(at_home), counts.sum(0, dtype=np.int32)[:, None], xp.int32(0))
    # A constant varies over no mesh axis. Loops carry the plan only if all its fields vary like the counts.
    return Plan(vary_like(placement, counts), quota, domain=topology.ranks_per_domain)


def load(plan: Plan) -> Load:
    """Return the token copies served by each rank, `[R]` int32.

    Pass the result to `imbalance` or `straggler` to evaluate a plan.

    Args:
        plan: plan without leading dimensions.

    Returns:
        `[R]` int32.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.core import load, plain_plan
        >>> load(plain_plan(np.array([[3, 1], [2, 0]], np.int32), Topology.flat(2)))
        array([5, 1], dtype=int32)
    """
    # NumPy would widen the sum and JAX would not. The explicit dtype keeps their plans equal.
    return plan.quota.sum(0, dtype=np.int32)


def straggler(load: Load) -> Scalar:
    """Return `max(load) - mean(load)`, FEPLB's token straggler.

    Use it as a measure of time: compute time is proportional to the load, and all other ranks wait for the busiest one.

    Args:
        load: `[R]`, token copies served by each rank.

    Returns:
        Number of token copies, a float; 0 for a balanced load.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.core import straggler
        >>> float(straggler(np.array([5, 1], np.int32)))
        2.0
    """
    load = _as_float(load)
    return load.max() - load.mean()


def imbalance(load: Load) -> Scalar:
    """Return `max(load) / mean(load)` (UltraEP, section 4.3).

    Use it to compare layers of different sizes. It is 1 for a balanced load and `R` if one rank serves all tokens.
    Typical values are 1.3 to 4 without balancing; UltraEP reports 1.01 to 1.04 with its planner.

    Args:
        load: `[R]`, token copies served by each rank.

    Returns:
        A float from 1 to `R`; 1 if the load is 0 on all ranks.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.core import imbalance
        >>> float(imbalance(np.array([6, 2], np.int32)))
        1.5
    """
    load = _as_float(load)
    xp = namespace(load)
    mean = load.mean()
    # The inner `where` avoids a division by zero in the discarded branch, for which NumPy would warn.
    return xp.where(mean > 0, load.max() / xp.where(mean > 0, mean, 1), xp.ones_like(mean))


def replica_copies(plan: Plan, *, from_home: bool = False) -> Bool[np.ndarray, "R R P"]:
    """Return the experts copied from rank (first) to each replica slot (third) of a rank (second), on the host."""
    # From the plan's relay, where -1 stands for none, or always from home, which the gradients return to.
    return _senders(plan, from_home) == np.arange(plan.num_ranks)[:, None, None]


def _senders(plan: Plan, from_home: bool = False) -> Int[AnyArray, "R P"]:
    """Return the rank from which each replica slot is copied; -1 for an empty slot."""
    xp, replicas = namespace(plan.quota), as_int32(plan.placement[:, plan.num_home :])
    senders = replicas // plan.num_home
    if plan.relay is not None and not from_home:
        relay = plan.relay[:, plan.num_home :]
        senders = xp.where(relay >= 0, relay, senders)
    return xp.where(replicas >= 0, senders, -1)


class Traffic(NamedTuple):
    """Rows and replicas moved between ranks by a plan; see `traffic`."""

    rows: IntScalar  # token copies served by another rank than their source, counted once, for dispatch
    replicas: IntScalar  # number of slots holding an expert of another rank
    fan_out: Int[AnyArray, "R"]  # expert-weight copies sent by each rank


def traffic(plan: Plan, counts: Counts) -> Traffic:
    """Count the token copies and expert-weight copies moved between ranks by a plan.

    Use it for the cost of a balanced load: multiply rows by the bytes of a token and replicas by the bytes of an
    expert.

    Args:
        plan: plan legal for `counts`.
        counts: `[R, E]`, the token copies by source rank and expert.

    Returns:
        Moved rows, replicas and fan-out per rank, int32.

    Examples:
        Of 16 copies, rank 0 keeps its six and rank 1 keeps five; one replica of expert 1 is copied:

        >>> import numpy as np
        >>> from jax_moe_lb import Plan
        >>> from jax_moe_lb.core import traffic
        >>> counts = np.array([[4, 2], [2, 8]], np.int32)
        >>> plan = Plan(np.array([[0, 1], [1, -1]], np.int32), np.array([[6, 0], [5, 5]], np.int32), domain=2)
        >>> moved = traffic(plan, counts)
        >>> int(moved.rows), int(moved.replicas), moved.fan_out.tolist()
        (5, 1, [0, 1])
    """
    check_array("counts", counts, (...,), jnp.integer)
    counts = as_int32(counts)
    stay = kept(counts, plan.quota, plan.domain, plan.split).sum(dtype=np.int32)
    fan_out = (_senders(plan)[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32)
    return Traffic(counts.sum(dtype=np.int32) - stay, fan_out.sum(dtype=np.int32), fan_out)


def rows_between(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """Return the token copies sent from rank to rank under the plan's split rule.

    Use it to plot the exchange or to find its busiest pair of ranks.

    Args:
        counts: `[R, E]`, the token copies by source rank and expert.
        plan: plan legal for `counts`.

    Returns:
        `[R, R]` int32, from source (row) to destination (column); the diagonal holds the copies served by the source.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.core import plain_plan, rows_between
        >>> counts = np.array([[3, 1], [2, 0]], np.int32)
        >>> rows_between(counts, plain_plan(counts, Topology.flat(2)))
        array([[3, 1],
               [2, 0]], dtype=int32)
    """
    check_array("counts", counts, (...,), jnp.integer)
    counts = as_int32(counts)
    if isinstance(counts, np.ndarray) and isinstance(plan.quota, np.ndarray):
        return _rows_on_host(counts, plan)

    def row(rank: AnyArray) -> AnyArray:
        return nearest_first(counts, plan.quota, rank, plan.domain, plan.split).sum(0, dtype=np.int32)

    # All rows at once would need [R, E, R]. Eight at a time still fill the vector units.
    return jax.lax.map(row, iota(plan.num_ranks), batch_size=min(plan.num_ranks, 8))


def _rows_on_host(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """Compute `rows_between` in NumPy, with the split rule only for experts served by several ranks."""
    shared = (plan.quota > 0).sum(1) > 1
    rows = np.zeros((plan.num_ranks, plan.num_ranks), np.int32)
    np.add.at(rows.T, plan.quota.argmax(1)[~shared], counts.T[~shared])
    if shared.any():
        rows += rows_of_all(counts[:, shared], plan.quota[shared], plan.domain, plan.split)
    return rows


def _as_float(array: AnyArray) -> AnyArray:
    return array.astype(np.float64 if namespace(array) is np else jnp.float32)

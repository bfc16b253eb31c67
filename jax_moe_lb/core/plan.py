"""A plan says, in integers, which rank serves which tokens of one layer and microbatch."""

import os
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan_file import ARRAYS, read_arrays, write_arrays
from jax_moe_lb.core.split import Split, kept, nearest_first, rows_of_all
from jax_moe_lb.core.topology import Topology, check_total, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, Load, host_iota, iota, namespace, pytree

if TYPE_CHECKING:
    Scalar = Any
    IntScalar = Any
else:
    Scalar = Float[AnyArray, ""] | float
    IntScalar = Int[AnyArray, ""] | np.integer
    """It is an array in a jitted program and a NumPy number on a host."""


@pytree
class Plan:
    """A plan holds all that a balancer decides: placement and quota, and optionally relays and rails.

    Balancers return plans, and `moe` carries them out. Make one yourself to test a balancer, or to hold a fixed plan.
    Its shapes are static, so one compilation serves every plan. Plans of several layers or steps may be stacked along
    leading dimensions, in which `save`, `load` and `jax.vmap` keep them; the properties below, and the functions of
    this module, take a plan without leading dimensions.

    Args:
        placement: `[R, S]` integers, the expert that each slot holds, -1 for an empty slot. The first `L` slots of a
            rank hold its home experts, of which it owns parameters and optimizer state.
        quota: `[E, R]` integers, the token copies of an expert that a rank serves (UltraEP's `U`).
        relay: `[R, S]` integers, the rank from which a slot copies its weights; `None` copies all from home.
        rails: `[R, R, N]` integers, token copies from rank to rank on each rail; `None` takes the destination's own
            rail.
        domain: `M`, ranks of a domain: weights are copied into slots only inside blocks of `M` ranks.
        split: the rule that says which source sends which of its tokens to which rank. It needs the quota alone.

    Examples:
        Rank 1 gets a replica of expert 0 and takes half of its eight copies:

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
        """Counts the ranks of the group, `R`."""
        return self.placement.shape[0]

    @property
    def num_experts(self) -> int:
        """Counts the experts of the layer, `E`."""
        return self.quota.shape[0]

    @property
    def num_home(self) -> int:
        """Counts the home experts of a rank, `L`."""
        return self.num_experts // self.num_ranks

    @property
    def slots(self) -> int:
        """Counts the slots of a rank, `S`."""
        return self.placement.shape[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all fields into an .npz file, which `load` reads.

        Call it outside `jax.jit`, to look at plans later or to replay them. Plans may be stacked along leading
        dimensions. The file appears under its name only when it is complete, so nobody reads half of one.

        Args:
            path: the file; one that exists is replaced.

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
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a file of `save`, as NumPy arrays with the dimensions that were saved.

        It checks dtypes and shapes. Whether the plan is legal for some counts is what `check_plan` says.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged or holds no plan; the message names the file and what is wrong in it.
        """
        arrays = read_arrays(Path(path))
        tier: Any = str(arrays["split_tier"])  # one of the words of `Tier`, which a type checker cannot know
        split = Split(tier, bool(arrays["split_locality"]))
        fields: dict[str, Any] = {name: arrays[name] for name in ARRAYS if name in arrays}
        return cls(**fields, domain=int(arrays["domain"]), split=split)


def plain_plan(counts: Counts, topology: Topology, slots: int | None = None) -> Plan:
    """Makes the plan in which every expert is served at home.

    It is plain expert parallelism. Balancers start from it: give it to `Balancer.rebalance` when you plan for recorded
    counts, or compare a balanced plan with it.

    Args:
        counts: `[R, E]` integers, the token copies that each rank routes to each expert.
        topology: the group of the `R` ranks; its `ranks_per_domain` becomes the plan's domain.
        slots: `S`, slots per rank, usually `L` plus the few replicas that a balancer may make (`System.replica_slots`);
            `L`, which leaves no room for replicas, by default.

    Returns:
        The plan, as NumPy arrays where `counts` is one.

    Raises:
        ValueError: `counts` has another shape, `E` is no multiple of `R`, `slots < L` or `slots > E`.

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
    check_total(counts)
    if counts.ndim != 2 or counts.shape[0] != topology.num_ranks:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E] with R = {topology.num_ranks}")
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
    # A constant varies over no mesh axis; loops may carry the plan only if all of it varies like the counts.
    return Plan(vary_like(placement, counts), quota, domain=topology.ranks_per_domain)


def load(plan: Plan) -> Load:
    """Counts the token copies that each rank serves, `[R]`.

    Give it to `imbalance` or `straggler` to see what a plan is worth.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.core import load, plain_plan
        >>> load(plain_plan(np.array([[3, 1], [2, 0]], np.int32), Topology.flat(2)))
        array([5, 1], dtype=int32)
    """
    # The dtype is said because NumPy would widen the sum where JAX does not, and both must give the same plan.
    return plan.quota.sum(0, dtype=np.int32)


def straggler(load: Load) -> Scalar:
    """Measures by how much the busiest rank is over the mean: `max(load) - mean(load)` (FEPLB's token straggler).

    Use it where time matters: a rank computes in proportion to its copies, so this is what all others wait for.

    Args:
        load: `[R]`, copies that each rank serves.

    Returns:
        Token copies, 0 for a level load.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.core import straggler
        >>> float(straggler(np.array([5, 1], np.int32)))
        2.0
    """
    load = _as_float(load)
    return load.max() - load.mean()


def imbalance(load: Load) -> Scalar:
    """Measures how uneven a load is: `max(load) / mean(load)` (UltraEP, section 4.3).

    Use it to compare layers of different sizes. It is 1 for a level load and `R` if one rank serves everything. Usually
    it is 1.3 to 4 without balancing, and UltraEP reports 1.01 to 1.04 with its planner.

    Args:
        load: `[R]`, copies that each rank serves.

    Returns:
        A number from 1 to `R`; 1 where there is no load.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.core import imbalance
        >>> float(imbalance(np.array([6, 2], np.int32)))
        1.5
    """
    load = _as_float(load)
    xp = namespace(load)
    mean = load.mean()
    # The inner one keeps a division by zero out of the branch that is not taken, where NumPy would warn of it.
    return xp.where(mean > 0, load.max() / xp.where(mean > 0, mean, 1), xp.ones_like(mean))


class Traffic(NamedTuple):
    """Traffic says what a plan moves between ranks; `traffic` counts it.

    Args:
        rows: the token copies that another rank than their own serves, counted once, for dispatch.
        replicas: the slots that hold an expert of another rank.
        fan_out: `[R]`, the copies of expert weights that each rank sends.
    """

    rows: IntScalar
    replicas: IntScalar
    fan_out: Int[AnyArray, "R"]


def traffic(plan: Plan, counts: Counts) -> Traffic:
    """Counts the token copies and the copies of expert weights that cross between ranks under a plan.

    Use it to see what a balanced load costs: multiply rows by the bytes of a token and replicas by those of an expert.

    Args:
        plan: legal for `counts`.
        counts: `[R, E]`, the token copies that each rank routes to each expert.

    Examples:
        Of 16 copies rank 0 keeps its six and rank 1 five; one replica of expert 1 is copied:

        >>> import numpy as np
        >>> from jax_moe_lb import Plan
        >>> from jax_moe_lb.core import traffic
        >>> counts = np.array([[4, 2], [2, 8]], np.int32)
        >>> plan = Plan(np.array([[0, 1], [1, -1]], np.int32), np.array([[6, 0], [5, 5]], np.int32), domain=2)
        >>> moved = traffic(plan, counts)
        >>> int(moved.rows), int(moved.replicas), moved.fan_out.tolist()
        (5, 1, [0, 1])
    """
    xp = namespace(plan.quota)
    stay = kept(counts, plan.quota, plan.domain, plan.split).sum(dtype=np.int32)
    replicas = plan.placement[:, plan.num_home :]
    senders = replicas // plan.num_home
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        senders = xp.where(relay >= 0, relay, senders)
    # An empty slot gets a sender that no rank is, so that the comparison below counts it for nobody.
    senders = xp.where(replicas >= 0, senders, plan.num_ranks)
    fan_out = (senders[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32)
    return Traffic(counts.sum(dtype=np.int32) - stay, fan_out.sum(dtype=np.int32), fan_out)


def rows_between(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """Counts the token copies that go from rank to rank, by the plan's split rule.

    Use it for a picture of the exchange, or to find its busiest pair.

    Args:
        counts: `[R, E]`, the token copies that each rank routes to each expert.
        plan: legal for `counts`.

    Returns:
        `[R, R]`, from the first rank to the second; on the diagonal the copies that stay.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.core import plain_plan, rows_between
        >>> counts = np.array([[3, 1], [2, 0]], np.int32)
        >>> rows_between(counts, plain_plan(counts, Topology.flat(2)))
        array([[3, 1],
               [2, 0]], dtype=int32)
    """
    if isinstance(counts, np.ndarray) and isinstance(plan.quota, np.ndarray):
        return _rows_on_host(counts, plan)

    def row(rank: AnyArray) -> AnyArray:
        return nearest_first(counts, plan.quota, rank, plan.domain, plan.split).sum(0, dtype=np.int32)

    # All rows at once would need [R, E, R]; eight at a time still fill the vector units.
    return jax.lax.map(row, iota(plan.num_ranks), batch_size=min(plan.num_ranks, 8))


def _rows_on_host(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """Asks the rule only for experts that several ranks serve: one that a single rank serves has nothing to split."""
    shared = (plan.quota > 0).sum(1) > 1
    rows = np.zeros((plan.num_ranks, plan.num_ranks), np.int32)
    np.add.at(rows.T, plan.quota.argmax(1)[~shared], counts.T[~shared])
    if shared.any():
        rows += rows_of_all(counts[:, shared], plan.quota[shared], plan.domain, plan.split)
    return rows


def _as_float(array: AnyArray) -> AnyArray:
    return array.astype(np.float64 if namespace(array) is np else jnp.float32)

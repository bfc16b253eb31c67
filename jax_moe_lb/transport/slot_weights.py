"""Weights of a rank's slots as operands of products, and the gradients: sums over rounds, and the way home.

All rounds share them: those of copies (`rounds.py`), of lists (`once_rounds.py`) and of two phases.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Carry, DType, GroupSizes, ReceivedRows, Rows, wide_dtype
from jax_moe_lb.kernels.grouped_ffn import (
    AnyExperts,
    ExpertParts,
    Products,
    fused_inner_products,
    fuses,
    grouped_ffn,
    grouped_ffn_gradients,
    grouped_ffn_with_products,
    takes_parts,
)
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups
from jax_moe_lb.transport.exchange import DispatchOptions
from jax_moe_lb.transport.one_round import RowWeights, SumsT
from jax_moe_lb.transport.replicate import Replicate, joined


class Slots(NamedTuple):
    """Weights of a rank's slots, in two parts."""

    home: Experts  # the `L` home experts
    replicas: Experts | None  # the `S - L` replicas; `None` without replica slots
    # Whether a slot has an expert, so that its gradients are read; `None` (default) if all have.
    is_read: Bool[Array, "S"] | None = None

    @classmethod
    @jax.named_scope("replicate")
    def of(
        cls,
        experts: Experts,
        plan: Plan,
        replicate: Replicate,
        topology: Topology,
        saved: Experts | None = None,
    ) -> "Slots":
        """Fill the slots of a plan, unless their replicas are saved; see `Replicate`."""
        # Without replica slots, skip the exchange on all ranks.
        if plan.slots == plan.num_home:
            return cls(experts, None)
        replicas = replicate.join(replicate.start(experts, plan, topology), ()) if saved is None else saved
        return cls(experts, replicas, plan.placement[jax.lax.axis_index(topology.expert_axes)] >= 0)

    @property
    def parts(self) -> ExpertParts:
        """Home experts and, if there are any, replicas."""
        return (self.home,) if self.replicas is None else (self.home, self.replicas)

    def adds_chunks(self, rows: jax.ShapeDtypeStruct) -> bool:
        """Return whether kernels add the gradients of experts to those of the chunk before, in place."""
        return fuses(rows, self.parts) if traced_platform() == "tpu" else traced_platform() != "gpu"

    @property
    def are_joined(self) -> bool:
        """Whether products read home experts and replicas from one array, a copy."""
        return self.replicas is not None and not takes_parts((self.home, self.replicas))

    def weights(self, group_sizes: Array) -> AnyExperts:
        """Return the weights of all slots, for a product of rows with these group sizes."""
        if self.replicas is None:
            return self.home
        if not self.are_joined:
            return self.home, self.replicas
        # Build the array in each round and free it after the product: built before the loop of further rounds, the
        # arrays of all weights would stay in memory.
        return joined(*optimization_barrier(group_sizes, (self.home, self.replicas)))

    def again(self, after: Array) -> AnyExperts:
        """Return the same weights, built after `after` is computed."""
        home, replicas = optimization_barrier(after, (self.home, self.replicas))
        return Slots(home, replicas).weights(after)

    @jax.named_scope("experts")
    def ffn(self, rows: ReceivedRows, group_sizes: GroupSizes, keeps_products: bool) -> tuple[Rows, Products]:
        """Return the outputs of rows, and the products if they are saved."""
        at = self.weights(group_sizes)
        if keeps_products:
            return grouped_ffn_with_products(rows, at, group_sizes)
        return grouped_ffn(rows, at, group_sizes), ()

    @jax.named_scope("experts")
    def inner_products(self, rows: ReceivedRows, group_sizes: GroupSizes) -> Products | None:
        """Return the products of rows before the activation on TPUs, for exchanges that follow them; else `None`."""
        return (
            fused_inner_products(rows, self.weights(group_sizes), group_sizes) if traced_platform() == "tpu" else None
        )

    @jax.named_scope("experts")
    def pull_back(
        self,
        batch: BackwardRows,
        group_sizes: GroupSizes,
        sums: AnyExperts | None,
        exchange: DispatchOptions,
        of_chunks: AnyExperts | None = None,
        *,
        is_last: bool = True,
    ) -> tuple[Rows, RowWeights, AnyExperts]:
        """Compute the gradients of the rows of a chunk, of the weights, and of the experts of all slots."""
        # Those of experts are added to the ones of earlier chunks of the round, and after the last chunk to `sums`, the
        # ones of earlier rounds.
        dtype = dtype_of_sums(self.home, exchange, is_first=sums is None)
        fused = self.fuse_gate_up(batch.rows, has_products=batch.products is not None)
        # Kernels of accelerators do not add to sums over rounds, which are wider than gradients.
        adds_after = _is_accelerator()
        before = sums if of_chunks is None and not adds_after else of_chunks
        of_rows, of_weights, of_slots = self.gradients(batch, group_sizes, dtype, before, fused=fused)
        if sums is not None and adds_after and is_last:
            of_slots = added(sums, of_slots)
        return of_rows, of_weights, of_slots

    def fuse_gate_up(self, rows: ReceivedRows, *, has_products: bool = False) -> bool:
        """Return whether a backward round fuses the gate into `up`: on accelerators, if it reduces memory traffic."""
        # The forward pass does not, because both forms at once would raise peak memory.
        if self.home.gate is None or self.home.has_adapters or not _is_accelerator():
            return False
        # Their kernels read rows once for both, and write one gradient of rows.
        if fuses(rows, self.parts):
            return False
        copied = jax.tree.leaves([(part.up, part.gate) for part in self.parts])
        copied_bytes = 0 if self.are_joined else 2 * sum(leaf.nbytes for leaf in copied)
        # Unfused, the rows are read once more for the forward products and once more for the weight gradients. Both
        # terms of the row gradient are written and read, and their sum is written. Saved products need no forward
        # products.
        return copied_bytes <= (4 if has_products else 5) * rows.nbytes

    def gradients(
        self,
        batch: BackwardRows,
        group_sizes: GroupSizes,
        sums_dtype: DType,
        sums: AnyExperts | None = None,
        *,
        fused: bool,
    ) -> tuple[Rows, RowWeights, AnyExperts]:
        """Compute `grouped_ffn_gradients` with these weights, with the gate in `up` if `fused`."""
        # On GPUs the last products use rematerialized weights. On TPUs this would increase memory traffic.

        def in_form(experts: AnyExperts) -> AnyExperts:
            return jax.tree.map(Experts.fused, experts, is_leaf=_are_experts) if fused else experts

        def of_last_products(after: Array) -> AnyExperts:
            return in_form(self.again(after))

        at, last = in_form(self.weights(group_sizes)), of_last_products if traced_platform() == "gpu" else None
        return grouped_ffn_gradients(batch, at, RowGroups(group_sizes, self.is_read), sums_dtype, sums, last)

    def gradients_at_home(self, of_slots: AnyExperts, plan: Plan, replicate: Replicate, topology: Topology) -> Experts:
        """Return the gradients of the home experts, after those of replicas came home."""
        of_home, of_replicas = apart_by_home(of_slots, plan.num_home)
        return at_home(self.home, of_home, None if self.replicas is None else of_replicas, plan, replicate, topology)


def at_home(
    experts: Experts,
    of_home: Experts,
    of_replicas: Experts | None,
    plan: Plan,
    replicate: Replicate,
    topology: Topology,
) -> Experts:
    """Add the gradients of replicas to those of the home experts, in the form and dtypes of the experts."""
    if of_replicas is not None:
        of_replicas = jax.tree.map(lambda g: g.astype(experts.up.dtype), of_replicas)
        with jax.named_scope("replicate"):
            of_home = replicate.add_at_home(of_home, of_replicas, plan, topology)
    of_home = in_form_of(experts, of_home)
    return jax.tree.map(lambda g, w: g[: plan.num_home].astype(w.dtype), of_home, experts.trained)


def optimization_barrier(other: Array, tree: Carry) -> Carry:
    """Add an optimization barrier so that XLA does not hoist these arrays out of the loop."""
    return jax.lax.optimization_barrier((other, tree))[1]


def apart_by_home(of_slots: AnyExperts, num_home: int) -> tuple[Experts, Experts | None]:
    """Split gradients by slot into those of home experts, with possible extra rows, and those of replicas."""
    if isinstance(of_slots, tuple):
        return of_slots[0], of_slots[1]
    return of_slots, jax.tree.map(lambda g: g[num_home:], of_slots)


def _are_experts(node: object) -> bool:
    return isinstance(node, Experts)


def traced_platform() -> Literal["cpu", "tpu", "gpu"] | None:
    """Return the platform of the mesh; `None` for an abstract mesh without devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    if device.device_kind.startswith("cpu"):
        return "cpu"
    return "tpu" if device.device_kind.startswith("TPU") else "gpu"


def _is_accelerator() -> bool:
    return traced_platform() in ("gpu", "tpu")


def in_form_of(experts: Experts, sums: Experts) -> Experts:
    """Convert expert gradients to the form of `experts`, with the gate beside `up` or in it."""
    return sums if experts.is_fused or experts.has_adapters else sums.apart()


def dtype_of_sums(experts: Experts, exchange: DispatchOptions, *, is_first: bool) -> DType:
    """Return the dtype of the expert gradients of a round, or of the sums with those of earlier rounds."""
    # The gradients of a single round, and of the first one before a loop, have the dtype of the parameters: usually the
    # loop does not run, and its first step converts them. So have gradients that are added to sums after the products.
    if not is_first and _is_accelerator():
        return experts.up.dtype
    # On CPUs the gradients of a chunk are added to those of earlier ones.
    has_chunks = exchange.buffers.chunks > 1 and not _is_accelerator()
    has_sums = exchange.buffers.max_rounds not in (1, None) or not is_first or has_chunks
    return wide_dtype(experts.up) if has_sums else experts.up.dtype


BFLOAT16 = jnp.finfo(jnp.bfloat16)
"""Widths of the exponent and the mantissa."""


class Halves(NamedTuple):
    """Sum over rounds in two bfloat16 arrays: its value in bfloat16, and the rest."""

    # Together they have 16 binary digits. `high` is the result, in its own memory, so the sum takes half of the memory
    # of a float32 array.
    high: Array
    low: Array

    def plus(self, part: Array) -> "Halves":
        """Return the sum with the gradients of another round."""
        high, low, part = (one.astype(jnp.float32) for one in (*self, part))
        total = high + (low + part)
        # Not two conversions, which XLA may remove: the rest would be 0.
        high = jax.lax.reduce_precision(total, BFLOAT16.nexp, BFLOAT16.nmant)
        return Halves(high.astype(jnp.bfloat16), (total - high).astype(jnp.bfloat16))


def widened(sums: SumsT) -> SumsT:
    """Convert gradients of experts to sums over rounds: in float32 or wider, on accelerators in `Halves`."""
    # A bfloat16 sum would lose small addends.
    in_halves = _is_accelerator()

    def wide(leaf: Array) -> Halves | Array:
        if in_halves and leaf.dtype == jnp.bfloat16:
            return Halves(leaf, vary_like(jnp.zeros_like(leaf), leaf))
        return leaf.astype(wide_dtype(leaf))

    return jax.tree.map(wide, sums)


def added(sums: SumsT, of_round: PyTree) -> SumsT:
    """Add the gradients of a round to `widened` sums."""

    def add(total: Halves | Array, part: Array) -> Halves | Array:
        return total.plus(part) if isinstance(total, Halves) else total + part.astype(total.dtype)

    return _map_sums(add, sums, of_round)


def narrowed(sums: SumsT, like: PyTree) -> SumsT:
    """Convert `widened` sums to the dtypes of other gradients."""

    def narrow(total: Halves | Array, like: Array) -> Array:
        return total.high if isinstance(total, Halves) else total.astype(like.dtype)

    return _map_sums(narrow, sums, like)


def _map_sums(function: Callable[[Any, Any], Any], sums: SumsT, others: PyTree) -> SumsT:
    return jax.tree.map(function, sums, others, is_leaf=lambda node: isinstance(node, Halves))

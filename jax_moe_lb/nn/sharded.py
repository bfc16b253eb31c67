"""These functions run `moe` and the gather of expert domains over the arrays of all ranks, compiled."""

import functools
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.experts import Experts
from jax_moe_lb.faults import Checks
from jax_moe_lb.losses import Losses
from jax_moe_lb.pipeline import Stats, moe
from jax_moe_lb.routing import Router
from jax_moe_lb.systems import System
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.migrate import Migrate
from jax_moe_lb.transport.shards import Shards
from jax_moe_lb.types import State


def expert_axes(topology: Topology, migrate: Migrate | None) -> tuple[str, ...]:
    """Tells over which mesh axes home experts are sharded."""
    return topology.expert_axes if migrate is None else migrate.domains.expert_axes


# Compiled once for all layers of a kind, also where the caller does not jit.
@functools.partial(
    jax.jit,
    inline=True,
    static_argnames=(
        "router",
        "system",
        "migrate",
        "topology",
        "mesh",
        "shards",
        "losses",
        "sequence_length",
        "checks",
        "fused",
    ),
)
def sharded_moe(
    tokens: Float[Array, "C H"],
    mask: Bool[Array, "C"] | None,
    kernel: Float[Array, "H E"],
    experts: Experts,
    kernel_bias: Float[Array, "E"] | None,
    bias: Float[Array, "E"] | None,
    homes: Int[Array, "E"] | None,
    state: State,
    known: Experts | None,
    *,
    router: Router,
    system: System,
    migrate: Migrate | None,
    topology: Topology,
    mesh: Mesh,
    shards: Shards,
    losses: Losses,
    sequence_length: int | None,
    checks: Checks,
    fused: bool,
) -> tuple[Float[Array, "C H"], Stats, State, Experts | None]:
    """Runs `moe` over the tokens of all ranks; statistics and state have one entry per group."""
    by_expert = PartitionSpec(expert_axes(topology, migrate))
    # Data axes stand outermost: tokens of one group lie side by side.
    by_token = PartitionSpec(topology.data_axes + topology.expert_axes)
    by_group = PartitionSpec(topology.data_axes) if topology.data_axes else PartitionSpec(None)

    def one_rank(
        tokens: Array,
        mask: Array | None,
        kernel: Array,
        experts: Experts,
        kernel_bias: Array | None,
        bias: Array | None,
        homes: Array | None,
        state: State,
        known: Experts | None,
    ) -> tuple[Array, Stats, State, Experts | None]:
        # A balancer knows nothing of other groups: inside, its state has no dimension for them.
        state = jax.tree.map(lambda leaf: leaf[0], state)
        experts = shards(experts)
        if migrate is not None and known is not None:
            experts, known = migrate.update(experts, known)
        elif migrate is not None:
            experts = migrate(experts)
        y, stats, state = moe(
            tokens,
            kernel,
            experts.fused() if fused else experts,
            router,
            system,
            topology,
            state=state,
            kernel_bias=kernel_bias,
            bias=bias,
            homes=homes,
            mask=mask,
            losses=losses,
            sequence_length=sequence_length,
            checks=checks,
        )
        return y, *jax.tree.map(lambda leaf: leaf[None], (stats, state)), known

    whole = PartitionSpec()
    by_shard = shards.specs(experts, expert_axes(topology, migrate), topology.tensor_axes)
    specs = (by_token, by_token, whole, by_shard, whole, whole, whole, by_group, by_expert)
    # Some axes may be manual already, such as the stages of a pipeline. Over those that are neither the group's nor the
    # data's all devices do the same: no compiler divides custom calls.
    around = jax.sharding.get_abstract_mesh().manual_axes
    if taken := sorted(set(around) & set(expert_axes(topology, migrate) + topology.data_axes)):
        raise ValueError(f"topology has the axes {taken}, which are manual already; expected others: see `data_axes`")
    args = (tokens, mask, kernel, experts, kernel_bias, bias, homes, state, known)
    placed = [_place_by(arg, spec, mesh) for arg, spec in zip(args, specs, strict=True)]
    return jax.shard_map(
        one_rank,
        mesh=None if around else mesh,
        in_specs=specs,
        out_specs=(by_token, by_group, by_group, by_expert),
        axis_names=set(mesh.axis_names) - set(around),
    )(*placed)


@functools.partial(jax.jit, inline=True, static_argnames=("migrate", "mesh"))
def sharded_known(experts: Experts, *, migrate: Migrate, mesh: Mesh) -> Experts:
    """Runs `migrate.known` on all ranks."""
    spec = PartitionSpec(migrate.domains.expert_axes)
    placed = place(experts, NamedSharding(mesh, spec), mesh)
    return jax.shard_map(migrate.known, mesh=mesh, in_specs=spec, out_specs=spec)(placed)


def _place_by(tree: Any, specs: Any, mesh: Mesh) -> Any:
    if isinstance(specs, PartitionSpec):
        return place(tree, NamedSharding(mesh, specs), mesh)
    return jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(mesh, spec), mesh), tree, specs)


def place(tree: Any, sharding: jax.sharding.Sharding, mesh: Mesh) -> Any:
    """Reshards a tree where the mesh has Explicit axes; where they are Auto, the compiler does."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

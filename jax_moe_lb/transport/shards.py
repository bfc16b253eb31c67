"""Experts whose matrices are split over further mesh axes, and gathered for their layer."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_moe_lb.experts import LOGICAL_AXES, Experts

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Shards:
    """Gathers the matrices of home experts over data axes: fully sharded data parallelism (FSDP) of experts.

    Use it where parameters, gradients and optimizer state of the home experts are too large for a rank, and there are
    data axes to split them over. `nn.MoE` makes one from its `rules`; give it to `scan_prefetched` in a program of your
    own, so that a layer's experts travel during the layer before. Its transpose is a reduce-scatter, so that no rank
    holds whole gradients of more than one layer.

    Args:
        embed_axes: the mesh axes over which `H` is split, outermost first, such as `("fsdp",)`, which is usual.
        mlp_axes: those over which `F` is split to be gathered; not the `tensor_axes` of a topology, whose shards are
            multiplied as they are.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from jax_moe_lb import Experts, Shards
        >>> mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> shards, experts = Shards(embed_axes=("fsdp",)), Experts(jnp.ones((1, 4, 6)), jnp.ones((1, 6, 4)))
        >>> specs = shards.specs(experts)
        >>> tuple(specs.up)
        (None, 'fsdp', None)
        >>> sizes = lambda experts: jnp.asarray([[experts.up.size, shards(experts).up.size]])
        >>> print(jax.shard_map(sizes, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("fsdp"))(experts))
        [[12 24]
         [12 24]]
    """

    embed_axes: Axes = ()
    mlp_axes: Axes = ()

    def __call__(self, experts: Experts, packed: None = None) -> Experts:
        """Returns the experts with whole matrices; call it inside `jax.shard_map`.

        Args:
            experts: the home experts of this rank, split over these axes.
            packed: `None`; it is there because `scan_prefetched` gives one to what travels encoded.
        """
        del packed

        def gather(path: Any, leaf: Array) -> Array:
            for dimension, axes in enumerate(self._gathered(path), start=1):
                leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True) if axes else leaf
            return leaf

        return jax.tree.map_with_path(gather, experts)

    def specs(self, experts: Experts, expert_axes: Axes = (), tensor_axes: Axes = ()) -> Experts:
        """Returns how each kind of weights is placed, a `PartitionSpec` for each.

        Args:
            experts: experts of this kind, or their shapes.
            expert_axes: the mesh axes over which experts are split.
            tensor_axes: those over which `F` is split and stays so, inside of `mlp_axes`.
        """
        axes = {"embed": self.embed_axes, "mlp": self.mlp_axes + tensor_axes}
        return jax.tree.map_with_path(
            lambda path, _: PartitionSpec(expert_axes, *(axes[name] for name in LOGICAL_AXES[path[0].name])), experts
        )

    def _gathered(self, path: Any) -> tuple[Axes, ...]:
        axes = {"embed": self.embed_axes, "mlp": self.mlp_axes}
        return tuple(axes[name] for name in LOGICAL_AXES[path[0].name])

"""Fully sharded experts: matrices split over further mesh axes, gathered for the layer.

`scan_prefetched` scans over layers and gathers the experts per layer during the previous one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.experts import LOGICAL_AXES, Experts
from jax_moe_lb.core.types import Axes, Carry
from jax_moe_lb.transport.expert_domains import GatherExpertDomain, Packed


@dataclass(frozen=True)
@checked_fields
class FsdpExperts:
    """Gather of the matrices of home experts over data axes: fully sharded data parallelism (FSDP) of experts.

    Use it if parameters, gradients and optimizer state of the home experts exceed the memory of a rank, and data axes
    exist. `nn.MoE` creates one from its `rules`. In a custom program, pass it to `scan_prefetched`, to overlap the
    gather with the previous layer. Its transpose is a reduce-scatter, so no rank stores whole gradients of more than
    one layer.

    Args:
        embed_axes: mesh axes that shard `H`, outermost first, usually `("fsdp",)`; `()` (default) for none.
        mlp_axes: mesh axes that shard `F` and are gathered; `()` (default) for none. Exclude the `tensor_axes` of the
            topology: products use their shards directly.
        exp_axes: mesh axes that shard the `L` home experts of a rank; `()` (default) for none. If they divide `L`, they
            cost least: gathered experts follow each other, without a transpose.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from jax_moe_lb import Experts
        >>> from jax_moe_lb.transport import FsdpExperts
        >>> mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> shards, experts = FsdpExperts(embed_axes=("fsdp",)), Experts(jnp.ones((1, 4, 6)), jnp.ones((1, 6, 4)))
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
    exp_axes: Axes = ()

    def __call__(self, experts: Experts, packed: None = None, residual: None = None) -> Experts:
        """Return the experts with whole matrices; call it inside `jax.shard_map`.

        Args:
            experts: home experts of this rank, sharded over these axes.
            packed: `None`, for compatibility with `GatherExpertDomain` in `scan_prefetched`.
            residual: `None`, as `packed`.
        """
        del packed, residual

        def gather(path: KeyPath, leaf: Array) -> Array:
            for dimension, axes in enumerate((self.exp_axes, *self._axes_of_matrix(path))):
                leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True) if axes else leaf
            return leaf

        return jax.tree.map_with_path(gather, experts)

    def specs(self, experts: Experts, expert_axes: Axes = (), tensor_axes: Axes = ()) -> Experts:
        """Return the `PartitionSpec` per weight array.

        Args:
            experts: experts of this kind, or the shapes.
            expert_axes: mesh axes that shard the experts; `()` (default) for none.
            tensor_axes: mesh axes that shard `F` and are not gathered, inside `mlp_axes`; `()` (default) for none.

        Returns:
            `Experts` with a `PartitionSpec` in place of each array.
        """
        first = expert_axes + self.exp_axes
        return jax.tree.map_with_path(
            lambda path, _: PartitionSpec(first, *self._axes_of_matrix(path, tensor_axes)), experts
        )

    def _axes_of_matrix(self, path: KeyPath, tensor_axes: Axes = ()) -> tuple[Axes, ...]:
        axes = {"embed": self.embed_axes, "mlp": self.mlp_axes + tensor_axes, None: ()}
        return tuple(axes[name] for name in LOGICAL_AXES[path[0].name])


GatherArguments = tuple[Experts, Packed | None, Experts | None]
"""Arguments of `GatherExpertDomain`: home experts, encoded experts and residual."""

LayerFunction = Callable[[Carry, Any, Experts], tuple[Carry, Any]]
"""Function of a layer, `(x, layer, held) -> (x, out)`, with the experts of the expert domain as `held`."""


def scan_prefetched(
    block: LayerFunction,
    x: Carry,
    layers: PyTree,
    experts: Experts,
    migrate: GatherExpertDomain | FsdpExperts,
    packed: Packed | None = None,
    residual: Experts | None = None,
    *,
    gather_again: bool = False,
) -> tuple[Carry, Any]:
    """Run `jax.lax.scan` over layers and gather each layer's experts during the previous layer.

    Use it for a stack of equal layers with `GatherExpertDomain` or `FsdpExperts`, inside `jax.shard_map`. The gather of
    a layer is in the loop body of the previous one and does not depend on its results. A backend with asynchronous
    collectives overlaps it with that layer's attention and experts. Only the gather of the first layer, before the
    loop, is exposed. The gathered experts of two layers are in memory at a time.

    Args:
        block: function of a layer, `(x, layer, held) -> (x, out)`.
        x: input of the first layer.
        layers: parameters of the layers except experts, a pytree stacked over layers, `[N, ...]`.
        experts: home experts stacked over layers, `[N, L, ...]`.
        migrate: gather of the experts.
        packed: return value of `migrate.pack`, stacked over layers; `None` (default) encodes in the loop.
        residual: entries of gradients not sent, stacked over layers; `None` (default) if `migrate` needs none. See
            `GatherExpertDomain`.
        gather_again: if True, the residuals of a layer are its inputs only. The backward pass then gathers the experts
            again and recomputes the layer. False (default) saves the gathered experts of all layers.

    Returns:
        Output of the last layer, and `out` of all layers, stacked.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from jax_moe_lb import Experts, Topology
        >>> from jax_moe_lb.transport import ExpertDomains, GatherExpertDomain, hybrid_mesh, scan_prefetched
        >>> devices = jax.make_mesh((2,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> mesh = hybrid_mesh(devices, {"gpu": 2})  # one expert domain of two ranks
        >>> domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices, "gpu"))
        >>> experts = Experts(up=jnp.arange(6.0).reshape(3, 2, 1, 1), down=jnp.zeros((3, 2, 1, 1)))  # 3 layers of 2
        >>> def block(x, scale, held):  # a real one calls `moe(x, ..., held, ..., domains.between)`
        ...     return x + scale * held.up.sum(), None
        >>> def run(x, scales, experts):
        ...     return scan_prefetched(block, x, scales, experts, GatherExpertDomain(domains))[0]
        >>> layers, ranks = PartitionSpec(None, domains.expert_axes), PartitionSpec(domains.expert_axes)
        >>> run = jax.shard_map(run, mesh=mesh, in_specs=(ranks, PartitionSpec(), layers), out_specs=ranks)
        >>> print(run(jnp.zeros(2), jnp.ones(3), experts))  # both ranks see all experts of all layers
        [15. 15.]
    """

    def part(tree: PyTree, at: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[at], tree)

    def run(x: Carry, layer: PyTree, source: GatherArguments, held: Experts) -> tuple[Carry, Any]:
        return _forgetful(block, migrate, x, layer, *source, held) if gather_again else block(x, layer, held)

    def step(carry: tuple[Carry, Experts], now: tuple) -> tuple[tuple, Any]:
        x, held = carry
        layer, source, following = now
        # Before the layer, and from loop inputs only: the gather then has no dependency on the layer.
        prefetched = migrate(*following)
        x, out = run(x, layer, source, held)
        return (x, prefetched), out

    sources: GatherArguments = (experts, packed, residual)
    first, most, rest = part(sources, 0), slice(-1), slice(1, None)
    along = (*part((layers, sources), most), part(sources, rest))
    (x, held), outs = jax.lax.scan(step, (x, migrate(*first)), along)
    layer, source = part((layers, sources), -1)
    # The last layer runs after the loop, because it has no next layer to gather for.
    x, last = run(x, layer, source, held)
    return x, jax.tree.map(lambda out, end: jnp.concatenate([out, end[None]]), outs, last)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forgetful(
    block: LayerFunction,
    migrate: GatherExpertDomain | FsdpExperts,
    x: Carry,
    layer: PyTree,
    home: Experts,
    sent: Packed | None,
    residual: Experts | None,
    held: Experts,
) -> tuple[Carry, Any]:
    """Call `block`; its backward pass gathers `held` again from `home`."""
    del home, sent, residual, migrate
    return block(x, layer, held)


def _keep_home(
    block: LayerFunction, migrate: GatherExpertDomain | FsdpExperts, *args: Any
) -> tuple[tuple[Carry, Any], tuple]:
    return _forgetful(block, migrate, *args), args[:5]


def _through_home(
    block: LayerFunction, migrate: GatherExpertDomain | FsdpExperts, saved: tuple, upstream: tuple
) -> tuple:
    x, layer, home, sent, residual = saved
    # Without the barrier, XLA merges this gather with the equal one of the forward pass and keeps its result.
    home, sent, upstream = jax.lax.optimization_barrier((home, sent, upstream))

    def again(x: Carry, layer: PyTree, home: Experts, residual: PyTree) -> tuple[Carry, Any]:
        return block(x, layer, migrate(home, sent, residual))

    *gradients, left = jax.vjp(again, x, layer, home, residual)[1](upstream)
    return *gradients, None, left, None


_forgetful.defvjp(_keep_home, _through_home)

"""Fully sharded experts: matrices split over further mesh axes, gathered for their layer.

`scan_prefetched` runs layers in a loop and gathers the experts of each layer during the layer before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_moe_lb.core.types import Axes, Carry
from jax_moe_lb.kernels.experts import LOGICAL_AXES, Experts
from jax_moe_lb.transport.expert_domains import GatherExpertDomain, Packed


@dataclass(frozen=True)
class FsdpExperts:
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


LayerFunction = Callable[[Carry, Any, Experts], tuple[Carry, Any]]
"""A layer: `(x, layer, held) -> (x, out)`, where `held` are the expert domain's experts, for `moe`."""


def scan_prefetched(
    block: LayerFunction,
    x: Carry,
    layers: Any,
    experts: Experts,
    migrate: GatherExpertDomain | FsdpExperts,
    packed: Packed | None = None,
    *,
    gather_again: bool = False,
) -> tuple[Carry, Any]:
    """Runs `jax.lax.scan` over layers, and gathers each layer's experts during the layer before.

    Use it for a stack of equal layers with `GatherExpertDomain` or `FsdpExperts`, inside `jax.shard_map`. The gather of
    a layer stands in the loop body of the one before and depends on nothing that is computed there: a backend whose
    collectives are asynchronous runs it beside that layer's attention and experts. Only the first layer's gather,
    before the loop, has nothing to hide under. Two layers' gathered experts are held at a time.

    Args:
        block: a layer, `(x, layer, held) -> (x, out)`.
        x: what goes into the first layer.
        layers: the parameters of the layers other than experts, a pytree stacked over layers, `[N, ...]`.
        experts: home experts, stacked over layers: `[N, L, ...]`.
        migrate: how experts travel.
        packed: what `migrate.pack` returned, stacked over layers; `None`, the default, packs on the way.
        gather_again: whether to keep for the backward pass what goes into a layer and nothing else, so that it gathers
            the experts again and computes the layer again. `False`, the default, keeps all layers' gathered experts;
            `True` saves that memory.

    Returns:
        What comes out of the last layer, and `out` of all layers, stacked.

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

    def part(tree: Any, at: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[at], tree)

    def run(x: Carry, layer: Any, home: Experts, sent: Packed | None, held: Experts) -> tuple[Carry, Any]:
        return _forgetful(block, migrate, x, layer, home, sent, held) if gather_again else block(x, layer, held)

    def step(carry: tuple[Carry, Experts], now: tuple) -> tuple[tuple, Any]:
        x, held = carry
        layer, home, sent, following = now
        # Before the layer is run, and out of the operands of the loop alone: so nothing in the program makes the gather
        # wait for the layer.
        prefetched = migrate(*following)
        x, out = run(x, layer, home, sent, held)
        return (x, prefetched), out

    first, most, rest = part((experts, packed), 0), slice(-1), slice(1, None)
    along = (*part((layers, experts, packed), most), part((experts, packed), rest))
    (x, held), outs = jax.lax.scan(step, (x, migrate(*first)), along)
    layer, home, sent = part((layers, experts, packed), -1)
    # The last layer has no layer after it to gather for, and so is not in the loop.
    x, last = run(x, layer, home, sent, held)
    return x, jax.tree.map(lambda out, end: jnp.concatenate([out, end[None]]), outs, last)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forgetful(
    block: LayerFunction,
    migrate: GatherExpertDomain | FsdpExperts,
    x: Carry,
    layer: Any,
    home: Experts,
    sent: Packed | None,
    held: Experts,
) -> tuple[Carry, Any]:
    """`block`, whose backward pass has `held` gathered again from `home`."""
    del home, sent, migrate
    return block(x, layer, held)


def _keep_home(
    block: LayerFunction, migrate: GatherExpertDomain | FsdpExperts, *args: Any
) -> tuple[tuple[Carry, Any], tuple]:
    return _forgetful(block, migrate, *args), args[:4]


def _through_home(
    block: LayerFunction, migrate: GatherExpertDomain | FsdpExperts, saved: tuple, upstream: tuple
) -> tuple:
    x, layer, home, sent = saved
    # Or XLA sees that the forward pass gathered the same, and keeps that.
    home, sent, upstream = jax.lax.optimization_barrier((home, sent, upstream))
    pull_back = jax.vjp(lambda x, layer, home: block(x, layer, migrate(home, sent)), x, layer, home)[1]
    return *pull_back(upstream), None, None


_forgetful.defvjp(_keep_home, _through_home)

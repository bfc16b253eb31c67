"""Layers in a loop, with each one's experts on their way during the layer before."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_moe_lb.experts import Experts
from jax_moe_lb.transport.migrate import Migrate, Packed
from jax_moe_lb.transport.shards import Shards

Carry = TypeVar("Carry")

Block = Callable[[Carry, Any, Experts], tuple[Carry, Any]]
"""A layer: `(x, layer, held) -> (x, out)`, where `held` are the expert domain's experts, for `moe`."""


def scan_prefetched(
    block: Block,
    x: Carry,
    layers: Any,
    experts: Experts,
    migrate: Migrate | Shards,
    packed: Packed | None = None,
    *,
    gather_again: bool = False,
) -> tuple[Carry, Any]:
    """Runs `jax.lax.scan` over layers, and gathers each layer's experts during the layer before.

    Use it for a stack of equal layers with `Migrate` or `Shards`, inside `jax.shard_map`. The gather of a layer stands
    in the loop body of the one before and depends on nothing that is computed there: a backend whose collectives are
    asynchronous runs it beside that layer's attention and experts. Only the first layer's gather, before the loop, has
    nothing to hide under. Two layers' gathered experts are held at a time.

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
        >>> from jax_moe_lb import ExpertDomains, Experts, Migrate, Topology, hybrid_mesh, scan_prefetched
        >>> devices = jax.make_mesh((2,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> mesh = hybrid_mesh(devices, {"gpu": 2})  # one expert domain of two ranks
        >>> domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices, "gpu"))
        >>> experts = Experts(up=jnp.arange(6.0).reshape(3, 2, 1, 1), down=jnp.zeros((3, 2, 1, 1)))  # 3 layers of 2
        >>> def block(x, scale, held):  # a real one calls `moe(x, ..., held, ..., domains.between)`
        ...     return x + scale * held.up.sum(), None
        >>> def run(x, scales, experts):
        ...     return scan_prefetched(block, x, scales, experts, Migrate(domains))[0]
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
    block: Block, migrate: Migrate | Shards, x: Carry, layer: Any, home: Experts, sent: Packed | None, held: Experts
) -> tuple[Carry, Any]:
    """`block`, whose backward pass has `held` gathered again from `home`."""
    del home, sent, migrate
    return block(x, layer, held)


def _keep_home(block: Block, migrate: Migrate | Shards, *args: Any) -> tuple[tuple[Carry, Any], tuple]:
    return _forgetful(block, migrate, *args), args[:4]


def _through_home(block: Block, migrate: Migrate | Shards, saved: tuple, upstream: tuple) -> tuple:
    x, layer, home, sent = saved
    # Or XLA sees that the forward pass gathered the same, and keeps that.
    home, sent, upstream = jax.lax.optimization_barrier((home, sent, upstream))
    pull_back = jax.vjp(lambda x, layer, home: block(x, layer, migrate(home, sent)), x, layer, home)[1]
    return *pull_back(upstream), None, None


_forgetful.defvjp(_keep_home, _through_home)

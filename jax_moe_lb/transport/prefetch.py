"""Layers in a loop, each one's experts on their way during the layer before."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_moe_lb.experts import Experts
from jax_moe_lb.transport.migrate import Migrate, Packed

Carry = TypeVar("Carry")

Block = Callable[[Carry, Any, Experts], tuple[Carry, Any]]
"""`(x, layer, held) -> (x, out)`, `held` being the domain's experts, for `pipeline.moe`."""


def scan_prefetched(
    block: Block,
    x: Carry,
    layers: Any,
    experts: Experts,
    migrate: Migrate,
    packed: Packed | None = None,
    *,
    gather_again: bool = False,
) -> tuple[Carry, Any]:
    """`jax.lax.scan` over layers, each layer's experts gathered during the layer before.

    The gather of a layer stands in the loop body of the one before and depends on nothing that is computed there: a
    backend whose collectives are asynchronous runs it beside that layer's attention and experts. Only the first
    layer's gather, before the loop, has nothing to hide under. Two layers' experts of a domain are held at a time.

    Args:
        block: a layer.
        x: what goes into the first layer.
        layers: the other parameters, stacked over layers.
        experts: home experts, stacked over layers: `[N, L, ...]`.
        migrate: how they travel.
        packed: of `migrate.pack`, stacked; `None`: done on the way.
        gather_again: keep for the backward pass what goes into a layer and nothing else: it gathers the experts
            again and computes the layer again. Else all layers' gathered experts are kept.

    Returns:
        What comes out of the last layer, and `out` of all layers, stacked.
    """

    def part(tree: Any, at: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[at], tree)

    def run(x: Carry, layer: Any, home: Experts, sent: Packed | None, held: Experts) -> tuple[Carry, Any]:
        return _forgetful(block, migrate, x, layer, home, sent, held) if gather_again else block(x, layer, held)

    def step(carry: tuple[Carry, Experts], now: tuple) -> tuple[tuple, Any]:
        x, held = carry
        layer, home, sent, following = now
        prefetched = migrate(*following)
        x, out = run(x, layer, home, sent, held)
        return (x, prefetched), out

    first, most, rest = part((experts, packed), 0), slice(-1), slice(1, None)
    along = (*part((layers, experts, packed), most), part((experts, packed), rest))
    (x, held), outs = jax.lax.scan(step, (x, migrate(*first)), along)
    layer, home, sent = part((layers, experts, packed), -1)
    x, last = run(x, layer, home, sent, held)
    return x, jax.tree.map(lambda out, end: jnp.concatenate([out, end[None]]), outs, last)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forgetful(
    block: Block, migrate: Migrate, x: Carry, layer: Any, home: Experts, sent: Packed | None, held: Experts
) -> tuple[Carry, Any]:
    """`block`, whose backward pass has `held` gathered again from `home`."""
    del home, sent, migrate
    return block(x, layer, held)


def _keep_home(block: Block, migrate: Migrate, *args: Any) -> tuple[tuple[Carry, Any], tuple]:
    return _forgetful(block, migrate, *args), args[:4]


def _through_home(block: Block, migrate: Migrate, saved: tuple, upstream: tuple) -> tuple:
    x, layer, home, sent = saved
    # Or XLA sees that the forward pass gathered the same, and keeps that.
    home, sent, upstream = jax.lax.optimization_barrier((home, sent, upstream))
    pull_back = jax.vjp(lambda x, layer, home: block(x, layer, migrate(home, sent)), x, layer, home)[1]
    return *pull_back(upstream), None, None


_forgetful.defvjp(_keep_home, _through_home)

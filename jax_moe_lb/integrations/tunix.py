"""Tunix: `tunix.models.qwen3.model.MoELayer`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.integrations.blocks import Adapter, refuse, serve, topology_of


@functools.cache
def _balanced(original: type) -> type:
    class MoELayer(original):
        def __call__(self, x: jax.Array, use_megablox: bool = True) -> jax.Array:
            del use_megablox
            scores = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
            weights, experts_of_tokens = jax.lax.top_k(scores, self.experts_per_tok)
            weights = (weights / weights.sum(-1, keepdims=True)).astype(self.dtype)
            experts = Experts(up=self.up_proj[...], down=self.down_proj[...], gate=self.gate_proj[...])
            return serve(self, x.astype(self.dtype), experts_of_tokens, weights, experts)

    return MoELayer


def _check(block: Any, path: str) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        value = getattr(block, name)
        # Qwix replaces quantized weights by arrays of values and scales.
        if not isinstance(value.get_value(), (jax.Array, jax.ShapeDtypeStruct)):
            refuse(path, name, type(value.get_value()).__name__, "an array that is not quantized")
        if not jnp.issubdtype(value.get_value().dtype, jnp.floating):
            refuse(path, f"{name}.dtype", value.get_value().dtype, "a floating dtype")


def _topology(block: Any, mesh: Mesh, path: str) -> Topology:
    axes, _, inner = block.shd_config.exp_weight_edf
    if axes is None:
        raise ValueError(
            f"{path}.shd_config.exp_weight_edf[0] is None; expected a mesh axis. "
            "Pass topology=Topology.from_mesh(mesh, ...)."
        )
    return topology_of(mesh, axes, inner, path)


ADAPTER = Adapter(_balanced, _check, _topology, lambda block: block.num_experts)
"""Adapter of Tunix 0.1.7."""

"""Parameters that lie split over the data axis, and are gathered where a product needs them."""

from typing import Any

import jax
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Topology
from jax_moe_lb.nn import logical_axis_rules

DATA = "data"
"""The axis of the mesh over which parameters are split."""


def expert_rules(topology: Topology) -> tuple[tuple[str, Any], ...]:
    """Makes the `rules` of `nn.MoE`: the widths of experts are split over the data axis."""
    return tuple((name, DATA if name == "embed" else axes) for name, axes in logical_axis_rules(topology))


def linear_options(mesh: Mesh) -> dict[str, Any]:
    """Makes options of `nnx.Linear`: its kernel is split by rows."""
    return {"kernel_metadata": {"out_sharding": (DATA, None), "mesh": mesh}, "promote_dtype": _Gathering(mesh, 1)}


def embed_options(mesh: Mesh) -> dict[str, Any]:
    """Makes options of `nnx.Embed`: its table is split by channels."""
    return {"embedding_metadata": {"out_sharding": (None, DATA), "mesh": mesh}, "promote_dtype": _Gathering(mesh, 0)}


class _Gathering:
    """Casts the arrays of a layer as Flax does, and then gathers one of them: what travels is narrow."""

    def __init__(self, mesh: Mesh, which: int) -> None:
        self.mesh, self.which = mesh, which

    def __call__(self, arrays: tuple[Array | None, ...], **how: Any) -> tuple[Array | None, ...]:
        cast: list[Any] = list(promote_dtype(arrays, **how))
        whole = NamedSharding(self.mesh, PartitionSpec())
        cast[self.which] = jax.lax.with_sharding_constraint(cast[self.which], whole)
        return tuple(cast)

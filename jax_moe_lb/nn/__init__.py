"""Flax modules with the parameters of a layer; `jax_moe_lb.moe` is the same without Flax."""

from jax_moe_lb.nn.moe import MoE, as_linen, logical_axis_rules
from jax_moe_lb.nn.relocation import expert_bytes, mesh_independent_state, relocate, restore_mesh_independent_state
from jax_moe_lb.nn.sharding import SharedMix

__all__ = [
    "restore_mesh_independent_state",
    "as_linen",
    "expert_bytes",
    "logical_axis_rules",
    "MoE",
    "mesh_independent_state",
    "relocate",
    "SharedMix",
]


def __dir__() -> list[str]:
    return __all__

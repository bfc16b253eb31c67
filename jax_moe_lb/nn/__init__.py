"""Flax modules of the mixture-of-experts layer; `jax_moe_lb.moe` is the functional form."""

from jax_moe_lb.nn.config import ExpertConfig, Precision, SharedExpert, SharedMix
from jax_moe_lb.nn.linen import as_linen
from jax_moe_lb.nn.moe import MoE
from jax_moe_lb.nn.relocation import (
    expert_bytes,
    mesh_independent_state,
    relocate,
    restore_mesh_independent_state,
    restore_target,
)
from jax_moe_lb.nn.sharding import logical_axis_rules
from jax_moe_lb.nn.variables import GradientResidual, keep_residuals

__all__ = [
    "as_linen",
    "expert_bytes",
    "ExpertConfig",
    "GradientResidual",
    "keep_residuals",
    "logical_axis_rules",
    "MoE",
    "mesh_independent_state",
    "Precision",
    "relocate",
    "restore_mesh_independent_state",
    "restore_target",
    "SharedExpert",
    "SharedMix",
]


def __dir__() -> list[str]:
    return __all__

"""Flax modules of the mixture-of-experts layer; `jax_moe_lb.moe` is the functional form."""

from lazy_loader import attach_stub

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

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)

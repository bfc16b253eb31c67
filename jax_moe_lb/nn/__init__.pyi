"""Flax modules of the mixture-of-experts layer; `jax_moe_lb.moe` is the functional form."""

from .config import ExpertConfig as ExpertConfig
from .config import Precision as Precision
from .config import SharedExpert as SharedExpert
from .config import SharedMix as SharedMix
from .linen import as_linen as as_linen
from .moe import MoE as MoE
from .relocation import expert_bytes as expert_bytes
from .relocation import mesh_independent_state as mesh_independent_state
from .relocation import relocate as relocate
from .relocation import restore_mesh_independent_state as restore_mesh_independent_state
from .relocation import restore_target as restore_target
from .sharding import logical_axis_rules as logical_axis_rules
from .variables import GradientResidual as GradientResidual
from .variables import keep_residuals as keep_residuals

"""These Flax modules hold the parameters of a layer; `jax_moe_lb.moe` is the same without Flax."""

from jax_moe_lb.nn.moe import MoE as MoE
from jax_moe_lb.nn.moe import as_linen as as_linen
from jax_moe_lb.nn.moe import logical_axis_rules as logical_axis_rules
from jax_moe_lb.nn.portable import adopt as adopt
from jax_moe_lb.nn.portable import portable as portable
from jax_moe_lb.nn.relocation import expert_bytes as expert_bytes
from jax_moe_lb.nn.relocation import relocate as relocate
from jax_moe_lb.nn.shared import SharedMix as SharedMix

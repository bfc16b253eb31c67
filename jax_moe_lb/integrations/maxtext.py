"""MaxText: `maxtext.layers.moe.RoutedMoE`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import DType
from jax_moe_lb.integrations.blocks import Adapter, refuse, serve, topology_of
from jax_moe_lb.routing.routers import NO_EXPERT

TENSOR_AXES = ("tensor", "tensor_sequence")
"""Mesh axes over which MaxText shards the inner width of experts."""

Outputs = tuple[jax.Array, jax.Array | None, jax.Array | None]


@dataclass(frozen=True)
class FfnActivation:
    """Activation of a block: MaxText's own method, on the attributes that it reads."""

    original: Any  # class of the block
    activation_fn: Callable[[jax.Array], jax.Array]  # function of the gate
    dtype: DType  # dtype of the block
    decoder_block: str  # decoder of the configuration, which selects the form
    limit: float  # bound of the products; none if it is not positive
    config: Any = field(compare=False)  # the configuration, which the other fields represent in comparisons

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return the input of the down projection."""
        return self.original.apply_ffn_activation(self, gate, up)


@functools.cache
def _balanced(original: type) -> type:
    # `__call__` of MaxText prepares weights and logits, and calls one of these two.
    class RoutedMoE(original):
        def dense_matmul(self, *args: Any, **kwargs: Any) -> Outputs:
            return _matmul(self, original, False, *args, **kwargs)

        def sparse_matmul(self, *args: Any, **kwargs: Any) -> Outputs:
            # Programs may read the overflow of MaxText's buffers: nothing overflows.
            self.sow(nnx.Intermediate, "moe_has_overflow", jnp.zeros((), jnp.bool_))
            return _matmul(self, original, True, *args, **kwargs)

    return RoutedMoE


def _matmul(
    block: Any,
    original: Any,
    is_sparse: bool,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    w0_kernel: jax.Array,
    w1_kernel: jax.Array,
    wo_kernel: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
) -> Outputs:
    config = block.config
    weights, ids = block.get_topk(
        gate_logits, pre_bias_logits, block.rngs, input_ids=input_ids, forced_routed_experts=forced_routed_experts
    )
    loss = _load_balance_loss(block, is_sparse, gate_logits, pre_bias_logits, ids)
    updates = _bias_updates(block, ids)
    if forced_routed_experts is not None:
        ids = jnp.where((ids >= 0) & (ids < block.num_experts), ids, NO_EXPERT)
    if config.decoder_block.value == "llama4":
        # Llama 4 scales the inputs of its one expert, not the outputs.
        scores = jax.nn.sigmoid(weights.astype(jnp.float32))
        inputs, weights = inputs * scores.astype(inputs.dtype), jnp.ones_like(weights)
    activation = FfnActivation(
        original,
        block.activation_fn,
        jnp.dtype(block.dtype),
        config.decoder_block.value,
        config.mlp_activations_limit,
        config,
    )
    experts = Experts(w1_kernel, wo_kernel, w0_kernel, activation, w1_bias, wo_bias, w0_bias)
    return serve(block, inputs, ids, weights, experts).astype(block.dtype), loss, updates


def _load_balance_loss(
    block: Any, is_sparse: bool, gate_logits: jax.Array, pre_bias_logits: jax.Array | None, ids: jax.Array
) -> jax.Array | None:
    from maxtext.layers import moe

    config = block.config
    if config.load_balance_loss_weight <= 0 or block.is_hash_routing:
        return None
    if not is_sparse and config.model_call_mode == "inference":
        return None
    before_bias = gate_logits if pre_bias_logits is None else pre_bias_logits
    if moe.uses_megatron_seq_aux_loss(config):
        return block.megatron_seq_aux_loss(before_bias)
    # MaxText's dense form takes the logits with the bias, its sparse form those without.
    logits = before_bias if is_sparse else gate_logits
    return block.load_balance_loss(ids, jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(block.dtype))


def _bias_updates(block: Any, ids: jax.Array) -> jax.Array | None:
    from maxtext.layers import moe

    config = block.config
    if not block.should_update_load_balance():
        return None
    if getattr(config, "gradient_accumulation_steps", 1) > 1:
        return moe.calculate_expert_counts(ids, config.num_experts)
    return moe.calculate_load_balance_updates(ids, config.num_experts, config.routed_bias_update_rate)


def _check(block: Any, path: str) -> None:
    config = block.config
    for name in ("quant", "weight_quant", "quant_einsums", "wi_0_sparsity_module"):
        value = getattr(block, name, None)
        if value is not None:
            refuse(path, name, type(value).__name__, "None")
    if block.num_experts_per_tok > 1 and config.decoder_block.value == "llama4":
        refuse(path, "num_experts_per_tok", block.num_experts_per_tok, "1 for decoder_block llama4")
    for name in ("capacity_factor", "ragged_buffer_factor"):
        if (value := getattr(config, name, -1.0)) > 0:
            refuse(path, f"config.{name}", value, "-1, as a balanced block drops no tokens")
    for name in ("te_moe_block", "defer_small_all_reduces", "log_required_ragged_buffer_factor"):
        if value := getattr(config, name, False):
            refuse(path, f"config.{name}", value, "False")
    if config.attention in ("vllm_rpa", "vllm_batched_rpa"):
        refuse(path, "config.attention", config.attention, "another than those of vLLM")
    if str(getattr(config.shard_mode, "value", config.shard_mode)) != "auto":
        refuse(path, "config.shard_mode", config.shard_mode, "auto")


def _topology(block: Any, mesh: Mesh, path: str) -> Topology:
    for axis in ("stage", "diloco"):
        if mesh.shape.get(axis, 1) > 1:
            raise ValueError(f"mesh has {mesh.shape[axis]} devices on the axis {axis}; expected 1, for {path}")
    if mesh != block.mesh:
        raise ValueError(f"mesh is {dict(mesh.shape)}; expected {path}.mesh, {dict(block.mesh.shape)}")
    return topology_of(mesh, block._expert_parallelism_name, TENSOR_AXES, path)


ADAPTER = Adapter(_balanced, _check, _topology, lambda block: block.num_experts)
"""Adapter of MaxText 0.2.5."""

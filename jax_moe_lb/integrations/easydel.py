"""EasyDeL: subclasses of `easydel.layers.moe.BaseMoeModule`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.integrations.blocks import Adapter, refuse, serve, topology_of

UNSUPPORTED_HOOKS = ("refine_inputs_hook", "scale_replicated_inputs")
"""Hooks on rows after dispatch, which have no equivalent; the fused block of EasyDeL calls no others after routing."""


@dataclass(frozen=True)
class Gated:
    """Activation `act_fn(gate) * up`."""

    act_fn: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return the input of the down projection."""
        return self.act_fn(gate) * up


@functools.cache
def _balanced(original: type) -> type:
    class BaseMoeModule(original):
        def _sparse_moe_call(
            self,
            hidden_state: jax.Array,
            gate_layer: Any,
            wi_kernel: jax.Array,
            wu_kernel: jax.Array,
            wd_kernel: jax.Array,
            wi_bias: jax.Array | None = None,
            wu_bias: jax.Array | None = None,
            wd_bias: jax.Array | None = None,
            ffn_activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
            gate_hidden_state: jax.Array | None = None,
            hooks: Any = None,
            *,
            act_fn: Callable[[jax.Array], jax.Array],
        ) -> tuple[jax.Array, jax.Array]:
            hooks = self.moe_hooks if hooks is None else hooks
            hidden_state = hidden_state.astype(self.dtype)
            gate_input = hidden_state if gate_hidden_state is None else gate_hidden_state.astype(self.dtype)
            logits, weights, ids = _route(self, gate_input, gate_layer, hooks)
            shape = (*hidden_state.shape[:-1], self.num_experts_per_tok)
            activation = Gated(act_fn) if ffn_activation is None else ffn_activation
            experts = Experts(wu_kernel, wd_kernel, wi_kernel, activation, wu_bias, wd_bias, wi_bias)
            y = serve(self, hidden_state, ids.reshape(shape), weights.reshape(shape), experts)
            return y, logits

    return BaseMoeModule


def _route(block: Any, x: jax.Array, gate_layer: Any, hooks: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return logits, weights and experts per token, by the steps of EasyDeL's `_sparse_moe_call`."""
    from easydel.layers.moe._communication_utils import get_experts_location

    def applied(name: str, value: jax.Array) -> jax.Array:
        hook = getattr(hooks, name, None)
        return value if hook is None else hook(value)

    logits = applied("after_gate", gate_layer(applied("before_gate", x).reshape(-1, x.shape[-1])))
    if getattr(hooks, "normalize_gate_logits", None) is not None:
        scores = hooks.normalize_gate_logits(logits)
    else:
        scores = jax.nn.softmax(logits.astype("f4"), axis=-1).astype(logits.dtype)
    weights, ids = get_experts_location(
        gate_logits=applied("before_topk", scores),
        pre_bias_logits=None,
        select_hook=getattr(hooks, "select_hook", None),
        refine_weights_hook=getattr(hooks, "refine_weights_hook", None),
        num_experts_per_tok=block.num_experts_per_tok,
    )
    return logits, applied("output_weights_hook", weights), ids


def _check(block: Any, path: str) -> None:
    method = block.module_moe_method
    if getattr(method, "value", method) != "fused_moe":
        refuse(path, "module_moe_method", getattr(method, "value", method), "fused_moe")
    for name in UNSUPPORTED_HOOKS:
        if (hook := getattr(block.moe_hooks, name, None)) is not None:
            refuse(path, f"moe_hooks.{name}", hook, "None")
    if block.config.use_expert_tensor_mode:
        refuse(path, "config.use_expert_tensor_mode", True, "False")


def _topology(block: Any, mesh: Mesh, path: str) -> Topology:
    return topology_of(mesh, "ep", "tp", path)


ADAPTER = Adapter(_balanced, _check, _topology, lambda block: block.n_routed_experts)
"""Adapter of EasyDeL 0.3.0."""

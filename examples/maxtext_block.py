"""MoE block with the parameters and the signature of MaxText's `RoutedMoE`, balanced by this library.

It calls `moe` in its own `shard_map`. Use it in place of MaxText's block: checkpoints load unchanged, since names and
shapes are the same (`gate.kernel`, `wi_0`, `wi_1`, `wo`, and biases with `routed_bias` and `mlp_bias`). MaxText itself
is not imported. The signature follows version 0.2.5; `python -m tests.maxtext_block` compares the two.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_moe_lb import Experts, MoEParams, TopK, Topology, exact, moe, use_virtual_cpu_devices
from jax_moe_lb.kernels import ClampedSwiGLU

BATCH_AXES = ("data", "fsdp", "fsdp_transpose")
"""Axes of MaxText's mesh that split tokens, besides the expert axis. Devices along other axes compute the same."""

INTO, OUT = ("exp", "embed_moe", "mlp_moe"), ("exp", "mlp_moe", "embed_moe")
"""MaxText's logical axes of experts. Axes sharded besides "exp" are gathered before the layer, as in MaxText."""

SOFTMAX_OF_CHOSEN = ("mixtral", "qwen3_moe", "gpt_oss")
"""Decoders with expert weights from a softmax over the chosen logits; other decoders of MaxText differ."""


class Gate(nnx.Module):
    """Router kernel and optional bias, under MaxText's names."""

    def __init__(self, kernel: jax.Array, axes: tuple[str | None, ...], has_bias: bool) -> None:
        self.kernel = nnx.Param(kernel, out_sharding=axes)
        self.bias = nnx.Param(jnp.zeros(kernel.shape[1], kernel.dtype), out_sharding=axes[1:]) if has_bias else None


class RoutedMoE(nnx.Module):
    """Replacement of MaxText's block with the same arguments and outputs."""

    def __init__(
        self,
        config: Any,
        num_experts: int,
        num_experts_per_tok: int,
        mesh: Mesh,
        kernel_init: Any,
        kernel_axes: tuple[str | None, ...],
        rngs: nnx.Rngs,
        intermediate_dim: int = 2048,
        weight_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
        quant: Any = None,
        is_hash_routing: bool = False,
        force_dropless: bool = False,
        weight_quant: Any = None,
    ) -> None:
        for name, given in (("quant", quant), ("is_hash_routing", is_hash_routing), ("weight_quant", weight_quant)):
            if given:
                raise ValueError(f"{name} is {given!r}; expected none, as this block does not support it")
        decoder = config.decoder_block.value
        if decoder not in SOFTMAX_OF_CHOSEN:
            raise ValueError(f"decoder_block is {decoder}; expected one of {', '.join(SOFTMAX_OF_CHOSEN)}")
        del force_dropless  # The block is always dropless.
        self.mesh, self.dtype, self.has_bias = mesh, dtype, config.mlp_bias
        data_axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
        self.topology = Topology.from_mesh(mesh, "expert", data_axes=data_axes)
        # A softmax over the chosen logits equals the renormalised softmax over all logits.
        self.router, self.system = TopK(num_experts_per_tok), exact()
        self.activation = ClampedSwiGLU(config.mlp_activations_limit) if decoder == "gpt_oss" else None
        width, inner = config.emb_dim, intermediate_dim

        def kernel(*shape: int) -> jax.Array:
            return kernel_init(rngs.params(), shape, weight_dtype, (0,), (1,))

        def bias(axis: str, size: int) -> nnx.Param:
            return nnx.Param(jnp.zeros((num_experts, size), weight_dtype), out_sharding=("exp", axis))

        # Follow MaxText's order, so that the same key gives the same weights, and its logical axes.
        self.gate = Gate(kernel(width, num_experts), kernel_axes, config.routed_bias)
        self.wi_0, self.wi_1 = (nnx.Param(kernel(num_experts, width, inner), out_sharding=INTO) for _ in range(2))
        self.wo = nnx.Param(kernel(num_experts, inner, width), out_sharding=OUT)
        if self.has_bias:
            self.wi_0_bias, self.wi_1_bias = (bias("activation_mlp", inner) for _ in range(2))
            self.wo_bias = bias("activation_embed", width)

    def __call__(
        self,
        inputs: jax.Array,
        input_ids: Any = None,
        gate_inputs: Any = None,
        out_sharding: Any = None,
        forced_routed_experts: Any = None,
    ) -> tuple[jax.Array, None, None]:
        """Return the outputs, and `None` for the loss and the bias updates, which a balanced plan does not need."""
        if gate_inputs is not None or forced_routed_experts is not None:
            raise ValueError(
                "gate_inputs or forced_routed_experts is given; expected None: `moe` routes what it is given"
            )
        del input_ids  # Used by hash routing only.
        x = inputs.astype(self.dtype)
        biases = (self.wi_1_bias[...], self.wo_bias[...], self.wi_0_bias[...]) if self.has_bias else ()
        experts = Experts(self.wi_1[...], self.wo[...], self.wi_0[...], self.activation, *biases)
        experts = jax.tree.map(lambda w: w.astype(self.dtype), experts)
        tokens, ranks = PartitionSpec((*self.topology.data_axes, "expert")), PartitionSpec("expert")

        gate = self.gate.kernel[...], None if self.gate.bias is None else self.gate.bias[...]

        def one_rank(x: jax.Array, gate: tuple[jax.Array, jax.Array | None], experts: Experts) -> jax.Array:
            return moe(x, MoEParams(gate[0], experts, logit_bias=gate[1]), self.router, self.system, self.topology)[0]

        run = jax.shard_map(one_rank, mesh=self.mesh, in_specs=(tokens, PartitionSpec(), ranks), out_specs=tokens)
        y = run(x.reshape(-1, x.shape[-1]), gate, experts).reshape(inputs.shape)
        return y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding), None, None


def dense(block: RoutedMoE, inputs: jax.Array) -> jax.Array:
    """Compute the outputs with every expert for every token, as MaxText does without sparse products."""
    top, chosen = jax.lax.top_k(inputs @ block.gate.kernel[...], block.router.num_experts_per_tok)
    weights = jnp.zeros((*inputs.shape[:-1], block.wi_0.shape[0]))
    weights = jnp.put_along_axis(weights, chosen, jax.nn.softmax(top, -1), axis=-1, inplace=False)
    hidden = jax.nn.silu(jnp.einsum("bsm,emh->bseh", inputs, block.wi_0[...]))
    hidden = hidden * jnp.einsum("bsm,emh->bseh", inputs, block.wi_1[...])
    return jnp.einsum("bseh,ehm,bse->bsm", hidden, block.wo[...], weights)


def main() -> None:
    """Print the parameters, and the differences of outputs and gradients from the dense form."""
    use_virtual_cpu_devices(8)
    mesh = jax.make_mesh((2, 4, 1), ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    decoder = SimpleNamespace(value="mixtral")
    config = SimpleNamespace(
        emb_dim=32, mlp_bias=False, routed_bias=False, decoder_block=decoder, mlp_activations_limit=7.0
    )

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any, in_axis: int, out_axis: int) -> jax.Array:
        return jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis, out_axis)(key, shape, dtype)

    with jax.set_mesh(mesh), nnx.logical_axis_rules([("exp", "expert"), *((axis, None) for axis in INTO[1:])]):
        block = RoutedMoE(config, 8, 2, mesh, init, (None, None), nnx.Rngs(0), intermediate_dim=64)
    for path, leaf in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        print(".".join(map(str, path)), leaf.shape)
    x = jax.random.normal(jax.random.key(1), (4, 16, 32))

    def loss(block: RoutedMoE, x: jax.Array, is_dense: bool) -> jax.Array:
        return jnp.square(dense(block, x) if is_dense else block(x)[0]).mean()

    step = nnx.jit(nnx.grad(loss), static_argnums=2)
    ours, theirs = (nnx.to_pure_dict(step(block, x, is_dense)) for is_dense in (False, True))
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), ours, theirs)
    y = nnx.jit(lambda block, x: block(x)[0])(block, x)
    print(f"outputs differ by {float(jnp.abs(y - dense(block, x)).max()):.0e}")
    print(f"gradients differ by {max(jax.tree.leaves(difference)):.0e} of the largest")


if __name__ == "__main__":
    main()

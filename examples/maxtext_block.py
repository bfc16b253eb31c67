"""A block with the parameters and the signature of MaxText's `RoutedMoE`, balanced by this library.

It calls `moe` in a `shard_map` of its own. Put it where MaxText builds its block: checkpoints load as they are, since
names and shapes are the same (`gate.kernel`, `wi_0`, `wi_1`, `wo`, and biases with `mlp_bias`). MaxText itself is not
imported; the signature is that of its `layers/moe.py` in 2025.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_moe_lb import ClampedSwiGLU, Experts, TopK, Topology, exact, moe, use_virtual_cpu_devices

BATCH_AXES = ("data", "fsdp", "fsdp_transpose")
"""Axes of MaxText's mesh that split tokens beside the experts'. Over others all devices do the same."""


class Gate(nnx.Module):
    """Holds the router's kernel under the name that MaxText gives it."""

    def __init__(self, kernel: jax.Array) -> None:
        self.kernel = nnx.Param(kernel)


class RoutedMoE(nnx.Module):
    """Takes what MaxText's block takes, and returns the same outputs."""

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
    ) -> None:
        if quant is not None:
            raise ValueError(f"quant is {quant!r}; expected None: weights are not quantized here")
        del kernel_axes
        self.mesh, self.dtype, self.has_bias = mesh, dtype, config.mlp_bias
        data_axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
        self.topology = Topology.from_mesh(mesh, "expert", data_axes=data_axes)
        # A softmax over the chosen logits is a softmax over all of them, divided by the sum of the chosen.
        self.router, self.system = TopK(num_experts_per_tok), exact()
        self.activation = ClampedSwiGLU(config.mlp_activations_limit) if config.decoder_block == "gpt_oss" else None
        into, out = (num_experts, config.emb_dim, intermediate_dim), (num_experts, intermediate_dim, config.emb_dim)

        def kernel(shape: tuple[int, ...]) -> jax.Array:
            return kernel_init(rngs.params(), shape, weight_dtype, -2, -1)

        self.gate = Gate(kernel((config.emb_dim, num_experts)))
        self.wi_0, self.wi_1, self.wo = (nnx.Param(kernel(shape)) for shape in (into, into, out))
        if self.has_bias:
            self.wi_0_bias = nnx.Param(jnp.zeros((num_experts, intermediate_dim), weight_dtype))
            self.wi_1_bias = nnx.Param(jnp.zeros((num_experts, intermediate_dim), weight_dtype))
            self.wo_bias = nnx.Param(jnp.zeros((num_experts, config.emb_dim), weight_dtype))

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, None]:
        """Returns the outputs, and `None` for the loss that a balanced plan has no need of."""
        x = inputs.astype(self.dtype)
        biases = (self.wi_1_bias[...], self.wo_bias[...], self.wi_0_bias[...]) if self.has_bias else ()
        experts = Experts(self.wi_1[...], self.wo[...], self.wi_0[...], self.activation, *biases)
        experts = jax.tree.map(lambda w: w.astype(self.dtype), experts)
        tokens, ranks = PartitionSpec((*self.topology.data_axes, "expert")), PartitionSpec("expert")

        def one_rank(x: jax.Array, kernel: jax.Array, experts: Experts) -> jax.Array:
            return moe(x, kernel, experts, self.router, self.system, self.topology)[0]

        run = jax.shard_map(one_rank, mesh=self.mesh, in_specs=(tokens, PartitionSpec(), ranks), out_specs=tokens)
        return run(x.reshape(-1, x.shape[-1]), self.gate.kernel[...], experts).reshape(inputs.shape), None


def dense(block: RoutedMoE, inputs: jax.Array) -> jax.Array:
    """The same by every expert for every token, which is MaxText's form without sparse products."""
    top, chosen = jax.lax.top_k(inputs @ block.gate.kernel[...], block.router.num_experts_per_tok)
    weights = jnp.zeros((*inputs.shape[:-1], block.wi_0.shape[0]))
    weights = jnp.put_along_axis(weights, chosen, jax.nn.softmax(top, -1), axis=-1, inplace=False)
    hidden = jax.nn.silu(jnp.einsum("bsm,emh->bseh", inputs, block.wi_0[...]))
    hidden = hidden * jnp.einsum("bsm,emh->bseh", inputs, block.wi_1[...])
    return jnp.einsum("bseh,ehm,bse->bsm", hidden, block.wo[...], weights)


def main() -> None:
    """Prints the parameters, and how far outputs and gradients are from those of the dense form."""
    use_virtual_cpu_devices(8)
    mesh = jax.make_mesh((2, 4, 1), ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    config = SimpleNamespace(emb_dim=32, mlp_bias=False, decoder_block="mixtral", mlp_activations_limit=7.0)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any, in_axis: int, out_axis: int) -> jax.Array:
        return jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis, out_axis)(key, shape, dtype)

    block = RoutedMoE(config, 8, 2, mesh, init, ("embed", None), nnx.Rngs(0), intermediate_dim=64)
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

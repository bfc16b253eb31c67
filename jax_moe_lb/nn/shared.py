"""The expert that every token passes, and how its output meets that of the others."""

from enum import Enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.grouped_ffn import dense_ffn

States = Float[Array, "*B H"]


class SharedMix(Enum):
    """Says how the outputs of the shared expert and of a token's other experts become one.

    Examples:
        >>> from jax_moe_lb.nn import SharedMix
        >>> [mix.num_logits for mix in SharedMix]
        [0, 1, 2]
    """

    SUM = 0
    """Adds both: DeepSeek-V3, GLM-4.5, Llama 4. It is usual."""
    SIGMOID = 1
    """Weighs the shared one by a sigmoid of a learned product with the token: Qwen2-MoE and Qwen3-Next."""
    SOFTMAX = 2
    """Weighs both by a softmax of two learned products: the dense residual branch of DeepSpeed-MoE (arXiv 2201.05596,
    section 4.1.1)."""

    @property
    def num_logits(self) -> int:
        """Counts the learned products of a token: the columns of the kernel."""
        return self.value

    def __call__(self, x: States, routed: States, shared: Experts, kernel: Float[Array, "H _"] | None) -> States:
        """Returns the output of the layer.

        Args:
            x: `[..., H]`, the tokens.
            routed: `[..., H]`, the outputs of their other experts.
            shared: the shared expert, in the dtype of `x`.
            kernel: `[H, num_logits]`; `None` for `SUM`.
        """
        y = dense_ffn(x, shared)
        if kernel is None:
            return routed + y
        # In float32 like the router's logits, and rounded once.
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
        if self is SharedMix.SIGMOID:
            return routed + jax.nn.sigmoid(logits).astype(x.dtype) * y
        weights = jax.nn.softmax(logits, -1).astype(x.dtype)
        return weights[..., :1] * routed + weights[..., 1:] * y

"""Options of `nn.MoE` by group: experts, shared expert and precision."""

from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.core.checks import accepts, check_integer, checked_dtype, checked_fields, shown
from jax_moe_lb.core.experts import Activation, Experts, dense_ffn
from jax_moe_lb.core.types import DType, wide_dtype
from jax_moe_lb.layer.arguments import TOKEN_DTYPES
from jax_moe_lb.nn.sharding import explicit_sharding
from jax_moe_lb.transport.compression import TRANSFER_DTYPES, QuantizedTransfer

HiddenStates = Float[Array, "*B H"]


@dataclass(frozen=True)
@checked_fields
class ExpertConfig:
    """Feed-forward networks of the experts.

    Args:
        hidden_dim: `F`, the inner width of an expert.
        activation: function between the projections, see `jax_moe_lb.kernels`; `None` (default) is SwiGLU with a gate
            and GELU without one.
        gated: if True (default), experts have a gate projection beside the up projection.
        use_bias: if True, add a learned bias to each projection, as in GPT-OSS; False by default.
        fuse_gate_up: if True, multiply rows with the up and gate projections at once; they stay two parameters. `None`
            (default) does so on accelerators if tokens and parameters differ in dtype: the cast then writes both into
            one array, which saves memory traffic. Equal dtypes would require a copy. True requires `gated`.

    Raises:
        ValueError: `hidden_dim` is no positive integer, or `fuse_gate_up` is True without a gate.

    Examples:
        >>> from jax_moe_lb import ExpertConfig
        >>> ExpertConfig(hidden_dim=2880, use_bias=True).gated
        True
    """

    hidden_dim: int
    activation: Activation | None = None
    gated: bool = True
    use_bias: bool = False
    fuse_gate_up: bool | None = None

    def __post_init__(self) -> None:
        check_integer("experts.hidden_dim", self.hidden_dim)
        if self.activation is not None and not accepts(self.activation, 1 + self.gated):
            expected = "gate and up, as gated is True" if self.gated else "up, as gated is False"
            raise TypeError(f"experts.activation is {shown(self.activation)}; expected a function of {expected}")
        if self.fuse_gate_up and not self.gated:
            raise ValueError("experts.fuse_gate_up is True; expected False or None if experts.gated is False")


class SharedMix(Enum):
    """Combination of the shared expert's output and the output of a token's routed experts.

    Examples:
        >>> from jax_moe_lb.nn import SharedMix
        >>> [mix.num_logits for mix in SharedMix]
        [0, 1, 2]
    """

    SUM = 0
    """Add both (default): DeepSeek-V3, GLM-4.5, Llama 4."""
    SIGMOID = 1
    """Weight the shared output by a sigmoid of a learned product with the token: Qwen2-MoE and Qwen3-Next."""
    SOFTMAX = 2
    """Weight both by a softmax of two learned products: the dense residual branch of DeepSpeed-MoE (arXiv 2201.05596,
    section 4.1.1)."""

    @property
    def num_logits(self) -> int:
        """Number of learned products of a token: the columns of the kernel."""
        return self.value

    def __call__(
        self, x: HiddenStates, routed: HiddenStates, shared: Experts, kernel: Float[Array, "H _"] | None
    ) -> HiddenStates:
        """Return the output of the layer.

        Args:
            x: `[..., H]`, the tokens.
            routed: `[..., H]`, the outputs of their routed experts.
            shared: the shared expert, in the dtype of `x`.
            kernel: `[H, num_logits]`; `None` for `SUM`.

        Returns:
            `[..., H]` in the dtype of `x`.
        """
        y = dense_ffn(x, shared, explicit_sharding(routed))
        if kernel is None:
            return routed + y
        # Compute logits in float32, like the router's, and round once.
        logits = jnp.matmul(x, kernel, preferred_element_type=wide_dtype(x))
        if self is SharedMix.SIGMOID:
            return routed + jax.nn.sigmoid(logits).astype(x.dtype) * y
        weights = jax.nn.softmax(logits, -1).astype(x.dtype)
        return weights[..., :1] * routed + weights[..., 1:] * y


@dataclass(frozen=True)
@checked_fields
class SharedExpert:
    """Feed-forward network applied to every token, with the activation and gating of the routed experts.

    Args:
        hidden_dim: inner width; the sum of all widths for several shared experts.
        mix: combination with the output of the routed experts; their sum by default.

    Raises:
        ValueError: `hidden_dim` is no positive integer.

    Examples:
        >>> from jax_moe_lb import SharedExpert
        >>> from jax_moe_lb.nn import SharedMix
        >>> SharedExpert(2048, SharedMix.SIGMOID).mix.num_logits
        1
    """

    hidden_dim: int
    mix: SharedMix = SharedMix.SUM

    def __post_init__(self) -> None:
        check_integer("shared.hidden_dim", self.hidden_dim)


@dataclass(frozen=True)
@checked_fields
class Precision:
    """Dtypes of the layer's arithmetic, parameters and exchanges.

    Args:
        dtype: dtype of the experts' arithmetic and of replicated weights: bfloat16 (usual on accelerators), float32 or
            float64. `None` (default) takes the dtype of the input.
        param_dtype: dtype of the parameters; float32 by default.
        transfer_dtype: float8_e4m3fn or int8 quantizes rows while they travel forward, by a `QuantizedTransfer` with
            blocks of 128. `None` (default) keeps the transfer of the system, which has none by default.

    Raises:
        ValueError: a dtype is none of these.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import Precision
        >>> Precision(jnp.bfloat16).dtype, Precision(transfer_dtype=jnp.int8).transfer.block
        (dtype(bfloat16), 128)
    """

    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    transfer_dtype: DType | None = None

    def __post_init__(self) -> None:
        allowed = {"dtype": TOKEN_DTYPES, "param_dtype": TOKEN_DTYPES, "transfer_dtype": TRANSFER_DTYPES}
        for name, dtypes in allowed.items():
            value = getattr(self, name)
            remedy = "" if name == "transfer_dtype" else ". Pass transfer_dtype for 8-bit transfers."
            if value is not None or name == "param_dtype":
                # A frozen dataclass rejects ordinary assignment.
                object.__setattr__(self, name, checked_dtype(f"precision.{name}", value, dtypes, remedy))

    @property
    def transfer(self) -> QuantizedTransfer | None:
        """Quantization of rows while they travel forward; `None` without `transfer_dtype`."""
        return None if self.transfer_dtype is None else QuantizedTransfer(self.transfer_dtype)

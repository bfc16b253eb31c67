"""Sizes of a decoder loaded from a checkpoint."""

from dataclasses import dataclass, field
from enum import Enum

import jax.numpy as jnp
from jax import Array

from jax_moe_lb import Losses, TopK
from jax_moe_lb.core.experts import Activation
from models.decoder.rope import Rope
from models.model_config import COMPUTE_DTYPES, require_positive


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

    Args:
        query_rank: width of compressed queries; `None` disables their compression.
        kv_rank: width of compressed keys and values, which the cache stores.
        plain_dim: channels per key head without rotation.
        rotated_dim: rotated channels, shared by all key heads.
        value_dim: channels per value head.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int


class HeadNorm(Enum):
    """RMS norm of the query and key projections."""

    PER_HEAD = "per head"
    """Each head on its own: Qwen3, GLM-4.5."""
    FULL_WIDTH = "full width"
    """All heads together: OLMoE, MiniMax-M2."""
    UNWEIGHTED = "unweighted"
    """Each head on its own, without learned weights, in layers with rotary positions: Llama 4."""


@dataclass(frozen=True)
class Temperature:
    """Factor on the queries of layers without rotary positions, growing with the position (arXiv 2501.19399).

    Args:
        floor: tokens between two steps of the factor.
        scale: factor on the logarithm of the number of steps.
    """

    floor: float
    scale: float

    def __call__(self, positions: Array) -> Array:
        """Return the float32 factors of int32 positions."""
        return jnp.log1p(jnp.floor((positions + 1).astype(jnp.float32) / self.floor)) * self.scale + 1


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, read from a `config.json` by a module of `models.architectures`.

    Args:
        vocab_size: size of the vocabulary.
        embed_dim: `H`, the width of the model.
        num_layers: number of blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`.
        head_dim: `C`, the channels per head.
        mlp_dim: `F`, the inner width of an expert.
        num_experts: `E`, experts per layer.
        router: router; its `num_experts_per_tok` is `K`.
        norm_eps: epsilon of the RMS norms.
        rope: rotary embedding.
        attention_scale: factor on attention scores.
        source: text of the `config.json`, copied by `save_pretrained`.
        dense_mlp_dim: inner width of layers without experts.
        dense_layers: indices of the layers without experts.
        shared_mlp_dim: inner width of the shared expert; 0 for none.
        shared_is_gated: if True, weight the shared expert by a sigmoid of a learned product with the token.
        expert_bias: if True, each expert projection has a bias.
        qkv_bias: if True, the query, key and value projections have biases.
        out_bias: if True, the output projection of attention has a bias.
        qk_norm: norm of queries and keys; `None` for none.
        sinks: if True, each head has an attention-sink logit.
        windows: number of keys visible to a query, per layer, including its own; `None` is unlimited. Empty for no
            limit in any layer.
        chunks: number of consecutive positions that see each other alone, per layer; `None` is unlimited. Empty for no
            limit in any layer.
        unrotated_layers: indices of the layers without rotary positions.
        temperature: factor on the queries of these layers; `None` for none.
        latent: sizes of latent attention; `None` uses grouped-query attention.
        embed_scale: factor on embeddings.
        residual_scale: factor on what attention and experts add to the residual stream.
        logit_scale: factor on logits.
        tie_embeddings: if True, the output layer is the transposed embedding.
        layer_norm: if True, the norms of the residual stream are layer norms with biases instead of RMS norms.
        head_bias: if True, the output layer has a bias.
        num_further: number of multi-token prediction modules, for training; see `models.decoder.model`.
        activation: activation of the experts; `None` is SwiGLU.
        losses: router losses of training; `None` for none.
        compute_dtype: dtype of activations and matrix products.
        param_dtype: dtype of parameters.
        scan_layers: if True, run layers of equal structure as one `jax.lax.scan`, for training; see
            `models.decoder.layers.scanned`.
        max_positions: positions that the model was made for, for a warning alone; `None` if unknown.

    Raises:
        ValueError: a size is below 1, `num_kv_heads` does not divide `num_heads`, more channels are rotated than a
            head has, a dtype is unknown, `windows` or `chunks` has another length than `num_layers`, or all layers
            are dense.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_experts: int
    router: TopK
    norm_eps: float
    rope: Rope
    attention_scale: float
    source: str
    dense_mlp_dim: int = 0
    dense_layers: tuple[int, ...] = ()
    shared_mlp_dim: int = 0
    shared_is_gated: bool = False
    expert_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: HeadNorm | None = None
    sinks: bool = False
    windows: tuple[int | None, ...] = ()
    chunks: tuple[int | None, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    temperature: Temperature | None = None
    latent: Latent | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    layer_norm: bool = False
    head_bias: bool = False
    num_further: int = 0
    activation: Activation | None = None
    losses: Losses | None = None
    compute_dtype: str = "float32"
    param_dtype: str = "float32"
    scan_layers: bool = False
    max_positions: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            require_positive(name, getattr(self, name))
        require_positive("num_experts", self.num_experts)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads {self.num_heads}")
        if self.rope.dim > self.head_dim:
            raise ValueError(f"rope.dim is {self.rope.dim}; expected at most the head_dim {self.head_dim}")
        for name in ("compute_dtype", "param_dtype"):
            if getattr(self, name) not in COMPUTE_DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(COMPUTE_DTYPES)}")
        if set(range(self.num_layers)) <= set(self.dense_layers):
            raise ValueError(f"dense_layers contains all {self.num_layers} layers; expected at least one with experts")
        for name in ("windows", "chunks"):
            if getattr(self, name) and len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries; expected one for each of {self.num_layers} layers"
                )

    def window(self, layer: int) -> int | None:
        """Return the number of keys visible to a query of a layer; `None` is unlimited."""
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        """Return the number of consecutive positions that see each other alone in a layer; `None` is unlimited."""
        return self.chunks[layer] if self.chunks else None

"""Sizes of a decoder loaded from a checkpoint."""

from dataclasses import dataclass, field
from enum import Enum

import jax.numpy as jnp
from jax import Array

from jax_moe_lb import Losses, TopK
from jax_moe_lb.core.checks import Count, NonNegative, checked_fields
from jax_moe_lb.core.experts import Activation
from models.config import COMPUTE_DTYPES, require_one_of
from models.decoder.rope import Rope


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of the indexer of sparse attention."""

    num_heads: int  # heads, whose products are added
    head_dim: int  # channels per head
    num_keys: int  # number of keys visible to a query


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int | None  # width of compressed queries; `None` disables their compression
    kv_rank: int  # width of compressed keys and values, which the cache stores
    plain_dim: int  # channels per key head without rotation
    rotated_dim: int  # rotated channels, shared by all key heads
    value_dim: int  # channels per value head
    indexer: IndexerSizes | None = None  # sizes of the indexer of sparse attention; `None` for attention to all keys


@dataclass(frozen=True)
@checked_fields
class DeltaNet:
    """Sizes of gated delta networks; see `models.decoder.delta_net`."""

    num_heads: Count  # `N`, heads of values
    num_key_heads: Count  # `G`, heads of queries and keys, a divisor of `num_heads`
    key_dim: Count  # `K`, channels per head of queries and keys
    value_dim: Count  # `V`, channels per head of values
    kernel_size: Count  # `W`, tokens of the causal convolution
    # If True, two matrices have all projections, with those of a key head next to each other; else four
    is_joined: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; expected a multiple of num_key_heads {self.num_key_heads}"
            )

    @property
    def dims(self) -> tuple[int, int, int]:
        """Channels per head of queries, keys and values."""
        return self.key_dim, self.key_dim, self.value_dim

    @property
    def ends(self) -> tuple[int, int]:
        """Ends of queries and keys in the channels of the convolution."""
        return self.num_key_heads * self.key_dim, 2 * self.num_key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.ends[1] + self.num_heads * self.value_dim


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
    """Factor on the queries of some layers, growing with the position (arXiv 2501.19399)."""

    floor: float  # tokens between two steps of the factor
    scale: float  # factor on the logarithm of the number of steps
    first: int = 1  # number of the first position: 1 in Llama 4, 0 in Mistral-Small-4

    def __call__(self, positions: Array) -> Array:
        """Return the float32 factors of int32 positions."""
        return jnp.log1p(jnp.floor((positions + self.first).astype(jnp.float32) / self.floor)) * self.scale + 1


@dataclass(frozen=True)
class Scores:
    """Factor and reach of attention scores."""

    scale: float  # factor on the products of queries and keys
    window: int | None = None  # number of keys visible to a query, including its own; `None` is unlimited
    chunk: int | None = None  # number of consecutive positions that see each other alone; `None` is unlimited
    num_keys: int = 0  # keys of a query chosen by an indexer, if there is one


@dataclass(frozen=True)
@checked_fields
class DecoderConfig:
    """Sizes of a decoder, read from a `config.json` by a module of `models.architectures`."""

    vocab_size: Count  # size of the vocabulary
    embed_dim: Count  # `H`, the width of the model
    num_layers: Count  # number of blocks
    num_heads: Count  # number of query heads
    num_kv_heads: Count  # number of key and value heads, a divisor of `num_heads`
    head_dim: Count  # `C`, the channels per head
    mlp_dim: Count  # `F`, the inner width of an expert
    num_experts: Count  # `E`, experts per layer
    router: TopK  # router; its `num_experts_per_tok` is `K`
    norm_eps: NonNegative  # epsilon of the RMS norms
    rope: Rope  # rotary embedding
    attention_scale: float  # factor on attention scores
    source: str  # text of the `config.json`, copied by `save_pretrained`; of a multimodal model that of its text part
    dense_mlp_dim: int = 0  # inner width of layers without experts
    dense_layers: tuple[int, ...] = ()  # indices of the layers without experts
    shared_mlp_dim: int = 0  # inner width of the shared expert; 0 for none
    shared_is_gated: bool = False  # if True, weight the shared expert by a sigmoid of a learned product with the token
    expert_bias: bool = False  # if True, each expert projection has a bias
    qkv_bias: bool = False  # if True, the query, key and value projections have biases
    out_bias: bool = False  # if True, the output projection of attention has a bias
    qk_norm: HeadNorm | None = None  # norm of queries and keys; `None` for none
    norm_after_rope: bool = False  # if True, this norm follows the rotary embedding
    sinks: bool = False  # if True, each head has an attention-sink logit
    # Number of keys visible to a query, per layer, including its own; `None` is unlimited. Empty for no limit in any
    # layer.
    windows: tuple[int | None, ...] = ()
    # Number of consecutive positions that see each other alone, per layer; `None` is unlimited. Empty for no limit in
    # any layer.
    chunks: tuple[int | None, ...] = ()
    unrotated_layers: tuple[int, ...] = ()  # indices of the layers without rotary positions
    # Factor on the queries of these layers, and of all layers with latent attention; `None` for none
    temperature: Temperature | None = None
    latent: Latent | None = None  # sizes of latent attention; `None` uses grouped-query attention
    delta: DeltaNet | None = None  # sizes of gated delta networks
    delta_layers: tuple[int, ...] = ()  # indices of the layers with such a network in place of attention
    output_gate: bool = False  # if True, multiply outputs of grouped attention by a sigmoid of a projection
    zero_centered: bool = False  # if True, RMS norms multiply by 1 + weight, besides those of gated delta networks
    embed_scale: float = 1.0  # factor on embeddings
    residual_scale: float = 1.0  # factor on what attention and experts add to the residual stream
    logit_scale: float = 1.0  # factor on logits
    tie_embeddings: bool = False  # if True, the output layer is the transposed embedding
    # If True, the norms of a block are applied to outputs of attention and experts, not inputs
    norm_after: bool = False
    # If True, the norms of the residual stream are layer norms with biases instead of RMS norms
    layer_norm: bool = False
    head_bias: bool = False  # if True, the output layer has a bias
    num_further: int = 0  # number of multi-token prediction modules, for training; see `models.decoder.model`
    activation: Activation | None = None  # activation of the experts; `None` is SwiGLU
    losses: Losses | None = None  # router losses of training; `None` for none
    compute_dtype: str = "float32"  # dtype of activations and matrix products
    param_dtype: str = "float32"  # dtype of parameters
    # `model_type` of the multimodal checkpoint whose text part this is; empty for a checkpoint of text alone
    text_of: str = ""
    # Positions that the model was made for, for a warning alone; `None` if unknown
    max_positions: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads {self.num_heads}")
        if self.rope.dim > self.head_dim:
            raise ValueError(f"rope.dim is {self.rope.dim}; expected at most the head_dim {self.head_dim}")
        for name in ("compute_dtype", "param_dtype"):
            require_one_of(name, getattr(self, name), COMPUTE_DTYPES)
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

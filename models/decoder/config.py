"""`DecoderConfig` has the sizes of a decoder that a checkpoint was made with."""

from dataclasses import dataclass

from jax_moe_lb import TopK
from jax_moe_lb.kernels.experts import Activation
from models.config import COMPUTE_DTYPES, require_positive
from models.decoder.rope import Rope


@dataclass(frozen=True)
class Latent:
    """These are the sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

    Args:
        query_rank: the width to which queries are compressed; `None` compresses none.
        kv_rank: the width to which keys and values are compressed, which is what a cache holds.
        plain_dim: the channels of a head's keys that are not rotated.
        rotated_dim: the channels that are rotated, which all heads share in keys.
        value_dim: the channels of a head's values.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int


@dataclass(frozen=True)
class DecoderConfig:
    """These are the sizes of a decoder; a file in `models.architectures` reads them from a `config.json`.

    Args:
        vocab_size: the words.
        embed_dim: `H`, the width of the model.
        num_layers: the blocks.
        num_heads: the query heads.
        num_kv_heads: the heads of keys and values, a divisor of `num_heads`.
        head_dim: `C`, the channels of a head.
        mlp_dim: `F`, the inner width of an expert.
        num_experts: `E`.
        router: chooses the experts of a token, and holds `K`.
        norm_eps: what is added to the mean square in norms.
        rope: the rotary positions.
        attention_scale: the factor on scores of attention.
        source: the text of the `config.json`, which `save_pretrained` writes again.
        dense_mlp_dim: the inner width of layers without experts.
        dense_layers: the layers that have no experts.
        shared_mlp_dim: the inner width of the shared expert; 0 for none.
        use_routing_bias: whether each expert has a bias that moves the choice and not the weight.
        expert_bias: whether each product of an expert has a bias.
        kernel_bias: whether the router's logits have a bias, which is learned.
        qkv_bias: whether queries, keys and values have biases.
        out_bias: whether the output of attention has a bias.
        qk_norm: whether the heads of queries and keys are normalised.
        sinks: whether each head has a sink, a score that takes its share and brings no value.
        windows: how many keys back a query of each layer sees, itself counted; `None`: all. Empty: all, in every layer.
        latent: the sizes of latent attention; `None`: it is the usual one.
        tie_embeddings: whether the output layer is the embedding, transposed.
        num_further: how many modules predict tokens after the next one, for training; see `models.decoder.model`.
        activation: the function between the projections of an expert; `None` is SwiGLU.
        compute_dtype: the dtype of activations and products.
        param_dtype: the dtype of parameters.
        scan_layers: whether equal layers are one loop, for training; see `models.decoder.layers.scanned`.

    Raises:
        ValueError: a size is below 1, or does not divide what it has to; or no layer has experts.
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
    use_routing_bias: bool = False
    expert_bias: bool = False
    kernel_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    windows: tuple[int | None, ...] = ()
    latent: Latent | None = None
    tie_embeddings: bool = False
    num_further: int = 0
    activation: Activation | None = None
    compute_dtype: str = "float32"
    param_dtype: str = "float32"
    scan_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            require_positive(name, getattr(self, name))
        require_positive("num_experts", self.num_experts)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads {self.num_heads}")
        for name in ("compute_dtype", "param_dtype"):
            if getattr(self, name) not in COMPUTE_DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(COMPUTE_DTYPES)}")
        if set(range(self.num_layers)) <= set(self.dense_layers):
            raise ValueError(f"dense_layers are all {self.num_layers} layers; expected one with experts, at least")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries; expected one of each of {self.num_layers} layers"
            )

    def window(self, layer: int) -> int | None:
        """Tells how many keys back a query of a layer sees; `None`: all."""
        return self.windows[layer] if self.windows else None

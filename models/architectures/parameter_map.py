"""Mapping between checkpoint tensors and model parameters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from models.decoder.config import DecoderConfig, HeadNorm

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class ParameterSlice:
    """Part of a checkpoint tensor, and the parameter it maps to."""

    name: str  # name of the tensor in the checkpoint
    shape: tuple[int, ...]  # shape of the whole tensor
    path: str  # dotted path of the parameter in the model
    index: Index = ()  # part of the tensor; empty for all of it
    expert: int | None = None  # index of the expert in the parameter; `None` for the whole parameter
    transposed: bool = False  # if True, the last two dimensions of tensor and parameter are swapped
    is_copy: bool = False  # if True, the tensor duplicates another one and may be missing from the checkpoint
    layer: int | None = None  # index of the layer in a parameter that stacks several layers; `None` otherwise

    @property
    def place(self) -> tuple[int, ...]:
        """Index of the slice in the leading dimensions of the parameter: layer, then expert."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    def in_stack(self, stacks: Sequence[tuple[str, int]], num_layers: int) -> "ParameterSlice":
        """Return the slice of a model with stacked layers."""
        parts = self.path.split(".")
        if parts[0] == "blocks":
            number, rest = int(parts[1]), parts[2:]
        elif parts[0] == "further" and parts[2] == "block":
            number, rest = num_layers + int(parts[1]), parts[3:]
        else:
            return self
        path, layer = stacks[number]
        return replace(self, path=".".join([path, *rest]), layer=layer)


def linear(name: str, path: str, inner: int, outer: int, use_bias: bool = False) -> Iterator[ParameterSlice]:
    """Yield the weight of a linear map, stored transposed by `torch`, and its bias."""
    yield ParameterSlice(f"{name}.weight", (outer, inner), f"{path}.kernel", transposed=True)
    if use_bias:
        yield ParameterSlice(f"{name}.bias", (outer,), f"{path}.bias")


def scale(name: str, path: str, width: int) -> ParameterSlice:
    """Return the slice of a norm's weight."""
    return ParameterSlice(f"{name}.weight", (width,), f"{path}.scale")


def stream_norm(config: DecoderConfig, name: str, path: str) -> Iterator[ParameterSlice]:
    """Yield the weight of a norm of the residual stream, and the bias of a layer norm."""
    yield scale(name, path, config.embed_dim)
    if config.layer_norm:
        yield ParameterSlice(f"{name}.bias", (config.embed_dim,), f"{path}.bias")


def outside(config: DecoderConfig) -> Iterator[ParameterSlice]:
    """Yield the parameters outside the layers: embedding, final norm and output head."""
    yield ParameterSlice("model.embed_tokens.weight", (config.vocab_size, config.embed_dim), "embed.embedding")
    yield from stream_norm(config, "model.norm", "norm")
    if not config.tie_embeddings:
        yield from linear("lm_head", "head", config.embed_dim, config.vocab_size, config.head_bias)


def layer_norms(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    """Yield the norms before attention and before the experts."""
    theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
    yield from stream_norm(config, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    yield from stream_norm(config, f"{theirs}.post_attention_layernorm", f"{ours}.moe_norm")


def grouped_attention(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
    """Yield the weights of `GroupedAttention`."""
    theirs, ours = f"model.layers.{layer}.self_attn", f"blocks.{layer}.attention"
    width, queries, keys = config.embed_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from linear(f"{theirs}.q_proj", f"{ours}.q", width, queries, config.qkv_bias)
    yield from linear(f"{theirs}.k_proj", f"{ours}.k", width, keys, config.qkv_bias)
    yield from linear(f"{theirs}.v_proj", f"{ours}.v", width, keys, config.qkv_bias)
    yield from linear(f"{theirs}.o_proj", f"{ours}.out", queries, width, config.out_bias)
    if config.qk_norm not in (None, HeadNorm.UNWEIGHTED):
        is_full = config.qk_norm is HeadNorm.FULL_WIDTH
        yield scale(f"{theirs}.q_norm", f"{ours}.q_norm", queries if is_full else config.head_dim)
        yield scale(f"{theirs}.k_norm", f"{ours}.k_norm", keys if is_full else config.head_dim)
    if config.sinks:
        yield ParameterSlice(f"{theirs}.sinks", (config.num_heads,), f"{ours}.sinks")


def experts(
    config: DecoderConfig,
    layer: int,
    inside: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: str = "gate.e_score_correction_bias",
) -> Iterator[ParameterSlice]:
    """Yield the weights of the router and of experts stored in one tensor each."""
    theirs, ours = f"model.layers.{layer}.{inside}", f"blocks.{layer}.moe"
    width, inner, (gate, up, down) = config.embed_dim, config.mlp_dim, names
    yield ParameterSlice(f"{theirs}.gate.weight", (config.num_experts, width), f"{ours}.kernel", transposed=True)
    if config.router.selection_bias:
        yield ParameterSlice(f"{theirs}.{bias}", (config.num_experts,), f"{ours}.bias")
    for expert in range(config.num_experts):
        one = f"{theirs}.experts.{expert}"
        for name, path in ((gate, "gate"), (up, "up")):
            yield ParameterSlice(
                f"{one}.{name}.weight", (inner, width), f"{ours}.{path}", expert=expert, transposed=True
            )
        yield ParameterSlice(f"{one}.{down}.weight", (width, inner), f"{ours}.down", expert=expert, transposed=True)


def shared_expert(
    config: DecoderConfig, layer: int, name: str = "shared_experts", inside: str = "mlp"
) -> Iterator[ParameterSlice]:
    """Yield the weights of the shared expert, the checkpoint module `name` inside of `inside`."""
    if config.shared_mlp_dim:
        theirs, ours = f"model.layers.{layer}.{inside}.{name}", f"blocks.{layer}.moe"
        wide, narrow = (config.shared_mlp_dim, config.embed_dim), (config.embed_dim, config.shared_mlp_dim)
        yield ParameterSlice(f"{theirs}.gate_proj.weight", wide, f"{ours}.shared_gate", transposed=True)
        yield ParameterSlice(f"{theirs}.up_proj.weight", wide, f"{ours}.shared_up", transposed=True)
        yield ParameterSlice(f"{theirs}.down_proj.weight", narrow, f"{ours}.shared_down", transposed=True)
        if config.shared_is_gated:
            gate = (1, config.embed_dim)
            yield ParameterSlice(f"{theirs}_gate.weight", gate, f"{ours}.shared_kernel", transposed=True)


def dense(config: DecoderConfig, layer: int, inside: str = "mlp") -> Iterator[ParameterSlice]:
    """Yield the weights of a dense feed-forward layer, the checkpoint module `inside`."""
    theirs, ours = f"model.layers.{layer}.{inside}", f"blocks.{layer}.dense"
    yield from linear(f"{theirs}.gate_proj", f"{ours}.gate", config.embed_dim, config.dense_mlp_dim)
    yield from linear(f"{theirs}.up_proj", f"{ours}.up", config.embed_dim, config.dense_mlp_dim)
    yield from linear(f"{theirs}.down_proj", f"{ours}.down", config.dense_mlp_dim, config.embed_dim)


def usual_pieces(
    config: DecoderConfig, shared: str = "shared_experts", bias: str = "gate.e_score_correction_bias"
) -> Iterator[ParameterSlice]:
    """Yield all slices of a model with grouped attention and per-expert tensors under `mlp`."""

    def layer_pieces(config: DecoderConfig, layer: int) -> Iterator[ParameterSlice]:
        yield from layer_norms(config, layer)
        yield from grouped_attention(config, layer)
        yield from feed_forward(config, layer, shared, bias)

    yield from outside(config)
    for layer in range(config.num_layers):
        yield from layer_pieces(config, layer)
    yield from further(config, layer_pieces)


def further(
    config: DecoderConfig, layer_pieces: Callable[[DecoderConfig, int], Iterator[ParameterSlice]]
) -> Iterator[ParameterSlice]:
    """Yield the slices of the multi-token prediction layers and of the modules joining their inputs."""
    width, words = config.embed_dim, (config.vocab_size, config.embed_dim)
    for i in range(config.num_further):
        layer = config.num_layers + i
        theirs, ours = f"model.layers.{layer}", f"further.{i}"
        for piece in layer_pieces(config, layer):
            yield replace(piece, path=piece.path.replace(f"blocks.{layer}", f"{ours}.block", 1))
        yield scale(f"{theirs}.enorm", f"{ours}.embed_norm", width)
        yield scale(f"{theirs}.hnorm", f"{ours}.stream_norm", width)
        yield from linear(f"{theirs}.eh_proj", f"{ours}.join", 2 * width, width)
        yield scale(f"{theirs}.shared_head.norm", f"{ours}.norm", width)
        # Published checkpoints store the shared embedding and head once more in each of these layers.
        yield ParameterSlice(f"{theirs}.embed_tokens.weight", words, "embed.embedding", is_copy=True)
        head = "embed.embedding" if config.tie_embeddings else "head.kernel"
        yield ParameterSlice(
            f"{theirs}.shared_head.head.weight", words, head, transposed=head == "head.kernel", is_copy=True
        )


def feed_forward(
    config: DecoderConfig,
    layer: int,
    shared: str = "shared_experts",
    bias: str = "gate.e_score_correction_bias",
) -> Iterator[ParameterSlice]:
    """Yield the weights of a layer's experts, or of its dense network."""
    if layer in config.dense_layers:
        yield from dense(config, layer)
    else:
        yield from experts(config, layer, "mlp", bias=bias)
        yield from shared_expert(config, layer, shared)

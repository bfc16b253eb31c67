"""Mapping between checkpoint tensors and model parameters."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from models.decoder.config import DecoderConfig, DeltaNet, HeadNorm

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Stack:
    """Tensors with the experts of a layer, by names inside of their module."""

    both: str  # gate and up projections
    down: str  # down projections
    # If True, an expert is `[2 F, H]` and `[H, F]`, as in `torch`; else `[H, 2 F]` and `[F, H]`
    transposed: bool = False
    interleaved: bool = False  # if True, gate and up alternate; else the gate comes first


@dataclass(frozen=True)
class Names:
    """Names of the tensors of a layer in published files, by part."""

    moe: str = "mlp"  # module of router and experts
    router: str = "gate.weight"  # router weights in it
    bias: str = "gate.e_score_correction_bias"  # selection bias in it
    bias_rows: int = 0  # leading dimension of the selection bias; 0 for none
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up and down of an expert
    stack: Stack | None = None  # tensors with all experts of a layer; `None` for three per expert
    shared: str = "mlp.shared_experts"  # module of the shared expert
    shared_both: str = ""  # tensor in it with its gate and up projections; empty for two tensors
    shared_down: str = "down_proj.weight"
    dense: str = "mlp"  # module of a dense layer
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # of attention, and of experts
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # of queries, and of keys
    passed_over: tuple[str, ...] = ()  # prefixes of tensors that the model does not have
    # Parts of the names, each with its replacement in the modules of `transformers` 5, in this order
    in_memory: tuple[tuple[str, str], ...] = ()


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


def pieces(config: DecoderConfig, names: Names) -> Iterator[ParameterSlice]:
    """Yield the slices of all checkpoint tensors of a model."""
    yield from outside(config)
    for layer in range(config.num_layers):
        yield from _layer(config, layer, names)
    yield from _further(config, names)


def _layer(config: DecoderConfig, layer: int, names: Names) -> Iterator[ParameterSlice]:
    theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
    for name, path in zip(names.norms, ("attention_norm", "moe_norm"), strict=True):
        yield from stream_norm(config, f"{theirs}.{name}", f"{ours}.{path}")
    if config.delta is not None and layer in config.delta_layers:
        yield from _delta_net(config, config.delta, f"{theirs}.linear_attn", f"{ours}.attention")
    else:
        attention = _grouped_attention if config.latent is None else _latent_attention
        yield from attention(config, f"{theirs}.self_attn", f"{ours}.attention", names)
    if layer in config.dense_layers:
        yield from _dense(config, f"{theirs}.{names.dense}", f"{ours}.dense")
        return
    experts = _experts if names.stack is None else _stacked_experts
    yield from _router(config, f"{theirs}.{names.moe}", f"{ours}.moe", names)
    yield from experts(config, f"{theirs}.{names.moe}", f"{ours}.moe", names)
    if config.shared_mlp_dim:
        yield from _shared_expert(config, f"{theirs}.{names.shared}", f"{ours}.moe", names)


def _grouped_attention(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    width, queries, keys = config.embed_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated = 2 * queries if config.output_gate else queries
    yield from linear(f"{theirs}.q_proj", f"{ours}.q", width, gated, config.qkv_bias)
    yield from linear(f"{theirs}.k_proj", f"{ours}.k", width, keys, config.qkv_bias)
    yield from linear(f"{theirs}.v_proj", f"{ours}.v", width, keys, config.qkv_bias)
    yield from linear(f"{theirs}.o_proj", f"{ours}.out", queries, width, config.out_bias)
    if config.qk_norm not in (None, HeadNorm.UNWEIGHTED):
        is_full, (q_norm, k_norm) = config.qk_norm is HeadNorm.FULL_WIDTH, names.head_norms
        yield scale(f"{theirs}.{q_norm}", f"{ours}.q_norm", queries if is_full else config.head_dim)
        yield scale(f"{theirs}.{k_norm}", f"{ours}.k_norm", keys if is_full else config.head_dim)
    if config.sinks:
        yield ParameterSlice(f"{theirs}.sinks", (config.num_heads,), f"{ours}.sinks")


def _delta_net(config: DecoderConfig, sizes: DeltaNet, theirs: str, ours: str) -> Iterator[ParameterSlice]:
    heads, width, values = sizes.num_heads, config.embed_dim, sizes.num_heads * sizes.value_dim
    widths = {"qkv": sizes.channels, "z": values, "b": heads, "a": heads}
    if sizes.is_joined:
        widths = {"qkvz": sizes.channels + values, "ba": 2 * heads}
    for name, outer in widths.items():
        yield from linear(f"{theirs}.in_proj_{name}", f"{ours}.{name}", width, outer)
    shape = (sizes.channels, 1, sizes.kernel_size)
    yield ParameterSlice(f"{theirs}.conv1d.weight", shape, f"{ours}.conv", (slice(None), 0), transposed=True)
    yield ParameterSlice(f"{theirs}.A_log", (heads,), f"{ours}.a_log")
    yield ParameterSlice(f"{theirs}.dt_bias", (heads,), f"{ours}.a_bias")
    yield scale(f"{theirs}.norm", f"{ours}.norm", sizes.value_dim)
    yield from linear(f"{theirs}.out_proj", f"{ours}.out", values, width)


def _latent_attention(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    latent, width, heads = config.latent, config.embed_dim, config.num_heads
    assert latent is not None
    if latent.query_rank is None:
        yield from linear(f"{theirs}.q_proj", f"{ours}.q_up", width, heads * config.head_dim)
    else:
        yield from linear(f"{theirs}.q_a_proj", f"{ours}.q_down", width, latent.query_rank, config.qkv_bias)
        yield scale(f"{theirs}.q_a_layernorm", f"{ours}.q_norm", latent.query_rank)
        yield from linear(f"{theirs}.q_b_proj", f"{ours}.q_up", latent.query_rank, heads * config.head_dim)
    down = latent.kv_rank + latent.rotated_dim
    yield from linear(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.kv_down", width, down, config.qkv_bias)
    yield scale(f"{theirs}.kv_a_layernorm", f"{ours}.kv_norm", latent.kv_rank)
    up = heads * (latent.plain_dim + latent.value_dim)
    yield from linear(f"{theirs}.kv_b_proj", f"{ours}.kv_up", latent.kv_rank, up)
    yield from linear(f"{theirs}.o_proj", f"{ours}.out", heads * latent.value_dim, width, config.out_bias)
    if latent.indexer is not None:
        theirs, ours, dims = f"{theirs}.indexer", f"{ours}.indexer", latent.indexer.head_dim
        yield from linear(f"{theirs}.wq_b", f"{ours}.q", latent.query_rank or width, latent.indexer.num_heads * dims)
        yield from linear(f"{theirs}.wk", f"{ours}.k", width, dims)
        yield scale(f"{theirs}.k_norm", f"{ours}.k_norm", dims)
        yield ParameterSlice(f"{theirs}.k_norm.bias", (dims,), f"{ours}.k_norm.bias")
        yield from linear(f"{theirs}.weights_proj", f"{ours}.weights", width, latent.indexer.num_heads)


def _router(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    experts = (config.num_experts,)
    yield ParameterSlice(f"{theirs}.{names.router}", (*experts, config.embed_dim), f"{ours}.kernel", transposed=True)
    if config.router.logit_bias:
        yield ParameterSlice(f"{theirs}.{names.router.replace('weight', 'bias')}", experts, f"{ours}.kernel_bias")
    if config.router.selection_bias:
        leading, index = ((names.bias_rows,), (0,)) if names.bias_rows else ((), ())
        yield ParameterSlice(f"{theirs}.{names.bias}", (*leading, *experts), f"{ours}.bias", index=index)


def _experts(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    """Yield the weights of experts stored in one tensor each."""
    width, inner, (gate, up, down) = config.embed_dim, config.mlp_dim, names.projections
    for expert in range(config.num_experts):
        one = f"{theirs}.experts.{expert}"
        for name, path in ((gate, "gate"), (up, "up")):
            yield ParameterSlice(
                f"{one}.{name}.weight", (inner, width), f"{ours}.{path}", expert=expert, transposed=True
            )
        yield ParameterSlice(f"{one}.{down}.weight", (width, inner), f"{ours}.down", expert=expert, transposed=True)


def _stacked_experts(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    """Yield the weights and biases of experts stored together."""
    stack, experts, width, inner = names.stack, config.num_experts, config.embed_dim, config.mlp_dim
    assert stack is not None
    turned, both, down = stack.transposed, f"{theirs}.{stack.both}", f"{theirs}.{stack.down}"
    shapes = [(experts, 2 * inner, width), (experts, width, inner)]
    if not turned:
        shapes = [(one, columns, rows) for one, rows, columns in shapes]
    for expert in range(experts):
        for half, path in enumerate(("gate", "up")):
            part = slice(half, None, 2) if stack.interleaved else slice(half * inner, (half + 1) * inner)
            index = (expert, part) if turned else (expert, slice(None), part)
            yield ParameterSlice(both, shapes[0], f"{ours}.{path}", index, expert, turned)
            if config.expert_bias:
                wide = (experts, 2 * inner)
                yield ParameterSlice(f"{both}_bias", wide, f"{ours}.{path}_bias", (expert, part), expert)
        yield ParameterSlice(down, shapes[1], f"{ours}.down", (expert,), expert, turned)
        if config.expert_bias:
            yield ParameterSlice(f"{down}_bias", (experts, width), f"{ours}.down_bias", (expert,), expert)


def _shared_expert(config: DecoderConfig, theirs: str, ours: str, names: Names) -> Iterator[ParameterSlice]:
    width, inner = config.embed_dim, config.shared_mlp_dim
    for half, path in enumerate(("gate", "up")):
        index: Index = (slice(half * inner, (half + 1) * inner),) if names.shared_both else ()
        name, rows = names.shared_both or f"{path}_proj.weight", 2 * inner if index else inner
        yield ParameterSlice(f"{theirs}.{name}", (rows, width), f"{ours}.shared_{path}", index, transposed=True)
    yield ParameterSlice(f"{theirs}.{names.shared_down}", (width, inner), f"{ours}.shared_down", transposed=True)
    if config.shared_is_gated:
        yield ParameterSlice(f"{theirs}_gate.weight", (1, width), f"{ours}.shared_kernel", transposed=True)


def _dense(config: DecoderConfig, theirs: str, ours: str) -> Iterator[ParameterSlice]:
    yield from linear(f"{theirs}.gate_proj", f"{ours}.gate", config.embed_dim, config.dense_mlp_dim)
    yield from linear(f"{theirs}.up_proj", f"{ours}.up", config.embed_dim, config.dense_mlp_dim)
    yield from linear(f"{theirs}.down_proj", f"{ours}.down", config.dense_mlp_dim, config.embed_dim)


def _further(config: DecoderConfig, names: Names) -> Iterator[ParameterSlice]:
    """Yield the slices of the multi-token prediction layers and of the modules joining their inputs."""
    width, words = config.embed_dim, (config.vocab_size, config.embed_dim)
    for i in range(config.num_further):
        layer = config.num_layers + i
        theirs, ours = f"model.layers.{layer}", f"further.{i}"
        for piece in _layer(config, layer, names):
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


# Name of a tensor of one expert: module, index and projection.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")

# Projections of an expert in `gate_up_proj` by name, and their position.
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def renamed(name: str, names: Names) -> str:
    """Return the name of a tensor of a published file in the modules of `transformers` 5, before experts are packed."""
    for published, in_memory in names.in_memory:
        name = name.replace(published, in_memory)
    return name


def packed_slice(piece: ParameterSlice, config: DecoderConfig, names: Names) -> ParameterSlice:
    """Return the slice of the tensor in memory of `transformers` 5 that has the values of a slice of a file."""
    # `experts.gate_up_proj` is `[E, 2 F, H]`, the gate first, and `experts.down_proj` `[E, H, F]`. Files with a `Stack`
    # have the order of the dimensions in memory.
    name = renamed(piece.name, names)
    one = EXPERT.fullmatch(name)
    if one is None:
        return replace(piece, name=name)
    (module, _, projection), (rows, columns), expert = one.groups(), piece.shape, piece.expert
    assert expert is not None
    if projection not in HALVES:
        shape = (config.num_experts, rows, columns)
        return replace(piece, name=f"{module}.down_proj", shape=shape, index=(expert,))
    first, shape = HALVES[projection] * rows, (config.num_experts, 2 * rows, columns)
    return replace(piece, name=f"{module}.gate_up_proj", shape=shape, index=(expert, slice(first, first + rows)))

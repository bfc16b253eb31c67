"""Functions from the fields of a `config.json` to a `DecoderConfig`, one per architecture."""

import math
from dataclasses import replace
from typing import Any

import jax

from jax_moe_lb import TopK
from jax_moe_lb.core.checks import shown
from jax_moe_lb.kernels import ClampedSwiGLU
from jax_moe_lb.routing import GroupLimit
from models.architectures.config_json import LAYER_TYPES, MOST_LAYERS, Fields, checked_number
from models.decoder.config import DecoderConfig, DeltaNet, HeadNorm, IndexerSizes, Latent, Temperature
from models.decoder.rope import LongRope, Rope, yarn_scale
from models.decoder.sparse_mixer import SparseMixer

CHUNKED, FULL, LINEAR = "chunked_attention", "full_attention", "linear_attention"  # kinds in `layer_types`

# Rotary settings of images: the three positions of a token of text are equal.
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
POSITIONS = "original_max_position_embeddings"  # positions of pretraining; in Phi-3.5-MoE also a field of its own


def _decoder(
    fields: Fields, router: TopK, experts: str, mlp_dim: str, *, rope: Rope | None = None, head_dim: int | None = None
) -> DecoderConfig:
    """Return the sizes that all architectures have, with fields named `experts` and `mlp_dim`."""
    fields.require("hidden_act", "silu")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim() if head_dim is None else head_dim
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=fields.num_layers(),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_dim=fields.integer(mlp_dim),
        num_experts=fields.num_experts(experts),
        router=router,
        norm_eps=fields.number("rms_norm_eps"),
        rope=fields.rope(head_dim) if rope is None else rope,
        attention_scale=head_dim**-0.5,
        source=fields.text,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _biased(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return a config with biases of all attention projections if `attention_bias` is set."""
    has_bias = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=has_bias, out_bias=has_bias)


def _with_dense(fields: Fields, config: DecoderConfig, layers: tuple[int, ...]) -> DecoderConfig:
    """Return a config with dense layers of `intermediate_size`."""
    return replace(config, dense_layers=layers, dense_mlp_dim=fields.integer_if(bool(layers), "intermediate_size"))


def _top_k(fields: Fields) -> int:
    return fields.integer("num_experts_per_tok")


def _first_dense(fields: Fields) -> tuple[int, ...]:
    return tuple(range(min(fields.num_layers(), fields.integer("first_k_dense_replace"))))


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of all layers, empty without `sliding_window`."""
    window = fields.integer("sliding_window", 0)
    return (window,) * fields.num_layers() if window else ()


def mixtral(fields: Fields) -> DecoderConfig:
    """Mixtral: softmax top-k routing, grouped-query attention, an optional sliding window."""
    config = _decoder(fields, TopK(_top_k(fields), renormalise=True), "num_local_experts", "intermediate_size")
    return replace(config, windows=_windows(fields))


def _softmax(fields: Fields, mlp_dim: str) -> DecoderConfig:
    router = TopK(_top_k(fields), renormalise=fields.flag("norm_topk_prob", False))
    return _decoder(fields, router, "num_experts", mlp_dim)


def _qwen(fields: Fields) -> DecoderConfig:
    fields.require("use_sliding_window", False)
    fields.ignore("max_window_layers", "sliding_window")
    step, without = max(fields.integer("decoder_sparse_step", 1), 1), fields.integers("mlp_only_layers")
    dense = tuple(i for i in range(fields.num_layers()) if i in without or (i + 1) % step)
    return _with_dense(fields, _softmax(fields, "moe_intermediate_size"), dense)


def qwen3_moe(fields: Fields) -> DecoderConfig:
    """Qwen3-MoE: normalized heads, interleaved dense layers."""
    return replace(_biased(fields, _qwen(fields)), qk_norm=HeadNorm.PER_HEAD)


def qwen2_moe(fields: Fields) -> DecoderConfig:
    """Qwen2-MoE: a shared expert weighted by a sigmoid."""
    shared = fields.integer("shared_expert_intermediate_size")
    has_bias = fields.flag("qkv_bias", True)
    return replace(_qwen(fields), qkv_bias=has_bias, shared_mlp_dim=shared, shared_is_gated=True)


def qwen3_next(fields: Fields) -> DecoderConfig:
    """Qwen3-Next: gated delta networks between layers of attention with an output gate, a gated shared expert."""
    return _with_delta_nets(fields, _qwen(fields), is_joined=True)


def qwen3_5_moe_text(fields: Fields) -> DecoderConfig:
    """Qwen3.5-MoE for text: as Qwen3-Next, with other projections of the delta networks."""
    fields.read.update(f"rope_parameters.{name}" for name in IMAGE_POSITIONS)
    config = _decoder(fields, TopK(_top_k(fields), renormalise=True), "num_experts", "moe_intermediate_size")
    return _with_delta_nets(fields, config, is_joined=False)


def _with_delta_nets(fields: Fields, config: DecoderConfig, *, is_joined: bool) -> DecoderConfig:
    delta = DeltaNet(
        num_heads=fields.integer("linear_num_value_heads"),
        num_key_heads=fields.integer("linear_num_key_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel_size=fields.integer("linear_conv_kernel_dim"),
        is_joined=is_joined,
    )
    return replace(
        _biased(fields, config),
        rope=fields.rope(int(config.head_dim * fields.partial_rotary_factor())),
        shared_mlp_dim=fields.integer("shared_expert_intermediate_size"),
        shared_is_gated=True,
        qk_norm=HeadNorm.PER_HEAD,
        output_gate=True,
        zero_centered=True,
        delta=delta,
        delta_layers=_delta_layers(fields),
    )


def _delta_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers with gated delta networks: by `layer_types`, or all but every `full_attention_interval`-th."""
    kinds, interval = fields.kinds("layer_types", (LINEAR, FULL)), max(fields.integer("full_attention_interval", 4), 1)
    regular = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(fields.num_layers())]
    if kinds and "full_attention_interval" in fields.raw and kinds != regular:
        raise ValueError(f"config.json: full_attention_interval is {interval}; expected the interval of layer_types")
    return tuple(layer for layer, kind in enumerate(kinds or regular) if kind == LINEAR)


def olmoe(fields: Fields) -> DecoderConfig:
    """OLMoE: norms over the full width of queries and keys."""
    return replace(_biased(fields, _softmax(fields, "intermediate_size")), qk_norm=HeadNorm.FULL_WIDTH)


def flex_olmo(fields: Fields) -> DecoderConfig:
    """FlexOlmo: as OLMoE, with norms after attention and experts in place of before."""
    return replace(olmoe(fields), norm_after=True)


def _grouped_router(fields: Fields, score: Any, num_groups: int, per_group: int = 2) -> TopK:
    """Return a router limited to `topk_group` groups, scored by their `per_group` best experts."""
    limit = GroupLimit(num_groups, fields.integer("topk_group"), per_group) if num_groups > 1 else None
    return TopK(
        _top_k(fields),
        score=score,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        group_limit=limit,
        selection_bias=score is jax.nn.sigmoid,
    )


def _sigmoid_router(fields: Fields) -> TopK:
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    return _grouped_router(fields, jax.nn.sigmoid, fields.integer("n_group"))


def glm4_moe(fields: Fields) -> DecoderConfig:
    """GLM-4.5 and Solar-Open: sigmoid routing with a bias, a shared expert, dense first layers."""
    rope, router = fields.rope(int(fields.head_dim() * fields.partial_rotary_factor())), _sigmoid_router(fields)
    config = _decoder(fields, router, "n_routed_experts", "moe_intermediate_size", rope=rope)
    return replace(
        _with_dense(fields, config, _first_dense(fields)),
        shared_mlp_dim=config.mlp_dim * fields.integer("n_shared_experts"),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=HeadNorm.PER_HEAD if fields.flag("use_qk_norm", False) else None,
    )


def dots1(fields: Fields) -> DecoderConfig:
    """dots.llm1: as GLM-4.5, with a sliding window in the last layers."""
    with_window = fields.get("sliding_window") is not None
    before = fields.integer_if(with_window, "max_window_layers")
    first = before if with_window else MOST_LAYERS
    kinds = [LAYER_TYPES[layer < first] for layer in range(fields.num_layers())]
    config = glm4_moe(fields)
    return replace(config, out_bias=config.qkv_bias, windows=fields.windows(kinds))


def _latent(fields: Fields, router: TopK, pairs: bool, head_dim: int | None = None) -> DecoderConfig:
    """Return the config of a model with latent attention; `head_dim` is the value of this field, if it is another."""
    latent = Latent(
        query_rank=fields.integer("q_lora_rank", 0) or None,
        kv_rank=fields.integer("kv_lora_rank", least=1),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rotated_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim", least=1),
    )
    width = latent.plain_dim + latent.rotated_dim
    # Fields of `transformers` that repeat other sizes.
    fields.require("head_dim", latent.rotated_dim if head_dim is None else head_dim)
    fields.require("qk_head_dim", width)
    fields.require("num_key_value_heads", fields.integer("num_attention_heads"))
    rope = fields.rope(latent.rotated_dim, interleaved=pairs)
    config = _decoder(fields, router, "n_routed_experts", "moe_intermediate_size", rope=rope, head_dim=width)
    return replace(
        _biased(fields, _with_dense(fields, config, _dense_kinds(fields))),
        # YaRN scales queries and keys, each by this factor, for longer contexts.
        attention_scale=width**-0.5
        * yarn_scale(rope.factor, fields.rope_number("mscale_all_dim", 0.0, above=None)) ** 2,
        shared_mlp_dim=config.mlp_dim * fields.integer("n_shared_experts"),
        latent=latent,
    )


def deepseek_v3(fields: Fields) -> DecoderConfig:
    """DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash: latent attention, sigmoid routing with a bias and groups."""
    fields.require("moe_layer_freq", 1)
    return _latent(fields, _sigmoid_router(fields), fields.flag("rope_interleave", True))


def glm_moe_dsa(fields: Fields) -> DecoderConfig:
    """GLM-5: as DeepSeek-V3, with an indexer that chooses the keys of each query in every layer."""
    layers = fields.num_layers()
    for name, kind in {"layer_types": "indexed_attention", "indexer_types": "full"}.items():
        fields.require(name, [kind] * layers)
    fields.require("index_topk_pattern", "F" * layers)
    config = deepseek_v3(fields)
    assert config.latent is not None
    least = {"index_n_heads": 1, "index_head_dim": config.latent.rotated_dim, "index_topk": 1}
    sizes = (fields.integer(name, least=number) for name, number in least.items())
    if config.latent.query_rank is None:
        raise ValueError("config.json: q_lora_rank is None; expected a number, as the indexer reads compressed queries")
    return replace(config, latent=replace(config.latent, indexer=IndexerSizes(*sizes)))


def deepseek_v2(fields: Fields) -> DecoderConfig:
    """DeepSeek-V2: latent attention, softmax routing, limited to the groups with the best expert or not."""
    method, num_groups = fields.get("topk_method"), 1
    if method == "group_limited_greedy":
        num_groups = fields.integer("n_group")
    elif method == "greedy":
        fields.ignore("n_group", "topk_group")
    else:
        raise ValueError(f"config.json: topk_method is {shown(method)}; expected greedy or group_limited_greedy")
    return _latent(fields, _grouped_router(fields, jax.nn.softmax, num_groups, 1), pairs=True)


def mistral4(fields: Fields) -> DecoderConfig:
    """Mistral-Small-4: latent attention, softmax routing with groups, queries scaled with the position."""
    rotated_dim = fields.integer("qk_rope_head_dim")
    width = fields.integer("qk_nope_head_dim") + rotated_dim
    _check_share(fields.partial_rotary_factor(rotated_dim / max(width, 1)), rotated_dim, width)
    router = _grouped_router(fields, jax.nn.softmax, fields.integer("n_group"))
    fields.read.update(f"rope_parameters.{name}" for name in ("llama_4_scaling_beta", "max_position_embeddings"))
    config = _latent(fields, router, fields.flag("rope_interleave", True), head_dim=width)
    scale = fields.rope_number("llama_4_scaling_beta", above=None)
    return replace(config, temperature=Temperature(float(config.rope.original_positions), scale, first=0))


def _dense_kinds(fields: Fields) -> tuple[int, ...]:
    """Return the layers of the kind "dense" in `mlp_layer_types`, or else the first ones."""
    kinds = fields.kinds("mlp_layer_types", ("dense", "sparse"))
    if not kinds:
        return _first_dense(fields)
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if dense == tuple(range(len(dense))):
        fields.require("first_k_dense_replace", len(dense))
    return dense


def minimax_m2(fields: Fields) -> DecoderConfig:
    """MiniMax-M2: sigmoid routing with a bias, norms over the full width, partial rotary embedding."""
    fields.require("attn_type_list", [1] * fields.num_layers())
    router = TopK(_top_k(fields), score=jax.nn.sigmoid, renormalise=True, selection_bias=True)
    rope = fields.rope(_rotated_dim(fields, fields.head_dim()))
    config = _decoder(fields, router, "num_local_experts", "intermediate_size", rope=rope)
    return replace(config, qk_norm=HeadNorm.FULL_WIDTH)


def _rotated_dim(fields: Fields, head_dim: int) -> int:
    """Return the rotated channels per head: published files have `rotary_dim`, `transformers` a factor."""
    if fields.get("rotary_dim") is None:
        return int(head_dim * fields.partial_rotary_factor(1.0))
    dim = fields.integer("rotary_dim")
    _check_share(fields.partial_rotary_factor(dim / max(head_dim, 1)), dim, head_dim)
    return dim


def _check_share(share: float, rotated_dim: int, head_dim: int) -> None:
    if round(head_dim * share) != rotated_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor is {share}; expected rotary channels {rotated_dim} / {head_dim}"
        )


def ernie4_5_moe(fields: Fields) -> DecoderConfig:
    """ERNIE-4.5 for text: a bias for the selection, shared experts, dense layers around the sparse ones."""
    per_token = fields.integer("moe_k")
    fields.require("num_experts_per_tok", per_token)
    router = TopK(per_token, renormalise=True, selection_bias=True)
    rope = fields.rope(fields.head_dim(), interleaved=True)
    config = _decoder(fields, router, "moe_num_experts", "moe_intermediate_size", rope=rope)
    last = fields.get("moe_layer_end_index")
    last = config.num_layers - 1 if last == -1 else fields.integer("moe_layer_end_index")
    inside = range(fields.integer("moe_layer_start_index"), last + 1)
    step = max(fields.integer("moe_layer_interval"), 1)
    dense = tuple(layer for layer in range(config.num_layers) if layer not in inside or (layer + 1) % step)
    shared = config.mlp_dim * fields.integer("moe_num_shared_experts")
    return replace(_with_dense(fields, config, dense), shared_mlp_dim=shared)


def granitemoe(fields: Fields) -> DecoderConfig:
    """Granite-MoE: multipliers of embeddings, attention, residuals and logits."""
    # A softmax over the chosen logits equals the renormalised softmax over all logits.
    router = TopK(_top_k(fields), renormalise=True)
    config = _biased(fields, _decoder(fields, router, "num_local_experts", "intermediate_size"))
    return replace(
        config,
        attention_scale=fields.number("attention_multiplier"),
        embed_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1 / fields.number("logits_scaling", above=0.0),
    )


def granitemoeshared(fields: Fields) -> DecoderConfig:
    """Granite-MoE with a shared expert."""
    return replace(granitemoe(fields), shared_mlp_dim=fields.integer("shared_intermediate_size"))


def hunyuan_v1_moe(fields: Fields) -> DecoderConfig:
    """Hunyuan-A13B: head norms after the rotary embedding, one shared expert, a base of frequencies by `alpha`."""
    width = fields.integer("intermediate_size")
    # Published files have a number per layer.
    _equal_in_layers(fields, "moe_intermediate_size", width)
    _equal_in_layers(fields, "num_shared_expert", 1)
    per_token = _equal_in_layers(fields, "moe_topk")
    fields.require("num_experts_per_tok", per_token)
    fields.require("attention_head_dim", fields.head_dim())
    router = TopK(per_token, renormalise=True)
    config = _decoder(fields, router, "num_experts", "intermediate_size", rope=_alpha_rope(fields, fields.head_dim()))
    config = replace(_biased(fields, config), shared_mlp_dim=width)
    return replace(config, qk_norm=HeadNorm.PER_HEAD, norm_after_rope=True)


def _equal_in_layers(fields: Fields, name: str, expected: int | None = None) -> int:
    """Return a number that may be a list of equal numbers, one per layer."""
    value = fields.get(name)
    one = value[0] if isinstance(value, list) and value and value == value[:1] * fields.num_layers() else value
    if (one is None and expected is not None) or (type(one) is int and one == (one if expected is None else expected)):
        return 0 if one is None else one
    what = "a number" if expected is None else str(expected)
    raise ValueError(f"config.json: {name} is {shown(value)}; expected {what} in all layers")


def _alpha_rope(fields: Fields, dim: int) -> Rope:
    """Return the rotary embedding, whose type "dynamic" has a fixed factor `alpha` of the base here."""
    if fields.rope_settings()["rope_type"] != "dynamic":
        return fields.rope(dim)
    base, alpha = fields.rope_number("rope_theta", 1e4, above=1.0), fields.rope_number("alpha")
    return Rope(dim, base * alpha ** (dim / max(dim - 2, 1)))


def llama4(fields: Fields) -> DecoderConfig:
    """Llama 4: top-1 sigmoid routing that scales inputs, a shared expert, chunked attention, unrotated layers."""
    router = TopK(1, score=jax.nn.sigmoid, renormalise=False, scale_inputs=True)
    rope = fields.rope(fields.head_dim(), interleaved=True)
    config = _biased(fields, _decoder(fields, router, "num_local_experts", "intermediate_size", rope=rope))
    unrotated, dense, tunes = _unrotated(fields), _llama_dense(fields), fields.get("attn_temperature_tuning")
    if not tunes:
        fields.ignore("attn_scale", "floor_scale")
    return replace(
        config,
        dense_mlp_dim=fields.integer_if(bool(dense), "intermediate_size_mlp"),
        dense_layers=dense,
        shared_mlp_dim=config.mlp_dim,
        qk_norm=HeadNorm.UNWEIGHTED if fields.flag("use_qk_norm", True) else None,
        chunks=_chunks(fields, unrotated),
        unrotated_layers=unrotated,
        temperature=Temperature(fields.number("floor_scale", above=0.0), fields.number("attn_scale"))
        if tunes
        else None,
    )


def _unrotated(fields: Fields) -> tuple[int, ...]:
    """Return the layers without rotary positions: those with 0 in `no_rope_layers`."""
    num_layers, rotated = fields.num_layers(), fields.integers("no_rope_layers")
    interval = max(fields.integer("no_rope_layer_interval"), 1)
    if not rotated:
        return tuple(range(interval - 1, num_layers, interval))
    if len(rotated) != num_layers:
        raise ValueError(f"config.json: no_rope_layers has {len(rotated)} entries; expected {num_layers}")
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)


def _llama_dense(fields: Fields) -> tuple[int, ...]:
    num_layers, step = fields.num_layers(), max(fields.integer("interleave_moe_layer_step"), 1)
    sparse: Any = range(step - 1, num_layers, step)
    if fields.get("moe_layers") is not None:
        sparse = fields.integers("moe_layers")
    return tuple(layer for layer in range(num_layers) if layer not in sparse)


def _chunks(fields: Fields, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the chunk of each layer, `None` for full attention; empty if all layers are full."""
    num_layers, size = fields.num_layers(), fields.integer("attention_chunk_size", 0) or None
    kinds = fields.kinds("layer_types", (CHUNKED, FULL))
    if not kinds:
        kinds = [FULL if size is None or layer in unrotated else CHUNKED for layer in range(num_layers)]
    if CHUNKED not in kinds:
        return ()
    if size is None:
        raise ValueError(f"config.json: attention_chunk_size is {shown(size)}; expected a number for {CHUNKED}")
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def phimoe(fields: Fields) -> DecoderConfig:
    """Phi-3.5-MoE: SparseMixer routing, layer norms with biases, LongRoPE; inference alone."""
    router = SparseMixer(2, renormalise=False, jitter=fields.number("router_jitter_noise"))
    rope = _long_rope(fields, fields.head_dim())
    config = _biased(fields, _decoder(fields, router, "num_local_experts", "intermediate_size", rope=rope))
    has_bias = fields.flag("lm_head_bias", False)
    return replace(config, rope=rope, windows=_windows(fields), layer_norm=True, head_bias=has_bias)


def _long_rope(fields: Fields, head_dim: int) -> Rope:
    settings = fields.rope_settings()
    if settings["rope_type"] != "longrope":
        fields.ignore(POSITIONS)
        return fields.rope(head_dim)

    def numbers(name: str) -> tuple[float, ...]:
        given = settings.get(name)
        if not isinstance(given, list):
            raise ValueError(f"config.json: rope_parameters.{name} is {shown(given)}; expected a list of numbers")
        return tuple(checked_number(f"rope_parameters.{name}", value) for value in given)

    positions = fields.rope_number(POSITIONS, fields.get(POSITIONS))
    fields.require(POSITIONS, positions)
    return LongRope(
        dim=head_dim,
        base=fields.rope_number("rope_theta", above=1.0),
        original_positions=math.ceil(positions),
        short_factors=numbers("short_factor"),
        long_factors=numbers("long_factor"),
        short_scale=fields.rope_number("short_mscale"),
        long_scale=fields.rope_number("long_mscale"),
    )


def gpt_oss(fields: Fields) -> DecoderConfig:
    """GPT-OSS: clamped SwiGLU and router with biases, attention sinks, a window in every other layer, YaRN."""
    # A softmax over the chosen logits equals the renormalised softmax over all logits.
    router = TopK(_top_k(fields), renormalise=True, logit_bias=True)
    config = _biased(fields, _decoder(fields, router, "num_local_experts", "intermediate_size"))
    # Published files have these names, too.
    fields.require("experts_per_token", router.num_experts_per_tok)
    fields.require("initial_context_length", config.rope.original_positions)
    return replace(
        config,
        expert_bias=True,
        sinks=True,
        windows=fields.windows([LAYER_TYPES[layer % 2] for layer in range(config.num_layers)]),
        activation=ClampedSwiGLU(fields.number("swiglu_limit"), fields.number("swiglu_alpha")),
    )

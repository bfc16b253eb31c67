"""Fields of a `config.json` that change no output of a model whose architecture does not read them."""

from typing import Any

_ANY_VALUE = (
    # Names and versions.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "for_llm_compressor",
    "model_name",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    # Read by others: registry, loader, quantization, tokenizer.
    "dtype",
    "model_type",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "quantization_config",
    "torch_dtype",
    "bos_token_id",
    "decoder_start_token_id",
    "eod_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    # Outputs of `transformers` besides the logits, and its memory.
    "cache_implementation",
    "chunk_size_feed_forward",
    "finetuning_task",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "torchscript",
    "use_cache",
    "use_return_dict",
    # Parallel training. Results are those of one device.
    "ep_size",
    "pretraining_tp",
    # Length of the training context. Rotary settings have their own.
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    # Initial values.
    "initializer_range",
    # Losses: those of `models.train` are options.
    "aux_loss_alpha",
    "moe_capacity",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "seq_aux",
    # Multi-token prediction layers that published files do not contain.
    "mtp_transformer_layers",
    "num_mtp_modules",
    "use_mtp",
)

TRAINING_NOISE = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "input_jitter_noise",
    "resid_pdrop",
    "router_jitter_noise",
)
"""Dropout and noise, of training alone. `models.train` has neither and prints a line about values other than 0."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(_ANY_VALUE),
    **dict.fromkeys(TRAINING_NOISE),
    # Fields with an effect in some architecture, and their values without.
    "attention_chunk_size": (0,),
    "attn_logit_softcapping": (0,),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "first_k_dense_replace": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32",),
    "n_group": (0, 1),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "routed_scaling_factor": (1,),
    "router_logit_softcapping": (0,),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "topk_group": (0, 1),
    "zero_expert_num": (0,),
    # Settings of generation in files of older versions of `transformers`, which wrote all of them.
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "length_penalty": (1,),
    "max_length": (20,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "pruned_heads": ({},),
    "repetition_penalty": (1,),
    "temperature": (1,),
    "top_k": (50,),
    "top_p": (1,),
    "typical_p": (1,),
}
"""Values without effect by name, besides null and false, which have none in any field; `None` for every value."""

PLAIN_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""Lists with a kind per layer, and their kind without effect."""

ROPE_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    "longrope": ("long_factor", "long_mscale", "original_max_position_embeddings", "short_factor", "short_mscale"),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
}
"""Rotary settings with an effect by `rope_type`, besides `rope_type` and `rope_theta`."""


def has_effect(name: str, value: Any) -> bool:
    """Return whether an unread field may change the outputs."""
    if value is None or value is False:
        return False
    if name in PLAIN_KINDS and isinstance(value, list):
        return any(kind != PLAIN_KINDS[name] for kind in value)
    values = WITHOUT_EFFECT.get(name, ())
    # True equals 1 in Python.
    return values is not None and not any(value == one and value is not True for one in values)


def values_without_effect(name: str) -> str:
    """Return the values of an unread field without effect, for a message."""
    return " or ".join(["no value", *map(str, WITHOUT_EFFECT.get(name) or ())])

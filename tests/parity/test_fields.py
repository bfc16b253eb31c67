"""Every field of a `config.json` has the effect, and the default, that it has in `transformers`."""

import dataclasses
import json

import pytest
import transformers

from models.architectures.config_json import Fields
from models.architectures.registry import ARCHITECTURES, configured
from tests.parity.references import CONFIGS, TINY, USUAL

SIZES = set(TINY["sizes"])
"""Fields without which a file is refused, although `transformers` has a default."""

WITHOUT_EFFECT = set(TINY["without_effect"])
"""Fields that do not change logits: training, generation, and lengths, as rotary settings have their own."""

DERIVED = {
    "llama4_text": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    "qwen2_moe": {"head_dim", "max_window_layers", "sliding_window"},
    "qwen3_moe": {"sliding_window", "max_window_layers"},
    "dots1": {"max_window_layers"},
    "phimoe": {"original_max_position_embeddings"},
    "solar_open": {"first_k_dense_replace", "intermediate_size"},
}
"""Fields that repeat others: `transformers` ignores them, or they only matter for a refused feature."""

LATENT_KINDS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "mistral4")
REPEATED = {kind: {"num_key_value_heads": 8} for kind in LATENT_KINDS}
REPEATED["glm_moe_dsa"]["first_k_dense_replace"] = 1
"""Fields that repeat the eight heads of a test, or a list with a kind per layer; another value is refused."""

REQUIRED_ROPE = {
    "factor",
    "high_freq_factor",
    "long_factor",
    "long_mscale",
    "low_freq_factor",
    "short_factor",
    "short_mscale",
}
"""Rotary settings without which `transformers` refuses a file."""


def ours(raw):
    """Return the configuration read from the fields, or the refusal."""
    try:
        config = configured(Fields(json.dumps(raw)))
    except ValueError as error:
        return str(error)
    rope = config.rope
    # Only YaRN and llama3 depend on the length of the pretraining context.
    rope = dataclasses.replace(rope, original_positions=rope.original_positions * (rope.kind in ("yarn", "llama3")))
    return dataclasses.replace(config, source="", rope=rope)


def whole(name, **changed):
    """Return all fields that `transformers` writes for a tiny model."""
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**(USUAL | sizes | changed)).to_dict()


def filled_in(name, raw):
    """Return the fields with the defaults of `transformers` in place of absent ones."""
    return getattr(transformers, CONFIGS[name][0])(**{k: v for k, v in raw.items() if k != "model_type"}).to_dict()


def other(value):
    """Return another value of the type of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value + 2
    if isinstance(value, float):
        return 2 * value + 0.5
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else [*value, "other"]
    return {**value, "rope_type": "other"} if isinstance(value, dict) else "other" if value else 3


@pytest.mark.parametrize("name", CONFIGS)
def test_absent_fields_have_the_defaults_of_transformers(name):
    repeated = REPEATED.get(name, {})
    fields = whole(name, num_attention_heads=8, **repeated)
    for field in fields.keys() - {"model_type"}:
        raw = {key: value for key, value in fields.items() if key != field}
        read = ours(raw)
        if isinstance(read, str) and "is None; expected" in read:
            assert field in SIZES, (field, read)
            continue
        # The default of transformers does not fit other tiny sizes, so the file is refused.
        if (name, field) != ("gpt_oss", "num_hidden_layers") and field not in repeated:
            assert read == ours(filled_in(name, raw)), field


@pytest.mark.parametrize("name", CONFIGS)
def test_absent_rope_settings_have_the_defaults_of_transformers(name):
    fields = whole(name)
    for key in fields["rope_parameters"].keys() - REQUIRED_ROPE:
        rope = {one: value for one, value in fields["rope_parameters"].items() if one not in (key, "type")}
        raw = fields | {"rope_parameters": rope}
        assert ours(raw) == ours(filled_in(name, raw)), key


@pytest.mark.parametrize("name", CONFIGS)
def test_every_other_value_is_read_or_refused(name):
    fields = whole(name)
    base, ignored = ours(fields), WITHOUT_EFFECT | DERIVED.get(name, set())
    for field, value in fields.items():
        if field not in ignored:
            assert ours(fields | {field: other(value)}) != base, field


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("glm4_moe", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("gpt_oss", "hidden_act", "gelu"),
        ("mixtral", "attention_multiplier", 0.5),
        ("mixtral", "logit_scale", 0.5),
        ("qwen3_moe", "final_logit_softcapping", 30.0),
        ("qwen3_moe", "attn_logit_softcapping", 30.0),
        ("mixtral", "mlp_bias", True),
        ("qwen3_moe", "attention_chunk_size", 128),
        ("qwen3_moe", "attn_temperature_tuning", True),
        ("llama4_text", "num_experts_per_tok", 2),
        ("phimoe", "num_experts_per_tok", 3),
        ("olmoe", "clip_qkv", 8.0),
        ("ernie4_5_moe", "use_bias", True),
        ("minimax_m2", "use_qk_norm", False),
    ],
)
def test_fields_that_change_the_outputs_are_refused_by_name(name, field, value):
    fields = whole(name)
    assert not isinstance(ours(fields), str)
    assert ours(fields | {field: value}).startswith(f"config.json: {field} is ")


def test_phimoe_reads_the_jitter_of_its_router():
    """Elsewhere it has an effect in training alone."""
    fields = whole("phimoe")
    assert ours(fields | {"router_jitter_noise": 0.2}).router.jitter == 0.2


@pytest.mark.parametrize("name", ["short_factor", "long_factor", "short_mscale", "long_mscale"])
def test_longrope_without_a_setting_is_refused(name):
    fields = whole("phimoe")
    rope = {key: value for key, value in fields["rope_parameters"].items() if key != name}
    assert ours(fields | {"rope_parameters": rope}).startswith(f"config.json: rope_parameters.{name} is None; expected")


def test_llama4_reads_the_steps_of_its_lists():
    fields = {key: value for key, value in whole("llama4_text").items() if not key.endswith("_layers")}
    fields |= {"num_hidden_layers": 4, "layer_types": None, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3}
    config = ours(fields)
    assert (config.dense_layers, config.unrotated_layers, config.chunks) == ((0, 2), (2,), (5, 5, None, 5))
    assert "layer_types is ['sliding" in ours(fields | {"layer_types": ["sliding_attention"] * 4})


def test_kimi_k2_is_deepseek_v3():
    fields = whole("deepseek_v3") | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert ours(fields | {"model_type": "kimi_k2"}) == ours(fields)
    del fields["n_group"]
    assert "n_group is None; expected" in ours(fields | {"model_type": "kimi_k2"})


def test_every_architecture_is_compared():
    assert ARCHITECTURES.keys() == CONFIGS.keys() | {"kimi_k2"}

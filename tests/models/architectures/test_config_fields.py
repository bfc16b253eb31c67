"""Every field of a `config.json` has an effect, is refused by name, or is in the table of fields without effect."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from flax import nnx

from jax_moe_lb import System
from models.architectures.config_json import EXPERT_COUNTS, ROPE_SETTINGS, WITHOUT_EFFECT, Fields, has_effect
from models.architectures.published import num_params
from models.architectures.registry import ARCHITECTURES, configured
from models.config import ParallelConfig
from models.decoder.model import Decoder
from models.mesh import make_mesh
from models.tiny_checkpoint import tiny_config, write_tiny
from models.upcycle import upcycle, upcycled_config

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_files.yaml").read_text())

WITH_EFFECT = {
    "activation_situ_beta": 2.0,
    "add_swa_attention_sink_bias": True,
    "attention_multiplier": 0.5,
    "attention_value_scale": 0.7,
    "clip_qkv": 8.0,
    "dual_chunk_attention_config": {"chunk_size": 8},
    "expert_swiglu_limit_list": [0, 4.0],
    "hc_mult": 4,
    "hidden_clamp": 1e6,
    "index_topk": 2048,
    "kda_layers": [0],
    "layer_norm_eps": 1e-5,
    "layernorm_mlp_alpha": 3.5,
    "linear_attn_config": {"head_dim": 8},
    "mlp_bias": True,
    "moe_renormalize": True,
    "moe_router_dtype": "bfloat16",
    "moe_router_norm_min": 1e-3,
    "norm_topk_prob_eps": 1e-3,
    "num_zero_experts": 2,
    "postnorm": True,
    "query_pre_attn_scalar": 64,
    "rope_ntk_alpha": 2.0,
    "router_bias": True,
    "router_logit_softcapping": 30.0,
    "routed_scaling_factor": 2.5,
    "scale_depth": 1.4,
    "scoring_func": "sqrtsoftplus",
    "share_expert_swiglu_limit_list": [0, 5.0],
    "swiglu_limit": 10.0,
    "swiglu_limits": [7.0],
    "use_gated_activation": True,
    "use_gemma_norm": True,
    "value_norm": True,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
}
"""Fields of published models of other architectures, with values that change outputs there."""

SIZES = {"dots1": {"max_window_layers": 1}, "llama4_text": {"num_hidden_layers": 5}}
"""Fields of a tiny model that make more of its fields have an effect."""

IGNORED = {
    "glm_moe_dsa": {"index_skip_topk_offset"},
    "minimax_m2": {"mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta"},
    "phimoe": {"original_max_position_embeddings"},
    "qwen2_moe": {"intermediate_size", "max_window_layers", "sliding_window"},
    "qwen3_moe": {"intermediate_size", "max_window_layers", "sliding_window"},
    "qwen3_5_moe_text": {"intermediate_size"},
    "qwen3_next": {"intermediate_size", "max_window_layers", "sliding_window"},
    "solar_open": {"intermediate_size"},
}
"""Fields of a tiny model that other fields make void, by architecture."""


def base(name):
    """Return the fields of a tiny model, with all defaults but lists that replace other fields."""
    defaults = {key: value for key, value in ARCHITECTURES[name].defaults.items() if key != "rope_parameters"}
    return defaults | json.loads(tiny_config(name)) | SIZES.get(name, {})


def reading(raw):
    """Return the fields after an architecture has read them."""
    architecture = ARCHITECTURES[raw["model_type"]]
    fields = Fields(json.dumps(raw)).with_defaults(architecture.defaults)
    architecture.read(fields)
    return fields


def outcome(raw):
    """Return the configuration without its text, or the refusal."""
    try:
        return dataclasses.replace(configured(Fields(json.dumps(raw))), source="")
    except ValueError as error:
        return str(error)


def others(value):
    """Return other values for a field, mostly of its type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 2, value + 0.5, -3]
    return [True, 3, 0.25, "other", ["other"], [0], {"other": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED["models"])
def test_the_files_of_published_models_are_read(name):
    model = PUBLISHED["models"][name]
    assert round(num_params(configured(Fields(json.dumps(model["file"]))))[0] / 1e9, 1) == model["billions"]


def test_every_architecture_has_a_published_file():
    assert {model["file"]["model_type"] for model in PUBLISHED["models"].values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_field_that_is_read_changes_the_model_or_is_refused(name):
    raw = base(name)
    fields, before = reading(raw), outcome(raw)
    assert not isinstance(before, str), before
    assert fields.ignored == IGNORED.get(name, set())
    rotary = {name for name in fields.read if name.startswith("rope_parameters.")}
    for field in fields.read - fields.ignored - rotary - {"max_position_embeddings"}:
        unchanged = [value for value in others(raw.get(field)) if outcome(raw | {field: value}) == before]
        # The only supported value of an absent field.
        assert unchanged in ([], [True]) if field not in raw else not unchanged, (field, unchanged)


@functools.cache
def known_fields():
    """Return the names of all fields that an architecture reads, or that have an effect elsewhere."""
    read = set().union(*(reading(base(name)).read for name in ARCHITECTURES))
    return {field for field in read | WITH_EFFECT.keys() if "." not in field}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_other_field_is_refused_by_name(name):
    raw = base(name)
    fields = reading(raw)
    known = fields.read | fields.ignored | set(EXPERT_COUNTS)
    refused, before = 0, outcome(raw)
    for field in (known_fields() - known) | {"a_field_of_next_year"}:
        for value in (WITH_EFFECT.get(field, 7.5), True, "other", {"other": 1}):
            found = outcome(raw | {field: value})
            if has_effect(field, value):
                assert isinstance(found, str), (field, value)
                assert found.startswith(f"config.json: {field} is "), found
                assert "\n" not in found
                assert str(value)[:3] in found
                refused += 1
            else:
                assert found == before, (field, value)
        for value in (None, False):
            assert outcome(raw | {field: value}) == before, (field, value)
    assert refused > 3 * len(WITH_EFFECT.keys() - known)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fields_without_effect_change_nothing(name):
    raw, before = base(name), outcome(base(name))
    fields = reading(raw)
    for field, values in WITHOUT_EFFECT.items():
        if field not in fields.read and field != "model_type":
            for value in (1, "other", [1]) if values is None else values:
                assert outcome(raw | {field: value}) == before, (field, value)


def test_no_field_without_effect_has_one_in_a_tested_model():
    """Fields read by an architecture may be in the table with a value without effect alone, or as noise and lengths."""
    read = set().union(*(reading(base(name)).read for name in ARCHITECTURES))
    always = {field for field in read if WITHOUT_EFFECT.get(field, ()) is None}
    assert always == {"max_position_embeddings", "router_jitter_noise"}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("fields", PUBLISHED["dense"], ids=lambda fields: fields["model_type"])
def test_upcycled_files_of_published_dense_models_are_read(fields, share):
    text = upcycled_config(Fields(json.dumps(fields)), 8, 2, share)
    assert configured(Fields(text)).num_experts == 8


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_a_seed_is_a_natural_number(tmp_path, seed):
    with pytest.raises(ValueError, match=r"^seed is "):
        write_tiny("mixtral", tmp_path / "tiny", seed)
    with pytest.raises(ValueError, match=r"^seed is "):
        upcycle(tmp_path, tmp_path / "mixture", 8, 2, seed=seed)


SCALED = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
}


def scaled(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, **SCALED[kind], **settings}}


OUT_OF_RANGE = [
    ("mixtral", {"rope_theta": 0}, "rope_theta is 0; expected a finite number above 1"),
    ("mixtral", scaled("yarn", factor=-4.0), "factor is -4.0; expected a finite number above 0"),
    ("mixtral", scaled("llama3", factor=0), "factor is 0; expected a finite number above 0"),
    (
        "mixtral",
        scaled("yarn", original_max_position_embeddings=0),
        "embeddings is 0; expected a finite number above 0",
    ),
    ("mixtral", scaled("yarn", beta_fast=0), "beta_fast is 0; expected a finite number above 0"),
    ("mixtral", scaled("yarn", mscale="x"), "mscale is 'x'; expected a finite number"),
    ("mixtral", scaled("yarn", truncate="false"), "truncate is 'false'; expected true or false"),
    ("mixtral", {"rms_norm_eps": -1e-5}, "norm_eps is -1e-05; expected a finite number, at least 0"),
    ("deepseek_v3", scaled("linear", mscale_all_dim=[1]), "mscale_all_dim is [1]; expected a finite number"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; expected an integer, 1 to"),
    ("glm_moe_dsa", {"index_head_dim": 8}, "index_head_dim is 8; expected an integer, 16 to"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window is 0; expected an integer, 1 to"),
    ("granitemoe", {"logits_scaling": 0}, "logits_scaling is 0; expected a finite number above 0"),
    ("hunyuan_v1_moe", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "alpha is -1; expected a finite number"),
    ("llama4_text", {"floor_scale": 0}, "floor_scale is 0; expected a finite number above 0"),
    ("phimoe", {"router_jitter_noise": -1}, "jitter is -1.0; expected a finite number, at least 0"),
    ("mixtral", {"model_type": []}, "model_type is []; expected one of"),
]
"""Values that would make the outputs NaN, or fail in a later computation."""


LINES = "a\n" * 99
TWO_FACTORS = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"factor": 4.0}}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("object_name", ["rope_parameters", "rope_scaling"])
def test_every_rotary_setting_changes_the_embedding_or_is_refused(kind, object_name):
    settings = {"rope_type": kind, **SCALED[kind]}
    raw = json.loads(tiny_config("deepseek_v3"))
    before = outcome(raw | {object_name: settings})
    assert not isinstance(before, str), before
    known = set().union(*ROPE_SETTINGS.values())
    for key in known | {"partial_rotary_factor", "mrope_section"}:
        value = 0.75 if key != "truncate" else kind != "yarn"
        after = outcome(raw | {object_name: settings | {key: value}})
        assert after != before, key
        if key not in ROPE_SETTINGS[kind]:
            assert after.startswith(f"config.json: rope_parameters.{key} is {value}; expected no value"), after


@pytest.mark.parametrize(
    ("name", "changed", "expected"),
    [
        ("mixtral", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0 and 10000.0"),
        ("mixtral", TWO_FACTORS, "factor is 2.0 and 4.0; expected one value"),
        ("mixtral", {"rope_scaling": {"rope_type": "linear", "type": "yarn"}}, "rope_type is 'linear' and type 'yarn'"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.0}}, "partial_rotary_factor is 0.5; expected 1.0"),
        (
            "minimax_m2",
            {"rotary_dim": 8, "partial_rotary_factor": 1.0},
            "partial_rotary_factor is 1.0; expected rotary",
        ),
        ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts is 8; expected 16"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token is 3; expected 2"),
        ("deepseek_v3", {"qk_head_dim": 16}, "qk_head_dim is 16; expected 32"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 2}, "first_k_dense_replace is 1; expected 0"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob is False; expected True"),
        ("mixtral", {"rope_parameters": {LINES: 1}, "rope_scaling": {LINES: 2}}, "is 1 and 2; expected one value"),
        ("mixtral", {"swiglu_limit\n" + "x" * 100: 7.0}, "'swiglu_limit\\n"),
        *OUT_OF_RANGE,
    ],
)
def test_invalid_or_contradicting_settings_are_refused(name, changed, expected):
    found = outcome(json.loads(tiny_config(name)) | changed)
    assert isinstance(found, str)
    assert expected in found
    assert "\n" not in found


def leaves(value, path=""):
    """Return the fields of nested dataclasses by path, without those for messages, which are not compared."""
    if not dataclasses.is_dataclass(value):
        return {path: value}
    names = [field.name for field in dataclasses.fields(value) if field.compare]
    parts = [leaves(getattr(value, name), f"{path}.{name}") for name in names]
    return {key: one for part in parts for key, one in part.items()} | {f"{path}.": type(value).__name__}


def changes():
    """Return a pair of configurations for each set of fields of `DecoderConfig` that a field of a file changes."""
    found = {}
    for name in ARCHITECTURES:
        raw = base(name)
        before = outcome(raw)
        for field in sorted(reading(raw).read):
            for value in others(raw.get(field)):
                after = outcome(raw | {field: value})
                if not isinstance(after, str):
                    one, two = leaves(before), leaves(after)
                    differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
                    found.setdefault(tuple(differing), (f"{name}: {field}", before, after))
    # The pretraining length has an effect on scaled embeddings alone.
    return {key: pair for key, pair in found.items() if set(key) - {".rope.original_positions"}}


def program(config):
    """Return the parameters and the lowered program of a model as text, or the refusal."""
    mesh = make_mesh(ParallelConfig(expert_parallel=1))
    tokens = jax.ShapeDtypeStruct((1, 80), jnp.int32)
    try:
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, mesh=mesh, system=System(), rngs=nnx.Rngs(0))))
        lowered = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)).lower(state, tokens)
    except ValueError as error:
        return str(error)
    return str(state), lowered.as_text()


@pytest.mark.thorough
def test_every_change_of_a_configuration_changes_the_program_or_its_parameters():
    for field, before, after in changes().values():
        one, two = (dataclasses.replace(config, source="{}") for config in (before, after))
        assert program(one) != program(two), field

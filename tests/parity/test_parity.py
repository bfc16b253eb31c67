"""Values, gradients and generated tokens equal `transformers`, for every system and mesh."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jax_moe_lb import raise_on_fault
from jax_moe_lb.layer.systems import system_named, system_names
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import ParallelConfig
from models.decoder.model import Decoder
from models.mesh import make_mesh
from models.pretrained.generation import Generator
from models.pretrained.loading import from_pretrained
from models.pretrained.quantized import CheckpointWeights
from models.pretrained.safetensors import TensorFolder
from models.pretrained.saving import named_tensors, save_pretrained
from models.pretrained.weight_sync import update_weights
from models.upcycle import upcycle
from tests.marks import parametrize
from tests.parity.references import CONFIGS, NEW_TOKENS, PROMPT, logits_of, make_dense, make_model, read_tensors

MESHES = {"1x8": ParallelConfig(1, 8), "2x4": ParallelConfig(2, 4), "1x1": ParallelConfig(1, 1)}
DISTINCT = ("mixtral", "deepseek_v3", "gpt_oss")
"""Architectures with every kind of routing; the others combine their features anew."""
COMBINED = [name for name in CONFIGS if name not in DISTINCT]
CACHED = (*DISTINCT, "qwen3_next", "glm_moe_dsa")
"""Architectures with every kind of cache."""
OWN_LAYERS = ("qwen3_next", "glm_moe_dsa", "deepseek_v2", "llama4_text")
"""Architectures with attention or experts of their own, whose gradients are compared in every run."""
SAVED = (*DISTINCT, "qwen3_moe", "glm4_moe")
"""Architectures whose checkpoints are written; an older `transformers` knows them."""
LOGITS = 1e-4
GRADIENTS = 1e-3
"""Tolerance relative to the largest entry of the tensor."""


def loaded(reference, mesh, system, **options):
    return from_pretrained(reference.folder, make_mesh(MESHES[mesh]), system_named(system), **options)


def loss_of(graph, tokens, params, rest):
    logits, stats = nnx.merge(graph, params, rest, copy=True)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), (logits, stats)


def compare_logits(reference, mesh, system, **options):
    model = loaded(reference, mesh, system, **options)
    logits, stats = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(reference.tokens, jnp.int32))
    raise_on_fault(stats)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=LOGITS)


def compare(reference, mesh, system, **options):
    model = loaded(reference, mesh, system, **options)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tokens = jnp.asarray(reference.tokens, jnp.int32)
    step = jax.jit(jax.value_and_grad(partial(loss_of, graph, tokens), has_aux=True))
    (_, (logits, stats)), gradients = step(params, rest)
    raise_on_fault(stats)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=LOGITS)
    compared = dict(named_tensors(model.config, gradients))
    expected = {name: value for name, value in reference.gradients.items() if "e_score_correction_bias" not in name}
    assert compared.keys() == expected.keys()
    for name, value in expected.items():
        # An unused expert has zero gradients in both, as does an indexer, which both do not train.
        assert np.abs(value).max() > 0 or ".experts." in name or ".indexer." in name, f"{name} was not used"
        np.testing.assert_allclose(compared[name], value, rtol=0, atol=GRADIENTS * np.abs(value).max(), err_msg=name)
    return stats


@parametrize(
    "name, mesh, system",
    [
        # Without binaries `exact` compiles its planner in jnp: 30 CPU seconds for a decoder.
        *[(name, "1x8", "greedy") for name in DISTINCT if name != "gpt_oss"],
        *[(name, "1x1", "plain") for name in ("gpt_oss", *OWN_LAYERS)],
        ("deepseek_v3", "2x4", "plain"),
    ],
    [*[(name, "1x8", "exact") for name in CONFIGS], *[(name, "2x4", "plain") for name in SAVED]],
)
def test_logits_and_gradients(reference, name, mesh, system):
    stats = compare(reference(name), mesh, system)
    if system in ("greedy", "exact"):
        assert (stats.load_after.max(-1) < stats.load_before.max(-1)).any(), "nothing was balanced"


@pytest.mark.parametrize("name", [name for name in COMBINED if name not in OWN_LAYERS])
def test_logits(reference, name):
    """`test_logits_and_gradients` of the nightly run compares the gradients."""
    compare_logits(reference(name), "1x1", "plain")


OTHERS = [name for name in system_names() if name not in ("plain", "exact")]
ALIKE = ("eplb", "eplb_plus", "fastermoe", "lplb")
"""Systems with the transport, and so the backward pass, of `greedy`, and other planners."""
SPREAD = [
    (system, mesh, SAVED[(i + 3 * j) % len(SAVED)], i % 2 == j)
    for i, system in enumerate(OTHERS)
    for j, mesh in enumerate(("1x8", "2x4"))
]


@pytest.mark.parametrize(("system", "mesh", "name", "has_turn"), SPREAD)
@pytest.mark.thorough
def test_every_system(reference, system, mesh, name, has_turn):
    """Each system runs on both meshes with different architectures, as all pairs would take an hour; gradients on one
    mesh.
    """
    compared = compare if has_turn and system not in ALIKE else compare_logits
    compared(reference(name), mesh, system)


@pytest.mark.thorough
def test_the_other_mesh_of_plain(reference):
    compare_logits(reference("gpt_oss"), "1x8", "plain")


def test_mxfp4_is_read_as_transformers_does(tmp_path):
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 10, 4, 16), np.uint8), rng.integers(110, 140, (3, 10, 4), np.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(torch.asarray(blocks), torch.asarray(scales), dtype=torch.float32).numpy()
    weights = CheckpointWeights(TensorFolder(tmp_path), Fields('{"quantization_config": {"quant_method": "mxfp4"}}'))
    np.testing.assert_array_equal(weights.read("w"), expected)
    gate = (1, slice(None), slice(0, None, 2))
    np.testing.assert_array_equal(weights.read("w", gate), expected[gate])


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_integers_are_read_as_by_their_library(bits, tmp_path):
    # The run with an older transformers collects this file, too.
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    half, rng = 2 ** (bits - 1), torch.Generator().manual_seed(0)
    integers = torch.randint(-half, half, (6, 64), generator=rng, dtype=torch.int8)
    scales = torch.rand(6, 2, generator=rng).bfloat16()
    packed = {"w_packed": pack_to_int32(integers, bits), "w_scale": scales, "w_shape": torch.tensor([6, 64])}
    save_torch(packed, tmp_path / "model.safetensors")
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = CheckpointWeights(TensorFolder(tmp_path), Fields(json.dumps({"quantization_config": settings})))
    expected = (integers.float() * scales.float().repeat_interleave(32, 1)).numpy()
    np.testing.assert_array_equal(found.read("w"), expected)
    np.testing.assert_array_equal(found.read("w", (slice(1, 4), slice(3, 40, 2))), expected[1:4, 3:40:2])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.thorough
def test_bfloat16_within_its_rounding(reference, name):
    """The median token differs from float32 as much as `transformers` in bfloat16 does; some tokens change experts."""
    ref = reference(name)
    model = loaded(ref, "1x8", "plain", compute_dtype="bfloat16", param_dtype="bfloat16")
    logits, _ = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(ref.tokens, jnp.int32))
    assert logits.dtype == jnp.float32
    ours, theirs = (np.median(np.abs(x - ref.logits).max(-1)) for x in (np.asarray(logits), ref.rounded))
    assert 0 < ours < 2 * theirs


@parametrize(
    "name, system",
    [("mixtral", "greedy"), *[(name, "plain") for name in CACHED if name != "mixtral"]],
    [*((name, "plain") for name in CONFIGS if name not in CACHED), ("mixtral", "exact")],
)
def test_greedy_generation(reference, name, system):
    """Prompts of two lengths in one batch; the shorter ones are the reference's."""
    ref = reference(name)
    prompts = [*ref.tokens[:, :PROMPT].tolist(), ref.tokens[0].tolist()]
    found = Generator(loaded(ref, "2x4", system))(prompts, NEW_TOKENS)
    np.testing.assert_array_equal(found[:-1], ref.generated)


@parametrize("name", SAVED, CONFIGS)
def test_saved_checkpoints_are_read_by_transformers(reference, name, tmp_path):
    ref = reference(name)
    save_pretrained(loaded(ref, "2x4", "plain"), tmp_path / "out", max_file_bytes=20_000)
    save_pretrained(loaded(ref, "1x8", "plain"), tmp_path / "one")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    # Weights are at other file offsets, which may change the last bits of torch's products: 7e-7 was measured.
    expected = logits_of(ref.folder, ref.tokens)
    np.testing.assert_allclose(logits_of(tmp_path / "out", ref.tokens), expected, rtol=0, atol=LOGITS / 10)
    theirs = read_tensors(ref.folder)
    for name in ("out", "one"):
        ours = read_tensors(tmp_path / name)
        assert ours.keys() == theirs.keys()
        for tensor, value in theirs.items():
            np.testing.assert_array_equal(ours[tensor], value, err_msg=tensor)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_in_memory_of_transformers_are_read_and_written(name, tmp_path):
    """Weights of a trainer reach a loaded model, and a trainer takes them back, bit for bit."""
    theirs = make_model(name)
    state = {path: value.numpy() for path, value in theirs.state_dict().items()}
    assert any(path.endswith("experts.gate_up_proj") for path in state)
    config = configured(Fields(theirs.config.to_json_string(use_diff=False)))
    mesh, system = make_mesh(MESHES["1x1"]), system_named("plain")
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, mesh=mesh, system=system, rngs=nnx.Rngs(0))))
    ours = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    update_weights(ours, state)
    theirs.save_pretrained(tmp_path)
    if config.tie_embeddings:
        del state["lm_head.weight"]
    for packed, expected in ((True, state), (False, read_tensors(tmp_path))):
        written = dict(named_tensors(config, nnx.state(ours), packed=packed))
        assert written.keys() == expected.keys()
        for path, value in written.items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_mixture_of_copies_computes_what_the_dense_model_does(name, share, tmp_path):
    make_dense(name, tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "mixture", num_experts=8, experts_per_token=2, share=share)
    model = from_pretrained(tmp_path / "mixture", make_mesh(MESHES["2x4"]))
    tokens = np.arange(24).reshape(2, 12) + 1
    logits, stats = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32))
    assert (np.asarray(stats.counts).sum((0, 1, 2)) > 0).sum() > 2, "one expert alone was used"
    np.testing.assert_allclose(logits, logits_of(tmp_path / "dense", tokens), rtol=0, atol=LOGITS)
    np.testing.assert_allclose(logits_of(tmp_path / "mixture", tokens), np.asarray(logits), rtol=0, atol=LOGITS)

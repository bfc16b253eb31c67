"""Tensors in the layout of `transformers` 5 in memory, with all experts of a layer in two tensors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jax_moe_lb import relocate
from jax_moe_lb.layer.systems import system_named
from models.architectures.registry import ARCHITECTURES
from models.config import LoraConfig, ParallelConfig
from models.decoder.stacked import StackedDecoder
from models.mesh import make_mesh
from models.pretrained.loading import by_path, from_pretrained
from models.pretrained.saving import named_tensors, save_pretrained
from models.pretrained.weight_sync import update_weights
from models.tiny_checkpoint import tiny_config, write_tiny
from tests.models.small import are_equal, random_decoder, tensors_in, tiny_decoder

GRANITE = [
    ("moe.input_linear.weight", "moe.experts.gate_up_proj"),
    ("moe.output_linear.weight", "moe.experts.down_proj"),
    ("router.layer", "router"),
]
RENAMED = {
    "ernie4_5_moe": [("moe_statics", "gate.moe_statics")],
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "minimax_m2": [("block_sparse_moe", "mlp")],
    "mixtral": [("block_sparse_moe", "mlp")],
    "phimoe": [("block_sparse_moe.gate", "mlp.router"), ("block_sparse_moe", "mlp")],
}
"""Parts of names in published files that differ from the modules of `transformers` 5, by architecture."""

GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def in_memory(kind, tensors):
    """Return the tensors of a published file as `transformers` 5 holds them, from plain loops."""
    experts, packed = {}, {}
    for name, value in tensors.items():
        for published, renamed in RENAMED.get(kind, []):
            name = name.replace(published, renamed)
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            packed[name] = value
        else:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = value
    for module, parts in experts.items():

        def of(names, parts=parts):
            return [parts[key] for key in sorted(parts) if key[1] in names]

        packed[f"{module}.gate_up_proj"] = np.stack(list(map(np.concatenate, zip(of(GATES), of(UPS), strict=True))))
        packed[f"{module}.down_proj"] = np.stack(of(DOWNS))
    return packed


def random_model(kind, seed, **changed):
    """Return a tiny model with random parameters."""
    mesh = make_mesh(ParallelConfig(expert_parallel=1))
    return random_decoder(tiny_decoder(kind, **changed), mesh, seed=seed)


def tensors_of(model, **how):
    return dict(named_tensors(model.config, nnx.state(model), **how))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_both_directions_of_every_architecture(kind):
    source, other = random_model(kind, 1), random_model(kind, 2)
    published, packed = tensors_of(source), tensors_of(source, packed=True)
    assert are_equal(in_memory(kind, published), packed)
    assert any(name.endswith(".experts.gate_up_proj") for name in packed)
    assert not any(re.search(r"\.experts\.\d", name) for name in packed)
    assert not are_equal(tensors_of(other), published)
    update_weights(other, packed)
    assert are_equal(tensors_of(other), published)
    update_weights(other, {name: 2 * value for name, value in published.items()})
    assert are_equal(tensors_of(other), {name: 2 * value for name, value in published.items()})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "granitemoe"])
def test_a_packed_checkpoint_is_read_and_written(kind, tmp_path):
    write_tiny(kind, tmp_path / "published")
    published = tensors_in(tmp_path / "published")
    (tmp_path / "packed").mkdir()
    save_file(in_memory(kind, published), tmp_path / "packed" / "model.safetensors")
    (tmp_path / "packed" / "config.json").write_text(tiny_config(kind))
    model, other = (
        from_pretrained(tmp_path / name, make_mesh(ParallelConfig(2, 4))) for name in ("packed", "published")
    )
    assert are_equal(*(by_path(nnx.state(one, nnx.Param)) for one in (model, other)))
    save_pretrained(model, tmp_path / "again", packed=True)
    assert are_equal(tensors_in(tmp_path / "again"), in_memory(kind, published))
    save_pretrained(model, tmp_path / "back")
    assert are_equal(tensors_in(tmp_path / "back"), published)


@pytest.mark.slow
def test_a_sync_changes_the_logits_of_a_compiled_model(tmp_path):
    """The experts of a rank have moved; the program is not compiled again."""
    write_tiny("mixtral", tmp_path / "published")
    model = from_pretrained(tmp_path / "published", make_mesh(ParallelConfig(1, 4)), system_named("two_tier"))
    params, _ = relocate(nnx.state(model), (), np.stack([np.roll(np.arange(16), 3), np.arange(16)[::-1]]))
    nnx.update(model, params)
    tokens = jnp.arange(16).reshape(2, 8)
    run = jax.jit(lambda model, tokens: nnx.merge(*model)(tokens)[0])
    before = run(nnx.split(model), tokens)
    other = random_model("mixtral", 3)
    update_weights(model, tensors_of(other, packed=True))
    assert model.blocks[0].moe.homes[0] == 3
    after = run(nnx.split(model), tokens)
    assert run._cache_size() == 1
    assert not np.allclose(after, before)
    np.testing.assert_allclose(after, other(tokens)[0], atol=2e-3, rtol=2e-3)
    assert are_equal(tensors_of(model), tensors_of(other))


EXPERTS = "model.layers.1.mlp.experts"
BOTH, DOWN, ONE = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", f"{EXPERTS}.3.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(DOWN), f"tensors: missing: {DOWN}; expected"),
        (lambda t: t.update({ONE: np.zeros((32, 64), np.float32)}), f"tensors: not of this model: {ONE}; expected"),
        (lambda t: t.update({BOTH: t[BOTH].swapaxes(1, 2)}), f"{BOTH} has shape [16, 48, 64]; expected [16, 64, 48]"),
        (lambda t: t.update({BOTH: t[BOTH].astype(np.int32)}), f"{BOTH} has dtype int32; expected floats"),
        (
            lambda t: t.update({BOTH: t[BOTH].astype(jnp.float8_e4m3fn)}),
            f"{BOTH} has dtype float8_e4m3fn; expected floats of at least 16 bits",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(change, expected):
    model = random_model("qwen3_moe", 0, hidden_size=48)
    before, tensors = tensors_of(model), tensors_of(model, packed=True)
    change(tensors)
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(expected)}.*\Z"):
        update_weights(model, tensors)
    assert are_equal(tensors_of(model), before)


@pytest.mark.slow
def test_a_model_with_adapters_is_refused():
    model = random_model("mixtral", 0)
    with pytest.raises(ValueError, match="model has adapters; expected a model without"):
        update_weights(StackedDecoder(model, lora=LoraConfig(rank=2)), tensors_of(model))


@pytest.mark.parametrize("kind", ["glm4_moe", "mixtral"])
def test_layers_in_stacks_are_updated(kind):
    source, stacked = random_model(kind, 1), StackedDecoder(random_model(kind, 2))
    update_weights(stacked, tensors_of(source, packed=True))
    assert are_equal(by_path(nnx.state(stacked)), by_path(nnx.state(StackedDecoder(source))))

"""A dry run reports runs that do not fit the target; `ci/accelerators.sh` compiles one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_moe_lb.aot import Target, targets
from jax_moe_lb.aot.execution_counts import total
from jax_moe_lb.aot.flops import products
from jax_moe_lb.aot.hlo import parse_module
from models.architectures.published import published_config
from models.config import PRESETS, BatchConfig, ModelConfig, ParallelConfig, TrainConfig
from models.dry_run import step as module
from models.dry_run.step import decoder_flops_per_token, published_run
from models.train import app
from models.training.source import preset_config
from tests.models.small import programs_of, refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tiny --dry-run h100", "target is 'h100'; expected NAME:NODESxGPUS"),
        ("tiny --dry-run h100:1x8 --set batch.size=7", "batch.size is 7; expected a multiple of the 8 shards"),
        ("tiny --dry-run h100:1x8", "target h100:1x8 requires the compiler of cuda; run pip install"),
        ("tiny --dry-run h100:1x8 --data none", "data is 'none', which does not exist; expected"),
        ("tiny --dry-run h100:1x8 --set data.validation=none", "data is 'none', which does not exist; expected"),
        ("tiny --dry-run h100:1x8 --template-set a=1", "template_set is 'a=1'; expected a checkpoint with a chat"),
        ("tiny --dry-run h100:1x8 --resume --run-dir none", "resume is set, but 'none' has no checkpoint; expected"),
        ("tiny --dry-run h100:1x8 --resume --overwrite", "both overwrite and resume are set; expected one of them"),
        ("tiny --dry-run h100:1x8 --distributed", "distributed is set beside dry_run; expected one of them, as one"),
        ("mixtral-8x7b", "data.tokenizer is None; expected a tokenizer.json for mixtral-8x7b"),
        ("mixtral-8x7b --dry-run h100:8x8 --set model.num_layers=2", "model.num_layers is 2; expected none with"),
        ("mixtral-8x7b --dry-run h100:8x8 --set relocation.interval=9", "relocation.interval is 9; expected none with"),
        ("mixtral-8x7b --dry-run h100:8x8 --set batch.size=9", "batch.size is 9; expected a multiple of the 64 shards"),
        ("mixtral-8x7b --dry-run h100:8x8 --mesh expert=0", "parallel.expert_parallel is 0; expected at least 1"),
        ("mixtral-8x7b --dry-run h100:8x8", "target h100:8x8 requires the compiler of cuda; run pip install"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(arguments, message, monkeypatch):
    monkeypatch.setattr(targets, "has_compiler", lambda platform: False)
    assert refusal(app, *arguments.split()).startswith(message)


def test_the_data_of_the_run_decide_its_steps_and_padding(monkeypatch):
    corpus = SimpleNamespace(has_padding=True, check_length=lambda length: None, num_sequences=lambda length: 320)
    shown = []
    monkeypatch.setattr("models.train._corpus", lambda *of: corpus)
    monkeypatch.setattr(module, "show", lambda config, *of, has_padding: shown.append((config.steps, has_padding)))
    for options in ("", " --data text.jsonl --epochs 3"):
        assert CliRunner().invoke(app, f"tiny --dry-run h100:1x8{options}".split()).exit_code == 0
    assert shown == [(200, False), (30, True)]


def test_the_mesh_must_have_all_devices(monkeypatch):
    monkeypatch.setattr(Target, "devices", lambda self: [object()] * 64)
    with pytest.raises(ValueError, match="is 1 x 8; expected a product of 64, the devices of h100:8x8"):
        module.mesh_of(PRESETS["tiny"].parallel, Target.parse("h100:8x8"))


def test_devices_of_a_group_lie_side_by_side_and_stages_on_different_nodes(monkeypatch):
    devices = jax.devices()[:8]
    monkeypatch.setattr(Target, "devices", lambda self: devices)
    for parallel, axes in (
        (ParallelConfig(2, 4), {"data": 2, "expert": 4}),
        (ParallelConfig(2, 2, stages=2), {"stage": 2, "data": 2, "expert": 2}),
    ):
        mesh = module.mesh_of(parallel, Target.parse("h100:2x4"))
        assert mesh.axis_names == tuple(axes)
        assert np.array_equal(mesh.devices, np.array(devices).reshape(*axes.values()))
    message = "data_parallel x expert_parallel x stages is 2 x 4 x 2; expected a product of 8"
    with pytest.raises(ValueError, match=message):
        module.mesh_of(ParallelConfig(2, 4, stages=2), Target.parse("h100:2x4"))


@pytest.mark.parametrize(
    ("name", "target", "given", "expected"),
    [
        ("mixtral-8x7b", "h100:8x8", {}, (8, 8, 8)),
        ("glm-4.5", "h100:16x8", {}, (4, 32, 8)),
        ("deepseek-v3", "h100:32x8", {}, (4, 64, 8)),
        ("deepseek-v3", "h100:32x8", {"data_parallel": 8}, (8, 32, 8)),
        ("gpt-oss-120b", "h100:8x8", {"expert_parallel": 4}, (16, 4, 4)),
        ("deepseek-v3", "h100:16x8", {"stages": 4, "layers_before": 2}, (1, 32, 8)),
    ],
)
def test_usual_groups_of_published_models(name, target, given, expected):
    run = published_run(name, Target.parse(target), {"parallel": given})
    parallel = run.parallel
    assert (parallel.data_parallel, parallel.expert_parallel, parallel.ranks_per_domain) == expected
    assert run.batch.size == parallel.num_shards


def test_the_ideal_of_a_published_model():
    """Three times two operations for each active weight, and for each visible channel of keys and values."""
    config = published_config("gpt-oss-120b")
    width, heads = 64 * 64, (64 + 2 * 8) * 64
    layer = 2880 * heads + heads + width * 2880 + 2880 + 64 + 2 * 2880 + 128 * 2881
    layer += 4 * (3 * 2880 * 2880 + 3 * 2880)
    # Every other layer has a window of 128 tokens, the others none.
    keys = [(128 * 129 / 2 + (4096 - 128) * 128) / 4096, 4097 / 2]
    attention = sum(18 * seen * 64 * 2 * 64 for seen in keys)
    products = 36 * layer + 2880 + 201_088 * 2880
    assert decoder_flops_per_token(config, 4096) == pytest.approx(6 * (products + attention), rel=1e-3)


@pytest.mark.thorough
def test_the_ideal_is_what_a_model_without_waste_computes():
    """A single expert makes the router negligible, and a single device has no exchanges."""
    model = ModelConfig(num_layers=1, embed_dim=64, num_heads=2, mlp_dim=256, num_experts=1, experts_per_token=1)
    parallel = ParallelConfig(expert_parallel=1, system="plain", headroom=1.0)
    config = TrainConfig(model=model, parallel=parallel, batch=BatchConfig(2, 64))
    programs = programs_of(config)
    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    step = programs.step.lower(programs.state_shapes, tokens).compile()
    flops = total(products(parse_module(step.as_text())))
    ideal = decoder_flops_per_token(preset_config(model), 64) * config.tokens_per_step
    # A CPU runs the experts in custom calls, which are not counted.
    experts = 2 * 3 * 3 * 64 * 256 * config.tokens_per_step
    # Masked attention scores are computed and discarded.
    masked = 2 * 3 * 64 * 64 * config.tokens_per_step
    assert flops == pytest.approx(ideal - experts + masked, rel=0.05)

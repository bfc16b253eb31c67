"""A dry run refuses what does not fit the machine; `ci/accelerators.sh` compiles one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_moe_lb.compiled import Target, targets
from jax_moe_lb.compiled.executed import total
from jax_moe_lb.compiled.flops import products
from jax_moe_lb.compiled.hlo import parse_module
from models import dry_run as module
from models.parallel import make_mesh, make_system
from models.presets import ModelConfig, ParallelConfig, TrainConfig, preset
from models.train import app
from models.training import make_programs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "h100"], "target is 'h100'; expected NAME:NODESxGPUS"),
        (["--dry-run", "h100:1x8", "--batch-size", "7"], "batch_size is 7; expected a multiple of the 8 shards"),
        (["--dry-run", "h100:1x8"], "target h100:1x8 needs the compiler of cuda, which is not installed"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(arguments, message, monkeypatch):
    monkeypatch.setattr(targets, "has_compiler", lambda platform: False)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_the_mesh_must_have_all_devices(monkeypatch):
    monkeypatch.setattr(Target, "devices", lambda self: [object()] * 64)
    with pytest.raises(ValueError, match="is 1 x 8; expected a product of 64, the devices of h100:8x8"):
        module.mesh_of(preset("tiny").parallel, Target.parse("h100:8x8"))


def test_devices_of_a_group_lie_side_by_side(monkeypatch):
    devices = jax.devices()[:8]
    monkeypatch.setattr(Target, "devices", lambda self: devices)
    config = TrainConfig(parallel=ParallelConfig(data_parallel=2, expert_parallel=4))
    mesh = module.mesh_of(config.parallel, Target.parse("h100:2x4"))
    assert mesh.axis_names == ("data", "expert")
    assert np.array_equal(mesh.devices, np.array(devices).reshape(2, 4))


@pytest.mark.slow
def test_the_ideal_is_what_a_model_without_waste_computes():
    """One expert that all tokens take has no router to speak of, and one device no exchanges."""
    model = ModelConfig(num_layers=1, embed_dim=64, num_heads=2, mlp_dim=256, num_experts=1, experts_per_token=1)
    parallel = ParallelConfig(expert_parallel=1, system="plain", headroom=1.0)
    config = TrainConfig(model=model, parallel=parallel, batch_size=2, sequence_length=64)
    mesh = make_mesh(parallel)
    programs = make_programs(config, mesh, make_system(parallel))
    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    step = programs.step.lower(programs.state_shapes, tokens).compile()
    flops = total(products(parse_module(step.as_text())))
    ideal = module.ideal_flops_per_token(model, 64) * config.tokens_per_step
    # A CPU runs the experts in custom calls, which count for nothing here.
    experts = 2 * 3 * 3 * 64 * 256 * config.tokens_per_step
    # Attention to later tokens is computed, too, and thrown away.
    masked = 2 * 3 * 64 * 64 * config.tokens_per_step
    assert flops == pytest.approx(ideal - experts + masked, rel=0.05)

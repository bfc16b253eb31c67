"""A run continues with other ranks and another system, with an exact copy of the independent state."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jax_moe_lb.cli.app import app as tools
from models.config import CheckpointConfig, ParallelConfig, RelocationConfig
from models.mesh import make_mesh
from models.run_folder.checkpoints import CheckpointMetadata, Checkpoints, parts, restore_newest, steps_in
from models.run_folder.metrics import RunFolder
from models.training.loop import Run, _restored
from models.training.resume import BASE_FINGERPRINT, as_before, check_continues, layout_of
from tests.models.small import CONFIG, CORPUS, losses, on, programs, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [(2, 4), (1, 4), (4, 2), (1, 1)], ids=str)
@pytest.mark.thorough
def test_a_checkpoint_fits_any_mesh(trained_run, mesh, all_devices):
    config, lines = on(*mesh, system="eplb"), []
    made, layout = programs(config), layout_of(config.parallel)
    folder = RunFolder(trained_run).checkpoints
    step, state, kept = restore_newest(folder, made.state_shapes, lines.append, made.init, layout)
    assert (step, lines) == (8, [])
    data = {"sequences": 8 * CONFIG.batch.size, "tokens": 8 * CONFIG.tokens_per_step}
    assert kept == CheckpointMetadata(layout_of(CONFIG.parallel), data)
    assert jax.tree.structure(state) == jax.tree.structure(made.state_shapes)
    with Checkpoints(folder) as checkpoints:
        before = parts(checkpoints.restore(8, programs(CONFIG).state_shapes))
    assert not before["mesh"]
    # Parameters, and moments of the optimizer.
    assert len(before["state"]) >= 3 * 13
    jax.tree.map(np.testing.assert_array_equal, parts(state)["state"], before["state"])
    # EPLB has not seen any load.
    assert all(not np.asarray(leaf).any() for name, leaf in parts(state)["mesh"].items() if "load" in name)
    up = state[0]["stacks"][0][0]["moe"]["up"].get_value()
    assert up.sharding.mesh.shape == {"data": mesh[0], "expert": mesh[1]}


@pytest.mark.thorough
def test_a_run_goes_on_with_half_the_ranks_and_eplb(trained_run, command_line, tmp_path, monkeypatch):
    folder = RunFolder(shutil.copytree(trained_run, tmp_path / "run"))
    straight = shutil.copytree(trained_run, tmp_path / "straight")
    changes = ("--mesh", "expert=4", "--system", "eplb")
    result = command_line("--resume", "--run-dir", "run", "--steps", "10", *changes)
    assert result.exit_code == 0, result.output
    assert (
        "resuming from step 8 with system 'eplb' instead of 'exact', expert_parallel 4 instead of 8, "
        "ranks_per_domain 4 instead of 8"
    ) in result.stdout
    assert "the load history of the balancers is reset\n" in result.stdout

    # Two more steps with the previous layout.
    with monkeypatch.context() as patched:
        patched.setattr("models.training.loop._finish", lambda *arguments: {})
        assert command_line(*["--resume", "--run-dir", "straight", "--steps", "10"]).exit_code == 0
    np.testing.assert_allclose(losses(folder.path), losses(straight), rtol=2e-5)

    assert [row["segment"] for row in folder.rows("layout")] == [1, 2]
    assert folder.rows("layout")[1] | {"step": 8, "system": "eplb"} == folder.rows("layout")[1]
    assert folder.segments == [1, 2]
    assert folder.read_counts(1)["steps"].tolist() == list(range(1, 9))
    assert folder.read_counts(2)["steps"].tolist() == [9, 10]
    assert folder.read_counts(2)["counts"].shape == (2, 2, 4, 16)
    assert "of 4 ranks" in folder.report.read_text()
    replayed = CliRunner().invoke(tools, ["replay", "run/counts-2.npz", "--balancer", "greedy"])
    assert replayed.exit_code == 0, replayed.output

    # Without options it continues with the last layout; on the ranks of the earlier checkpoint, the segment is removed.
    configs = []
    monkeypatch.setattr("models.train.prepare", lambda config, *rest, **options: configs.append(config) or exit(0))
    command_line(*["--resume", "--run-dir", "run", "--steps", "12"])
    command_line(*["--resume", "--run-dir", "run", "--steps", "12", "--system", "greedy"])
    assert [config.parallel for config in configs] == [ParallelConfig(1, 4, "eplb"), ParallelConfig(1, 4, "greedy")]
    shutil.rmtree(folder.checkpoints / "10")
    with monkeypatch.context() as patched:
        patched.setattr("models.training.loop._finish", lambda *arguments: {})
        run(dataclasses.replace(CONFIG, steps=10), folder.path, resume=True)
    assert folder.segments == [1]
    assert folder.read_counts()["steps"].tolist() == list(range(1, 11))
    assert losses(folder.path) == losses(straight)


def resumable(path, config):
    """Return a folder with the configuration of a run and the name of a checkpoint."""
    folder = RunFolder(path)
    (folder.checkpoints / "4").mkdir(parents=True)
    folder.config.write_text(json.dumps({"config": config, "data": {"fingerprint": ""}}))
    return folder


def test_options_of_a_system_do_not_pass_to_another(tmp_path):
    parallel = ParallelConfig(system="exact", replica_slots=3, headroom=2.0, max_rounds=2, dispatch="once")
    before = dataclasses.asdict(dataclasses.replace(CONFIG, parallel=parallel))
    given = as_before(resumable(tmp_path, before), {"parallel": {"system": "rails", "headroom": 3.0}})
    assert ParallelConfig(**given["parallel"]) == ParallelConfig(system="rails", headroom=3.0)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("parallel", {"old_key": 1}),
        ("parallel", {"stages": "x"}),
        ("parallel", {"system": 5}),
        ("data", {"now": 5}),
        ("relocation", 3),
        (None, '{"config": {"mod'),
    ],
)
def test_a_damaged_config_is_refused(tmp_path, section, changes):
    config = dataclasses.asdict(CONFIG)
    if section is not None:
        config[section] = config[section] | changes if isinstance(changes, dict) else changes
    folder = resumable(tmp_path, config)
    if section is None:
        folder.config.write_text(changes)
    message = r"config.json' cannot be read; expected the config of the run to resume"
    with pytest.raises(ValueError, match=message):
        as_before(folder, {})
    with pytest.raises(ValueError, match=message):
        check_continues(CONFIG, "", folder)


def test_adapters_do_not_continue_on_another_base(tmp_path):
    folder = resumable(tmp_path, dataclasses.asdict(CONFIG))
    # Older runs have no fingerprint.
    check_continues(CONFIG, "", folder, "one")
    described = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps(described | {BASE_FINGERPRINT: "one"}))
    check_continues(CONFIG, "", folder, "one")
    with pytest.raises(ValueError, match=r"model.checkpoint is None; expected the tensors of the run to resume"):
        check_continues(CONFIG, "", folder, "other")


@pytest.mark.thorough
def test_homes_begin_where_a_run_had_none(trained_run):
    made = programs(dataclasses.replace(on(1, 4, "greedy"), relocation=RelocationConfig(2)))
    _, begun, _ = restore_newest(RunFolder(trained_run).checkpoints, made.state_shapes, print, made.init)
    homes = begun[0]["stacks"][0][0]["moe"]["homes"].get_value()
    np.testing.assert_array_equal(homes, [np.arange(16)] * 2)


@pytest.mark.thorough
def test_experts_that_moved_come_home_for_a_system_that_remembers_loads(tmp_path, monkeypatch, all_devices):
    """The state of a relocating run in which each expert has moved is restored for EPLB on other ranks."""
    moving, folder = dataclasses.replace(on(1, 8, "exact"), relocation=RelocationConfig(2)), RunFolder(tmp_path)
    made = programs(moving)
    began = made.init()
    before = {name: np.asarray(leaf) for name, leaf in parts(began)["state"].items()}
    moved = made.move(began, np.stack([np.random.default_rng(i).permutation(16) for i in range(2)]))
    assert (np.asarray(moved[0]["stacks"][0][0]["moe"]["up"].get_value()) != before["0.stacks.0.0.moe.up.value"]).any()
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(4, moved, CheckpointMetadata(layout_of(moving.parallel), {"steps": 4}))
    folder.config.write_text(json.dumps({"config": dataclasses.asdict(moving), "data": {"fingerprint": ""}}))

    given = as_before(folder, {"parallel": {"system": "eplb", "expert_parallel": 4}})
    assert (given["parallel"]["system"], given["parallel"]["expert_parallel"]) == ("eplb", 4)
    assert not given["relocation"]
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(1, 4, "eplb"))
    # As after an earlier resumption that ended before its first checkpoint.
    folder.config.write_text(json.dumps({"config": dataclasses.asdict(config)}))
    found = programs(config)
    run = Run(config, CORPUS, folder, None, make_mesh(config.parallel), found, None, None, 0, None, {})
    step, state, _ = _restored(run, layout_of(config.parallel), print)
    assert step == 4
    after = parts(state)
    assert not after["homes"]
    assert after["mesh"]
    assert after["state"].keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after["state"][name], value)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path):
    """Each step donates the arrays of the previous one."""
    state = nnx.State({f"layer{i}": nnx.Param(jnp.full((512, 512), i, jnp.float32)) for i in range(8)})
    step = jax.jit(lambda state: jax.tree.map(lambda a: a + 1.0, state), donate_argnums=0)
    shapes, told = jax.eval_shape(lambda: state), []
    with Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_every_s=1000)) as checkpoints:
        for number in range(1, 7):
            tell = lambda n=number: told.append((n, steps_in(tmp_path)))  # noqa: E731
            checkpoints.save(number, state, CheckpointMetadata({}, {"steps": number}), tell)
            for _ in range(10):
                state = step(state)
            checkpoints.check()
        checkpoints.wait()
        # The first is kept as one per 1000 s.
        assert steps_in(tmp_path) == [6, 5, 1]
        for number in (1, 5, 6):
            restored = checkpoints.restore(number, shapes)
            for i in range(8):
                assert (np.asarray(restored[f"layer{i}"].get_value()) == i + 10 * (number - 1)).all()
            assert checkpoints.read_kept(number) == CheckpointMetadata({}, {"steps": number})
    assert [number for number, _ in told] == [1, 2, 3, 4, 5, 6]
    # The callback follows the completed checkpoint.
    assert all(number in steps for number, steps in told)

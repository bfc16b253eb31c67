"""The folder of a run is modified only by resuming the run, or on request by moving it aside."""

import dataclasses
import json
import shutil
import signal

import jax
import pytest
from rich.console import Console

from models.config import ParallelConfig
from models.run_folder.checkpoints import Checkpoints, steps_in
from models.run_folder.files import CHECKSUMS, write_checksums
from models.run_folder.metrics import RunFolder
from models.training.loop import execute, prepare
from tests.models.kill_training import STEPS_PER_KILL, finish, kill_and_compare, start, wait_for_steps
from tests.models.small import CONFIG, CORPUS, run

pytestmark = pytest.mark.slow


def contents(folder):
    """Return the content of every file except the empty lock file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def resumed(folder, config=CONFIG):
    """Return a resumed run whose lock is released, and its lines."""
    lines = []
    run = prepare(config, CORPUS, folder, resume=True, tell=lines.append)
    run.release()
    return run, lines


@pytest.fixture
def copied(trained_run, tmp_path):
    """Return a copy of a finished run in the default folder."""
    return shutil.copytree(trained_run, tmp_path / "runs" / "tiny")


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "parallel.replica_slots=100"],
        ["--set", "parallel.replica_slots=100", "--overwrite"],
        ["--set", "parallel.replica_slots=100", "--overwrite", "--run-dir", "runs/tiny"],
        ["--set", "parallel.replica_slots=100", "--resume"],
    ],
    ids=" ".join,
)
def test_a_bad_option_touches_nothing(copied, command_line, tmp_path, options):
    before = contents(tmp_path)
    result = command_line(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: parallel.replica_slots is 100; expected ")
    assert result.stderr.count("\n") == 1
    assert contents(tmp_path) == before


def test_what_only_tracing_finds_touches_nothing(copied, monkeypatch):
    def refuses(*arguments, **options):
        raise ValueError("found by tracing")

    monkeypatch.setattr("models.training.step.StackedDecoder.loss", refuses)
    before = contents(copied)
    with pytest.raises(ValueError, match="found by tracing"):
        # Programs of another seed have not been traced.
        prepare(dataclasses.replace(CONFIG, seed=1), CORPUS, copied, overwrite=True)
    assert contents(copied) == before
    assert not copied.with_name("tiny.before-1").exists()


def test_a_folder_with_a_run_needs_an_option(copied, command_line):
    before = contents(copied)
    result = command_line("--run-dir", "runs/tiny")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: run_dir is 'runs/tiny', which contains a run; expected --resume to continue it, --overwrite to move it "
        "aside, or another folder\n"
    )
    for resume in ("--resume", "--resume=auto"):
        assert command_line(resume, "--overwrite").stderr.startswith("error: both overwrite and resume are set;")
    assert command_line("--resume=newst").stderr == "error: resume is 'newst'; expected --resume or --resume=auto\n"
    assert contents(copied) == before


def test_overwriting_moves_the_run_aside_and_nothing_else(copied):
    before = contents(copied)
    (copied / "notes.txt").write_text("mine")
    lines = []
    prepare(CONFIG, CORPUS, copied, overwrite=True, tell=lines.append).release()
    assert sorted(path.name for path in copied.iterdir()) == [".lock", "config.json", "notes.txt"]
    aside = copied.with_name("tiny.before-1")
    assert contents(aside) == before
    assert len(lines) == 1
    assert str(aside) in lines[0]


def test_runs_in_no_named_folder_are_numbered(copied, command_line, monkeypatch):
    folders = []

    def noted(config, corpus, run_dir, **options):
        folders.append(str(run_dir))
        raise ValueError("enough")

    monkeypatch.setattr("models.train.prepare", noted)
    command_line()
    shutil.copytree(copied, copied.with_name("tiny-9"))
    shutil.copytree(copied, copied.with_name("tiny-10.before-1"))
    for options in ([], ["--resume"], ["--overwrite"]):
        command_line(*options)
    shutil.rmtree(copied.parent)
    command_line()
    command_line("--resume")
    assert folders == ["runs/tiny-2", "runs/tiny-10", "runs/tiny-9", "runs/tiny-9", "runs/tiny", "runs/tiny"]


def test_two_trainings_do_not_share_a_folder(tmp_path):
    run = prepare(CONFIG, CORPUS, tmp_path)
    message = r"which another training run uses; expected another folder"
    for options in ({"overwrite": True}, {"resume": True}):
        # As after the first checkpoint of the first run.
        RunFolder(tmp_path).checkpoints.joinpath("4").mkdir(parents=True, exist_ok=True)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=message) as refused:
            prepare(CONFIG, CORPUS, tmp_path, **options)
        assert repr(str(tmp_path)) in str(refused.value)
        assert contents(tmp_path) == before
    run.release()
    prepare(CONFIG, CORPUS, tmp_path, overwrite=True).release()


def test_a_default_that_is_named_is_the_default(copied):
    # An older run does not contain newer options.
    config = json.loads(RunFolder(copied).config.read_text())
    for option in ("compute_dtype", "z_loss"):
        del config["config"]["model"][option]
    del config["config"]["data"]["within_documents"]
    RunFolder(copied).config.write_text(json.dumps(config))
    same = dataclasses.replace(CONFIG, parallel=ParallelConfig(replica_slots=2, ranks_per_domain=8))
    assert resumed(copied, config=same)[0].done_steps == CONFIG.steps


def flip(checkpoint):
    """Flip a bit in the middle of the largest file."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)


def cut(checkpoint):
    manifest = checkpoint / "state" / "manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:10])


def cut_without_checksums(checkpoint):
    (checkpoint / CHECKSUMS).unlink()
    cut(checkpoint)


# Orbax leaves an unawaited coroutine after a failed read.
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [flip, pytest.param(cut, marks=pytest.mark.thorough), cut_without_checksums])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(copied, damage):
    folder = RunFolder(copied)
    damage(folder.checkpoints / "8")
    run, lines = resumed(copied)
    assert run.done_steps == 4
    assert steps_in(folder.checkpoints) == [4]
    assert [path.name for path in folder.damaged.iterdir()] == ["8.damaged-1"]
    assert "the checkpoint of step 8 in" in lines[0]
    assert "is damaged: " in lines[0]
    assert "resuming from step 4" in lines[1]
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(8, run.state)
    assert steps_in(folder.checkpoints) == [8, 4]


def flip_all(folder, other):
    for step in (4, 8):
        flip(folder / str(step))


def exchange(folder, other):
    """Exchange the checkpoints of steps 4 and 8."""
    (folder / "4").rename(folder / "x")
    (folder / "8").rename(folder / "4")
    (folder / "x").rename(folder / "8")


def rename(folder, other):
    (folder / "8").rename(folder / "6")


def copy_under_another_name(folder, other):
    shutil.copytree(folder / "4", folder / "12")


def take_of_another_run(folder, other):
    shutil.rmtree(folder / "8")
    shutil.copytree(other / "8", folder / "8")


def without_a_record(folder, other):
    (folder / "8" / "run" / "metadata").write_text(json.dumps({"layout": {}, "data": {}}))
    write_checksums(folder / "8")


def without_checksums(place):
    """Do the same to checkpoints of a run killed before it wrote their checksums."""

    def changed(folder, other):
        place(folder, other)
        for path in folder.glob(f"*/{CHECKSUMS}"):
            path.unlink()

    return changed


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """Return a run that differs from `trained_run` in its identifier only."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "other")
    run(CONFIG, folder.path)
    return folder


@pytest.mark.parametrize(
    ("place", "step", "problem"),
    [
        (flip_all, None, ""),
        (exchange, None, "it was saved at step 4; expected step 8"),
        (rename, 4, "it was saved at step 8; expected step 6"),
        (copy_under_another_name, 8, "it was saved at step 4; expected step 12"),
        (take_of_another_run, 4, "it was saved by run '"),
        (without_a_record, 4, "it does not record its step and run"),
        (without_checksums(exchange), None, "it was saved at step 4; expected step 8"),
        (without_checksums(take_of_another_run), 4, "it was saved by run '"),
    ],
)
def test_a_checkpoint_of_another_step_or_run_is_damaged(copied, trained_run, other_run, place, step, problem):
    folder, lines = RunFolder(copied), []
    place(folder.checkpoints, other_run.checkpoints)
    if step is None:
        before = contents(copied)
        with pytest.raises(ValueError, match=r"every checkpoint in '.*' is damaged; expected an intact one"):
            prepare(CONFIG, CORPUS, copied, resume=True, tell=lines.append)
        assert contents(copied) == before
        assert len(lines) == 2
    else:
        run, lines = resumed(copied)
        assert run.done_steps == step
        assert steps_in(folder.checkpoints)[0] == step
        assert len(list(folder.damaged.iterdir())) == 1
        assert run.run_id == RunFolder(trained_run).run_id != other_run.run_id
    assert f"is damaged: {problem}" in lines[0]


def test_a_checkpoint_without_checksums_is_used(copied):
    newest = RunFolder(copied).checkpoints / "8"
    (newest / CHECKSUMS).rename(newest / f"{CHECKSUMS}.part")
    run, lines = resumed(copied)
    assert (run.done_steps, lines) == (8, [])


def before_its_first_checkpoint(folder):
    """Leave of a run the files that a kill during its first save leaves."""
    (folder.checkpoints / "8").rename(folder.checkpoints / "4.orbax-checkpoint-tmp")
    shutil.rmtree(folder.checkpoints / "4")
    for path in (folder.summary, folder.report, folder.counts):
        path.unlink()


def before_its_first_save(folder):
    before_its_first_checkpoint(folder)
    shutil.rmtree(folder.checkpoints)


def before_its_first_file(folder):
    for path in folder.path.iterdir():
        if path.name != "notes.txt":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("state", [before_its_first_checkpoint, before_its_first_save, before_its_first_file])
def test_a_run_without_a_checkpoint_starts_again(copied, command_line, tmp_path, monkeypatch, state):
    monkeypatch.setattr("models.training.loop._finish", lambda *arguments: {})
    folder = RunFolder(copied)
    (copied / "notes.txt").write_text("mine")
    state(folder)
    before, had_run = contents(copied), folder.has_run
    assert not had_run or command_line("--run-dir", "runs/tiny").exit_code == 2
    result = command_line("--resume=auto", "--run-dir", "runs/tiny")
    assert result.exit_code == 0, result.output
    assert [row["step"] for row in folder.rows("step")] == list(range(1, CONFIG.steps + 1))
    assert steps_in(folder.checkpoints) == [8, 4]
    assert (copied / "notes.txt").read_text() == "mine"
    aside = tmp_path / "runs" / "tiny.before-1"
    assert aside.exists() == had_run
    # All other files are kept; the incomplete checkpoint is removed, as on resuming.
    kept = {path: text for path, text in before.items() if path.parts[0] not in ("checkpoint", "notes.txt")}
    assert (contents(aside) if had_run else {}) == kept


def test_a_run_with_a_checkpoint_continues(copied, command_line, monkeypatch):
    monkeypatch.setattr("models.training.loop._finish", lambda *arguments: {})
    folder = RunFolder(copied)
    (folder.checkpoints / "8").rename(folder.checkpoints / "8.orbax-checkpoint-tmp")
    result = command_line("--resume=auto", "--run-dir", "runs/tiny")
    assert result.exit_code == 0, result.output
    assert steps_in(folder.checkpoints) == [8, 4]
    assert not list(folder.checkpoints.glob("*tmp*"))
    assert [path.name for path in copied.parent.iterdir()] == ["tiny"]


def test_a_run_that_got_a_checkpoint_meanwhile_is_not_moved(copied):
    before = contents(copied)
    with pytest.raises(ValueError, match="contains a run; expected --resume"):
        prepare(CONFIG, CORPUS, copied, restart=True)
    assert contents(copied) == before


@pytest.mark.thorough
def test_a_run_killed_during_its_first_save_starts_again(tmp_path):
    options = ("--resume=auto", "--steps", "4")
    process = start(tmp_path, *options, module="tests.models.stalled_training")
    assert any(line == "saving\n" for line in process.stdout)
    process.kill()
    process.communicate()
    folder = RunFolder(tmp_path)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["2.orbax-checkpoint-tmp"]
    for last in (4, 6):
        finish(start(tmp_path, *options[:-1], str(last)))
        assert steps_in(folder.checkpoints) == [last, last - 2]


@pytest.mark.thorough
def test_a_finished_run_without_readable_counts_is_resumed_with_a_line(copied, command_line):
    folder = RunFolder(copied)
    folder.counts.write_bytes(b"PK\x03\x04")
    result = command_line("--resume")
    assert result.exit_code == 0, result.output
    assert "counts in 'runs/tiny/counts.npz' cannot be read" in result.stdout
    assert "report.html is not written" in result.stdout


@pytest.mark.parametrize("kept", [[4], [4, 8]], ids=["stopped", "finished"])
def test_a_run_that_goes_on_to_its_own_step_is_validated_once(copied, kept):
    folder = RunFolder(copied)
    rows = folder.rows("validation")
    lines = [line for line in folder.metrics.read_text().splitlines(True) if '"kind": "validation"' not in line]
    folder.metrics.write_text("".join([*lines, *(json.dumps(row) + "\n" for row in rows if row["step"] in kept)]))
    assert run(CONFIG, copied, resume=True)["validation_loss_nats"] == pytest.approx(rows[-1]["loss"])
    assert [row["step"] for row in folder.rows("validation")] == [4, 8]


@pytest.mark.thorough
def test_a_run_that_is_stopped_before_its_first_step_can_be_resumed(tmp_path):
    class Stopped:
        name = "SIGTERM"

        def requested(self):
            return True

    assert execute(prepare(CONFIG, CORPUS, tmp_path), Console(quiet=True), Stopped()) == {}
    run, _ = resumed(tmp_path)
    assert run.done_steps == 0
    assert jax.tree.leaves(run.state)


@pytest.mark.thorough
def test_a_signal_ends_with_a_checkpoint_a_line_and_an_exit_code(tmp_path):
    """`test_files` checks the exit code of an interruption."""
    process = start(tmp_path, "--steps", "100000")
    wait_for_steps(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    folder = RunFolder(tmp_path)
    last = folder.rows("step")[-1]["step"]
    line = f"stopped by SIGTERM after step {last} of 100000; --resume continues in {tmp_path}"
    assert output.splitlines()[-1] == line
    assert steps_in(folder.checkpoints)[0] == last
    assert len(folder.read_counts()["steps"]) == last
    assert (folder.checkpoints / str(last) / CHECKSUMS).exists()
    assert "validation loss" in finish(start(tmp_path, "--steps", str(last + 1), "--resume"))


@pytest.mark.thorough
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    rows = kill_and_compare(tmp_path, kills=3, seed=0)
    assert len(rows) > 2
    assert json.loads(RunFolder(tmp_path / "killed").summary.read_text())["steps"] == 3 * STEPS_PER_KILL

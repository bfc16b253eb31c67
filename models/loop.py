"""`prepare` and `execute` are a training run, from its input to its files."""

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console

from jax_moe_lb import moved_experts
from models.checkpoint import Checkpoints
from models.data import Corpus
from models.parallel import make_mesh, make_system, place_batch
from models.presets import TrainConfig
from models.progress import StepLine
from models.recording import Recorder, RunFolder
from models.relocation import described, next_homes
from models.report import write_report
from models.summary import summarise
from models.training import Programs, make_programs

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@dataclass(frozen=True, eq=False)
class Run:
    """A run has had its input checked.

    Args:
        config: the sizes of the run.
        corpus: the text to learn from.
        folder: where its files go.
        mesh: its devices.
        programs: what runs on the devices.
        done_steps: steps that are behind already, 0 for a new run.
        state: the state after them; `None` for a new run.
    """

    config: TrainConfig
    corpus: Corpus
    folder: RunFolder
    mesh: Mesh
    programs: Programs
    done_steps: int
    state: nnx.State | None


def prepare(config: TrainConfig, corpus: Corpus, run_dir: Path, *, resume: bool = False) -> Run:
    """Does everything that can fail because of what the user asked for.

    Args:
        config: the sizes of the run.
        corpus: the text to learn from.
        run_dir: the folder of the run, made if it is missing; without `resume`, an earlier run in it is removed.
        resume: whether to continue from the newest checkpoint there.

    Raises:
        ValueError: something does not fit; the message names the argument, its value and what was expected.
    """
    corpus.check_length(config.sequence_length)
    folder, mesh = RunFolder(run_dir), make_mesh(config.parallel)
    programs = make_programs(config, mesh, make_system(config.parallel))
    done_steps, state = _resumed(config, corpus, folder, programs) if resume else (0, None)
    if jax.process_index() == 0:
        _claim(config, corpus, folder, resume)
    # No process may look for checkpoints while another still removes old ones.
    multihost_utils.sync_global_devices("run folder")
    return Run(config, corpus, folder, mesh, programs, done_steps, state)


def execute(run: Run, console: Console) -> dict:
    """Trains, writes the run folder, and returns the summary, which is empty on all processes but the first.

    Args:
        run: what `prepare` returned.
        console: where progress is shown.
    """
    started, config, corpus = time.perf_counter(), run.config, run.corpus
    state = run.programs.init() if run.state is None else run.state
    recorder = Recorder(run.folder, run.done_steps + 1, writes=jax.process_index() == 0)
    validate = _validation(run)
    # Compiled before the clock of the first step starts, which would otherwise seem slow.
    step_program, compile_s = _compiled(run, state)
    with Checkpoints(run.folder.checkpoints) as checkpoints, StepLine(console, run.done_steps, config.steps) as line:
        for step in range(run.done_steps + 1, config.steps + 1):
            tokens = place_batch(corpus.batch(config.seed, step, config.batch_size, config.sequence_length), run.mesh)
            step_started = time.perf_counter()
            state, loss, stats = step_program(state, tokens)
            # Waiting for each step also keeps the devices from being flooded with executions.
            loss, stats = jax.device_get((loss, stats))
            row = recorder.step(step, float(loss), stats, config.tokens_per_step, time.perf_counter() - step_started)
            line.show(row)
            if step % config.validation_interval == 0 or step == config.steps:
                validation_loss = validate(state)
                recorder.validation(step, validation_loss)
                line.note(row, validation_loss)
            if config.relocate_interval is not None and step % config.relocate_interval == 0:
                state = _moved(run, state, step, recorder)
            if step % config.checkpoint_interval == 0 or step == config.steps:
                recorder.flush()
                checkpoints.save(step, state)
    return _finish(run, state, compile_s, time.perf_counter() - started)


def _moved(run: Run, state: nnx.State, step: int, recorder: Recorder) -> nnx.State:
    """Moves the experts of a state to where the loads so far want them."""
    topology = run.programs.topology
    permutation = next_homes(state, run.config, topology)
    if not moved_experts(permutation, topology).any():
        return state
    state = run.programs.move(state, permutation)
    recorder.relocation(described(step, permutation, state, topology))
    return state


def _resumed(config: TrainConfig, corpus: Corpus, folder: RunFolder, programs: Programs) -> tuple[int, nnx.State]:
    if not folder.checkpoints.is_dir() or not folder.config.exists():
        raise ValueError(f"resume is set, but {str(folder.path)!r} has no checkpoint; expected a run_dir with one")
    earlier, now = json.loads(folder.config.read_text()), _described(config, corpus)
    for name, value in _fixed(now).items():
        if value != _fixed(earlier)[name]:
            raise ValueError(f"{name} is {value!r}; expected {_fixed(earlier)[name]!r}, that of the run to resume")
    with Checkpoints(folder.checkpoints) as checkpoints:
        step = checkpoints.newest_step
        if step is None:
            raise ValueError(f"resume is set, but {str(folder.checkpoints)!r} is empty; expected a checkpoint")
        if step > config.steps:
            raise ValueError(f"steps is {config.steps}; expected at least {step}, that of the checkpoint to resume")
        return step, checkpoints.restore(step, programs.state_shapes)


def _fixed(described: dict) -> dict:
    """Collects what a resumed run may not change."""
    config = described["config"]
    names = ("batch_size", "sequence_length", "seed")
    fixed = config["model"] | {name: config[name] for name in names} | {"data": described["data"]["fingerprint"]}
    # Without it a checkpoint holds no homes.
    return fixed | {"relocating": config.get("relocate_interval") is not None}


def _claim(config: TrainConfig, corpus: Corpus, folder: RunFolder, resume: bool) -> None:
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if not resume:
            folder.clear()
        folder.config.write_text(json.dumps(_described(config, corpus), indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"run_dir is {str(folder.path)!r}; expected a writable folder: {error.strerror}") from error


def _described(config: TrainConfig, corpus: Corpus) -> dict:
    data = {
        "source": corpus.source,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "unigram_entropy_nats": corpus.unigram_entropy_nats,
        "fingerprint": corpus.fingerprint,
    }
    environment = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
    environment |= {package: version(package) for package in PACKAGES}
    devices = jax.devices()
    environment |= {"devices": f"{len(devices)} x {devices[0].device_kind}", "machine": platform.machine()}
    return {"config": dataclasses.asdict(config), "data": data, "environment": environment}


def _compiled(run: Run, state: nnx.State) -> tuple[Callable, float]:
    """Compiles the step ahead, so that its time is not that of the first step; returns it and the seconds it took."""
    started, config = time.perf_counter(), run.config
    tokens = np.zeros((config.batch_size, config.sequence_length + 1), np.int32)
    program = run.programs.step.lower(state, place_batch(tokens, run.mesh)).compile()
    return program, time.perf_counter() - started


def _validation(run: Run) -> Callable[[nnx.State], float]:
    config = run.config
    sizes = (config.validation_batches, config.batch_size, config.sequence_length)
    batches = [place_batch(batch, run.mesh) for batch in run.corpus.validation_batches(*sizes)]
    return lambda state: float(np.mean([float(run.programs.evaluate(state, batch)) for batch in batches]))


def _finish(run: Run, state: nnx.State, compile_s: float, wall_s: float) -> dict:
    """Sums the run up in files, from what is in its folder."""
    if jax.process_index() != 0:
        return {}
    num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(state, nnx.Param)))
    summary = summarise(run.folder) | {"num_groups": run.config.parallel.data_parallel, "num_params": num_params}
    summary |= {"compile_s": compile_s, "wall_s": wall_s}
    run.folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
    write_report(run.folder)
    return summary

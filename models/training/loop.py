"""Training run, from its inputs to its files: `prepare` and `execute`."""

import dataclasses
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.stages import Traced
from rich.console import Console

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import UNLIMITED
from jax_moe_lb.planners import moved_experts
from models.config import RelocationConfig, TrainConfig
from models.console import show
from models.data.corpus import Batches, Corpus, place_rows, rows_here
from models.data.marks import num_predicted
from models.mesh import batch_sharding, make_mesh, make_system, place_batch
from models.multi_process.stalls import Progress
from models.multi_process.stragglers import StragglerMonitor
from models.pretrained.adapters import save_adapters
from models.pretrained.loading import checked_weights, load_state
from models.pretrained.saving import is_exported, save_pretrained
from models.run_folder.checkpoints import (
    CheckpointMetadata,
    Checkpoints,
    parts,
    remove_incomplete,
    restore_newest,
    steps_in,
    without_homes,
)
from models.run_folder.files import free_sibling, lock_folder, make_way, temporary_folder, write_whole
from models.run_folder.metrics import Recorder, RunFolder, layer_row, summarise
from models.run_folder.report import LiveReport, write_report
from models.run_folder.trackers import MetricLogger, MetricLoggerConfig, StepLine
from models.settings import in_section
from models.training.faults import StepRunner, StopRequest, check_state, check_step
from models.training.optimizer import learning_rate
from models.training.resume import BASE_FINGERPRINT, check_continues, described, layout_of, next_homes, per_layer
from models.training.source import Source, source_of
from models.training.step import Programs, check_memory, make_programs

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Run:
    """Validated training run with a locked folder."""

    config: TrainConfig  # configuration of the run
    corpus: Corpus  # training and validation text
    folder: RunFolder  # folder of the run's files
    lock: TextIO | None  # lock of the folder; `None` in processes that write no files
    mesh: Mesh  # devices of the run
    programs: Programs  # programs on the devices
    source: Source | None  # checkpoint or published model; `None` for a preset
    step: Traced  # traced program of one step
    done_steps: int  # number of steps done, 0 for a new run
    state: nnx.State | None  # state after these steps; `None` for a new run
    position: dict[str, Any]  # position of the data after these steps, from the checkpoint
    base_fingerprint: str = ""  # fingerprint of the frozen parameters of a run with adapters, "" without any
    # Identifier of the run, the same after it is resumed; random in a new run
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def release(self) -> None:
        """Release the lock of the folder."""
        if self.lock is not None:
            self.lock.close()


def prepare(
    config: TrainConfig,
    corpus: Corpus,
    run_dir: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    tell: Tell = print,
    limits: FileLimits = FileLimits(),
) -> Run:
    """Check all inputs that can be invalid, and only then modify the run folder."""
    corpus.check_length(config.batch.sequence_length)
    folder, mesh = RunFolder(run_dir, limits), make_mesh(config.parallel)
    check_memory(config, mesh)
    with in_section("parallel"):
        system = make_system(config.parallel)
    source, base_fingerprint, writes = source_of(config.model, limits), "", jax.process_index() == 0
    if source is not None and source.folder is not None:
        base = source.folder.resolve()
        if base == run_dir.resolve() or any(base.is_relative_to(path.resolve()) for path in folder.files):
            # The run would move or replace it.
            which = f"another folder than that of the checkpoint {str(source.folder)!r}"
            raise ValueError(f"run_dir is {str(run_dir)!r}; expected {which}")
        if config.lora.rank or not resume:
            # A resumed run reads only frozen parameters of it again.
            weights, pieces = checked_weights(source.folder, source.config, limits)
            base_fingerprint = weights.tensors.fingerprint if config.lora.rank else ""
            if writes:
                # Loading would refuse them only after an earlier run is moved aside.
                weights.check_scales(sorted({piece.name for piece in pieces}))
    for line in source.noise if source is not None else ():
        tell(line)
    programs = make_programs(config, mesh, system, source.config if source else None, has_padding=corpus.has_padding)
    # Check before tracing, which takes seconds, and again under the lock, as another run may have started.
    if resume:
        check_continues(config, corpus.fingerprint, folder, base_fingerprint)
        folder.check_limits()
    elif writes:
        _check_place(folder)
        if not overwrite:
            _check_empty(folder, restart)
    step = _traced(config, mesh, programs)
    lock = _locked(folder) if writes else None
    run = Run(config, corpus, folder, lock, mesh, programs, source, step, 0, None, {}, base_fingerprint)
    try:
        if resume:
            run = _resumed(run, tell)
        if writes:
            _claim(run, resume, overwrite, restart, tell)
    except BaseException:
        run.release()
        raise
    # The files are within the limits, and this process writes all later ones.
    run = dataclasses.replace(run, folder=RunFolder(run_dir, UNLIMITED))
    # Other processes may look for checkpoints only after old ones have been moved.
    multihost_utils.sync_global_devices("run folder")
    return run


def execute(
    run: Run,
    console: Console,
    stop: StopRequest | None = None,
    watching: MetricLoggerConfig = MetricLoggerConfig(),
    progress: Progress | None = None,
) -> dict:
    """Train, write the run folder, and return the summary."""
    try:
        return _execute(run, console, stop or StopRequest(), watching, progress or Progress())
    finally:
        run.release()


def _execute(run: Run, console: Console, stop: StopRequest, watching: MetricLoggerConfig, progress: Progress) -> dict:
    started, config, step = time.perf_counter(), run.config, run.done_steps
    tell = partial(show, console)
    state = _begun(run) if run.state is None else run.state
    writes, validate = jax.process_index() == 0, _validation(run)
    so_far, tokens_seen = _so_far(run), run.position.get("tokens", step * config.tokens_per_step)
    # Compile before the first step starts, so that its step time excludes compilation.
    step_program, compile_s = _compiled(run)
    do = StepRunner(step_program, run.programs.step_again, tell)
    params = jax.tree.leaves(nnx.filter_state(run.programs.state_shapes, nnx.Param))
    num_params = sum(math.prod(leaf.shape) for leaf in params)
    others = {"num_groups": config.parallel.data_parallel, "num_params": num_params, "compile_s": compile_s}
    with (
        MetricLogger(run.folder, watching, step + 1, config, writes=writes) as watcher,
        Checkpoints(run.folder.checkpoints, run.config.checkpoints, run_id=run.run_id) as checkpoints,
        StepLine(console, step, config.steps) as line,
        _batches(run) as batches,
    ):
        layout = layout_of(config.parallel)
        recorder = Recorder(run.folder, step + 1, layout, writes=writes, tell=tell, watch=watcher.tell)
        save = partial(_save, run, checkpoints, recorder, LiveReport(run.folder, others))
        pace = StragglerMonitor(tell)
        if step == config.steps:
            # All processes validate, and one that reads files records it, unless the run had ended at this step.
            validation_loss = validate(state)
            if not any(row["step"] == step for row in run.folder.rows("validation")):
                recorder.validation(step, validation_loss)
        while step < config.steps and not stop.requested():
            step += 1
            watcher.before(step)
            tokens = place_rows(next(batches), batch_sharding(run.mesh), config.batch.size)
            pace.ready()
            progress.step = step
            step_started = time.perf_counter()
            state, loss, norm, stats = do(step, state, tokens)
            step_time_s = time.perf_counter() - step_started
            check_step(step, float(loss), stats, checkpoints.newest_step)
            # Padding is not routed, and so in no count.
            num_tokens = int(stats.counts[0].sum()) // config.model.experts_per_token
            tokens_seen += num_tokens
            others_of_step = {"gradient_norm": float(norm), "tokens_seen": tokens_seen} | so_far(step)
            row = recorder.step(
                step, float(loss), stats, num_tokens, step_time_s, config.num_microbatches, others_of_step
            )
            recorder.other(pace.stepped(step, step_time_s))
            line.show(row)
            if step % config.validation.interval == 0 or step == config.steps:
                validation_loss = validate(state)
                recorder.validation(step, validation_loss)
                line.note(row, validation_loss)
                if writes:
                    recorder.other(layer_row(step, stats, make_system(config.parallel), run.programs.topology))
            if trace := watcher.after(step):
                tell(f"wrote the trace of the steps up to {step} to {trace}; open it in Perfetto or TensorBoard")
            if config.relocation.interval is not None and step % config.relocation.interval == 0:
                state = _moved(run, state, step, recorder)
            if step % config.checkpoints.interval == 0:
                save(step, state, batches.state() | {"tokens": tokens_seen})
            checkpoints.check()
        # Save after the last step, or after a stop.
        save(step, state, batches.state() | {"tokens": tokens_seen})
        checkpoints.wait()
    if step < config.steps:
        tell(f"stopped by {stop.name} after step {step} of {config.steps}; --resume continues in {run.folder.path}")
        return {}
    if run.source is not None:
        _export(run, run.source, state, tell)
        if config.lora.rank:
            _export_adapters(run, state, tell)
    return _finish(run, others | {"wall_s": time.perf_counter() - started}, tell)


def _so_far(run: Run) -> Callable[[int], dict[str, float]]:
    """Return a function from a step to its learning rate, and to the epochs read until its end."""
    config, rate = run.config, learning_rate(run.config)
    epochs = config.batch.size / run.corpus.num_sequences(config.batch.sequence_length)
    return lambda step: {"learning_rate": rate(step), "epoch": step * epochs}


def _begun(run: Run) -> nnx.State:
    """Return the state before the first step: random parameters, or those of a checkpoint."""
    source, programs = run.source, run.programs
    if source is None or source.folder is None:
        return programs.init()
    stacks, shapes = programs.model(programs.state_shapes).places, programs.state_shapes
    state: nnx.State = load_state(
        source.folder, source.config, programs.init, shapes, run.mesh, stacks=stacks, limits=source.limits
    )
    return state


def _export(run: Run, source: Source, state: nnx.State, tell: Tell) -> None:
    """Write the model in the format of `transformers`, in place of an earlier one of the run once it is complete."""
    to, is_writer = run.folder.model, jax.process_index() == 0
    with temporary_folder(to) if is_writer else nullcontext(to) as made:
        save_pretrained(run.programs.model(state), made, dtype=source.stored_dtype, keep_from=source.folder)
        if not is_writer:
            return
        if run.config.data.tokenizer is not None:
            shutil.copyfile(run.config.data.tokenizer, made / "tokenizer.json")
        make_way(to, is_exported, tell)
        made.replace(to)


def _export_adapters(run: Run, state: nnx.State, tell: Tell) -> None:
    """Write the adapters in the format of PEFT, in place of earlier ones of the run."""
    if jax.process_index() == 0:
        make_way(run.folder.adapter, is_exported, tell)
    if not save_adapters(run.programs.model(state), run.folder.adapter, run.config.lora, _base(run.config)):
        tell("adapter is not written: PEFT reads no adapters of the experts of this model; model has them merged")


def _base(config: TrainConfig) -> str:
    """Return the absolute path or the name of the checkpoint of a run with adapters, "" without adapters."""
    name = config.model.checkpoint
    if name is None or not config.lora.rank:
        return ""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _save(
    run: Run, checkpoints: Checkpoints, recorder: Recorder, report: LiveReport, step: int, state: nnx.State, data: dict
) -> None:
    """Start the checkpoint of the state after `step` steps, unless it exists; then write its metrics and the report."""
    if step == checkpoints.newest_step:
        return
    check_state(step, state, checkpoints.newest_step)
    flush = recorder.flush()

    # Metrics come second: if the disk has space for one of them only, the checkpoint is written.
    def then() -> None:
        flush()
        if recorder.writes:
            report.update()

    kept = CheckpointMetadata(layout_of(run.config.parallel), data, _base(run.config))
    checkpoints.save(step, state, kept, then)


def _moved(run: Run, state: nnx.State, step: int, recorder: Recorder) -> nnx.State:
    """Relocate the experts of a state according to the loads so far."""
    topology = run.programs.topology
    permutation = next_homes(state, run.config, topology)
    if not moved_experts(permutation, topology).any():
        return state
    state = run.programs.move(state, permutation)
    recorder.other(described(step, permutation, state, topology))
    return state


def _check_place(folder: RunFolder) -> None:
    path = folder.path.absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(
            f"run_dir is {str(folder.path)!r}; expected a writable folder, but {str(nearest)!r} is not one"
        )


def _check_empty(folder: RunFolder, restart: bool) -> None:
    if folder.has_run and not (restart and folder.is_own and not steps_in(folder.checkpoints)):
        raise ValueError(
            f"run_dir is {str(folder.path)!r}, which contains a run; expected --resume to continue it, "
            "--overwrite to move it aside, or another folder"
        )


def _traced(config: TrainConfig, mesh: Mesh, programs: Programs) -> Traced:
    """Trace the step, which validates the options of the system for the model and the mesh."""
    shape = (config.batch.size, config.batch.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
    return programs.step.trace(programs.state_shapes, tokens)


def _locked(folder: RunFolder) -> TextIO:
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder.path)
    except BlockingIOError as error:
        raise ValueError(
            f"run_dir is {str(folder.path)!r}, which another training run uses; expected another folder"
        ) from error
    except OSError as error:
        raise ValueError(_unwritable(folder, error)) from error


def _unwritable(folder: RunFolder, error: OSError) -> str:
    return f"run_dir is {str(folder.path)!r}; expected a writable folder: {error.strerror}"


def _resumed(run: Run, tell: Tell) -> Run:
    """Restore the newest intact checkpoint, and move newer, damaged ones aside."""
    folder = run.folder
    check_continues(run.config, run.corpus.fingerprint, folder, run.base_fingerprint)
    layout = layout_of(run.config.parallel)
    step, state, kept = _restored(run, layout, tell)
    if changed := [name for name, value in layout.items() if value != kept.layout.get(name)]:
        changes = ", ".join(f"{name} {layout[name]!r} instead of {kept.layout.get(name)!r}" for name in changed)
        begins = "; the load history of the balancers is reset" if parts(state)["mesh"] else ""
        tell(f"resuming from step {step} with {changes}{begins}")
    if kept.base != (base := _base(run.config)):
        tell(f"resuming from step {step} with the base {base!r} instead of {kept.base!r}")
    for damaged in steps_in(folder.checkpoints):
        if damaged > step and run.lock is not None:
            folder.damaged.mkdir(exist_ok=True)
            aside = free_sibling(folder.damaged / str(damaged), "damaged")
            (folder.checkpoints / str(damaged)).rename(aside)
            tell(f"resuming from step {step}; moved the checkpoint of step {damaged} to {str(aside)!r}")
    return dataclasses.replace(run, done_steps=step, state=state, position=kept.data, run_id=folder.run_id)


def _restored(run: Run, layout: dict[str, Any], tell: Tell) -> tuple[int, nnx.State, CheckpointMetadata]:
    """Restore the newest checkpoint; without relocation, return relocated experts to their initial places."""
    config, programs, folder = run.config, run.programs, run.folder

    @cache
    def relocating() -> Programs:
        parallel = dataclasses.replace(config.parallel, system="plain", replica_slots=None, headroom=None)
        moving = dataclasses.replace(config, relocation=RelocationConfig(interval=1), parallel=parallel)
        return make_programs(moving, run.mesh, make_system(parallel))

    # The frozen parameters of a run with adapters are those of its base.
    init = partial(_begun, run) if config.lora.rank else programs.init
    moved = None if config.relocation.interval is not None else lambda: relocating().state_shapes
    step, state, kept = restore_newest(
        folder.checkpoints, programs.state_shapes, tell, init, layout, folder.limits, folder.run_id, moved
    )
    if moved is None or not parts(state)["homes"]:
        return step, state, kept
    # Use the homes as the permutation: the expert moved to a place is the one initially there.
    state = relocating().move(state, per_layer(state, "homes"))
    return step, without_homes(programs.state_shapes, state, programs.init), kept


def _claim(run: Run, resume: bool, overwrite: bool, restart: bool, tell: Tell) -> None:
    folder, described = run.folder, {"run_id": run.run_id} | _described(run.config, run.corpus)
    described |= {BASE_FINGERPRINT: run.base_fingerprint} if run.base_fingerprint else {}
    if not resume and not overwrite:
        _check_empty(folder, restart)
    try:
        if restart:
            # As on resuming; otherwise each kill during the first save would leave one.
            remove_incomplete(folder.checkpoints)
        if folder.has_run and not resume:
            tell(f"moved the previous run in {str(folder.path)!r} to {str(folder.move_aside())!r}")
        for path in folder.incomplete:
            tell(f"{str(path)!r} is incomplete, left by a killed run; it can be deleted")
        write_whole(folder.config, (json.dumps(described, indent=2) + "\n").encode())
    except OSError as error:
        raise ValueError(_unwritable(folder, error)) from error


def _described(config: TrainConfig, corpus: Corpus) -> dict:
    data = {"source": corpus.source, "unit": corpus.unit, "train_tokens": corpus.length(held_out=False)}
    data |= {"validation_tokens": corpus.length(held_out=True), "fingerprint": corpus.fingerprint}
    data |= {"unigram_entropy_nats": corpus.unigram_entropy_nats}
    environment = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
    environment |= {package: version(package) for package in PACKAGES}
    devices = jax.devices()
    environment |= {"devices": f"{len(devices)} x {devices[0].device_kind}", "machine": platform.machine()}
    environment |= {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "commit": _commit()}
    system = make_system(config.parallel)
    parts_of = {"balancer": system.balancer, "replication": system.replicate, "dispatch": system.dispatch}
    resolved = {name: repr(part) for name, part in parts_of.items()} | {"replica_slots": system.replica_slots}
    return {"config": dataclasses.asdict(config), "resolved": resolved, "data": data, "environment": environment}


def _commit() -> str:
    """Return the commit of the source, "unknown" without a checkout or git."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _compiled(run: Run) -> tuple[Callable, float]:
    """Compile the step ahead of time; return it and the compile time in seconds."""
    started = time.perf_counter()
    program = run.step.lower().compile()
    return program, time.perf_counter() - started


def _batches(run: Run) -> Batches:
    """Return the batches after the steps done so far."""
    config, rows = run.config, rows_here(batch_sharding(run.mesh), run.config.batch.size)
    sizes = {"batch_size": config.batch.size, "sequence_length": config.batch.sequence_length}
    batches = Batches(run.corpus, seed=config.seed, rows=rows, **sizes)
    batches.restore(run.position or {"sequences": run.done_steps * config.batch.size})
    return batches


def _validation(run: Run) -> Callable[[nnx.State], float]:
    """Return a function from a state to its loss per predicted token of all validation batches."""
    config, evaluate = run.config, run.programs.evaluate
    sizes = (config.validation.batches, config.batch.size, config.batch.sequence_length)
    return mean_loss(evaluate, run.corpus.validation_batches(*sizes), run.mesh)


def mean_loss(
    evaluate: Callable[[nnx.State, jax.Array], jax.Array], batches: list[np.ndarray], mesh: Mesh
) -> Callable[[nnx.State], float]:
    """Return a function from a state to its loss per predicted token of some batches."""
    counts = [float(num_predicted(jax.device_put(batch))[0]) for batch in batches]
    placed = [place_batch(batch, mesh) for batch in batches]
    return lambda state: float(np.average([float(evaluate(state, batch)) for batch in placed], weights=counts))


def _finish(run: Run, others: dict[str, float], tell: Tell) -> dict:
    """Write the summary and the report of the run, from the files in its folder."""
    if jax.process_index() != 0:
        return {}
    if not run.folder.rows("step"):
        tell("the run folder has no metrics of steps; summary.json and report.html are not written")
        return {}
    summary = summarise(run.folder) | others
    write_whole(run.folder.summary, (json.dumps(summary, indent=2) + "\n").encode())
    if not write_report(run.folder, summary):
        tell("the run folder has no counts; report.html is not written")
    return summary

"""This program trains a mixture-of-experts language model: `python -m models.train --preset tiny`."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from jax_moe_lb.aot import Target
from jax_moe_lb.core import shadowed_installation
from jax_moe_lb.layer.systems import system_named, system_names
from models.config import (
    COMPUTE_DTYPES,
    PRESETS,
    SCHEDULES,
    USER_ERRORS,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    UserError,
    preset,
    say,
)
from models.data.corpus import Corpus
from models.data.sources import TEXT_FIELD, corpus_from, default_corpus
from models.data.tokenizers import Bytes, Tokenizer, TokenizerFile
from models.dry_run import step as dry_run
from models.mesh import offer_cpu_devices
from models.multi_process.peer_monitor import PeerMonitor, Store, agree, shared_number
from models.multi_process.rendezvous import Place, detect_process, join
from models.run_folder.checkpoints import RetentionPolicy
from models.run_folder.files import in_words
from models.run_folder.metrics import RunFolder
from models.run_folder.trackers import MetricLoggerConfig
from models.training.faults import StopRequest
from models.training.loop import PACKAGES, Run, Tell, execute, prepare
from models.training.resume import as_before, named

RELOCATE_INTERVAL = 50
"""The steps between moves of a system that relocates, where nobody says."""

SIZES = f"Sizes: {', '.join(PRESETS)}; with --dry-run {', '.join(dry_run.PRESETS)}, too."
RUN_DIR = "Where files go. [default: runs/PRESET, then runs/PRESET-2, ...; the last of them to resume or overwrite]"
RESUME = "Go on from the newest checkpoint in the run folder. Ranks and system stay what they were, unless given."
KEEP_EVERY = "Beside these one checkpoint in every so many seconds is kept."
COORDINATOR = "Where process 0 listens. [default: this and the next two are detected, as jax.distributed does]"
DATA = "File or folder of text, JSON lines or token arrays; may be repeated, also with shares: PATH:WEIGHT."
REMAT = "What is computed again backward: none, full, or all but names such as moe_routing,moe_plan,attention."
MAX_ROUNDS = "Rounds of the program of a step; a second one does a step again that needs more. [default: no limit]"
OWN_KERNELS = "Whether experts' products on Hopper are those of jax_moe_lb, not tokamax's."
DRY_RUN = "Train nothing: compile the step for a machine that need not be here, h100:1x8 or the like."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def train(
    name: Annotated[str, typer.Option("--preset", help=SIZES)] = "tiny",
    system: Annotated[str | None, typer.Option(help=f"Who balances the load: {', '.join(system_names())}.")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="Groups of ranks side by side.")] = None,
    expert_parallel: Annotated[int | None, typer.Option(help="Ranks in a group.")] = None,
    distributed: Annotated[bool, typer.Option("--distributed", help="One of several processes.")] = False,
    coordinator: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=COORDINATOR)] = None,
    num_processes: Annotated[int | None, typer.Option(help="How many processes there are.")] = None,
    process_id: Annotated[int | None, typer.Option(help="Which of them this is, from 0.")] = None,
    join_timeout_s: Annotated[float, typer.Option(help="How long to wait for all of them.")] = 60.0,
    replica_slots: Annotated[int | None, typer.Option(help="Slots per rank beyond its home experts.")] = None,
    headroom: Annotated[float | None, typer.Option(help="Receive buffer over the mean load.")] = None,
    ranks_per_domain: Annotated[int | None, typer.Option(help="Ranks among which expert weights may move.")] = None,
    max_rounds: Annotated[int | None, typer.Option(help=MAX_ROUNDS)] = None,
    relocate_interval: Annotated[int | None, typer.Option(help="Steps between moves of experts' homes.")] = None,
    relocate_min_gain: Annotated[float | None, typer.Option(help="Least gain, a fraction, for such a move.")] = None,
    force_balanced: Annotated[bool, typer.Option("--force-balanced", help="Route round robin: the ideal.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimizer.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step, over all devices.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters and batches.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"Of the learning rate: {', '.join(SCHEDULES)}.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Microbatches of a step.")] = None,
    z_loss: Annotated[float | None, typer.Option(help="Weight of the routers' z-loss.")] = None,
    aux_loss: Annotated[float | None, typer.Option(help="Weight of the experts' load balance.")] = None,
    bias_rate: Annotated[float | None, typer.Option(help="Step of routing biases.")] = None,
    compute_dtype: Annotated[str | None, typer.Option(help=f"Of products: {', '.join(COMPUTE_DTYPES)}.")] = None,
    remat: Annotated[str | None, typer.Option(help=REMAT)] = None,
    scan_layers: Annotated[bool | None, typer.Option(help="Whether layers are one loop.")] = None,
    own_kernels: Annotated[bool | None, typer.Option(help=OWN_KERNELS)] = None,
    fsdp: Annotated[bool | None, typer.Option(help="Whether parameters are split over groups, too.")] = None,
    data: Annotated[list[str] | None, typer.Option(help=DATA)] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON lines that is a document.")] = TEXT_FIELD,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json. [default: bytes]")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Words. [default: those of the tokenizer]")] = None,
    run_dir: Annotated[Path | None, typer.Option(help=RUN_DIR)] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the run in the folder aside, and start anew.")
    ] = False,
    checkpoint_interval: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept, the newest.")] = 2,
    keep_every_s: Annotated[int | None, typer.Option(help=KEEP_EVERY)] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files into the run folder.")] = False,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="Tell Weights & Biases, too.")] = None,
    profile: Annotated[int, typer.Option(metavar="STEPS", help="Trace so many steps into the run folder.")] = 0,
    dry_run_target: Annotated[str | None, typer.Option("--dry-run", metavar="TARGET", help=DRY_RUN)] = None,
) -> None:
    """Trains a model and writes metrics, checkpoints and a report into a run folder."""
    asked = TrainArgs.of(locals())
    try:
        if dry_run_target is not None:
            asked.dry_run(dry_run_target)
            raise typer.Exit
        place = _place(distributed, coordinator, num_processes, process_id, join_timeout_s)
        with _joined(place, join_timeout_s), StopRequest() as stop:
            console = Console(quiet=place is not None and place.process_id > 0)
            _carry_out(
                partial(asked.prepare, place), console, stop, lambda: MetricLoggerConfig(tensorboard, wandb, profile)
            )
    except UserError as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error
    if stop.exit_code:
        raise typer.Exit(stop.exit_code)


@dataclass(frozen=True)
class TrainArgs:
    """Holds what was asked for on the command line; `None` is what was not.

    Args:
        name: the preset.
        model: fields of its `ModelConfig`.
        parallel: fields of its `ParallelConfig`.
        sizes: other fields of its `TrainConfig`.
        options: all options, by name.
    """

    name: str
    model: dict[str, Any]
    parallel: dict[str, Any]
    sizes: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, options: dict[str, Any]) -> "TrainArgs":
        """Sorts options by the configuration that has a field of their name."""
        # A switch that is off was not asked for.
        options = options | {"force_balanced": options["force_balanced"] or None}

        def fields_of(kind: type) -> dict[str, Any]:
            return {field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options}

        model, parallel, sizes = map(fields_of, (ModelConfig, ParallelConfig, TrainConfig))
        return cls(options["name"], model, parallel, sizes, options)

    @property
    def words(self) -> Tokenizer:
        """The tokenizer; bytes where no file was named."""
        path = self.options["tokenizer"]
        return Bytes() if path is None else TokenizerFile(path)

    def prepare(self, place: Place | None, tell: Tell) -> Run:
        """Does all that can be refused; see `models.training.loop.prepare`."""
        dry_run.refuse_training(self.name)
        options, words, run_dir = self.options, self.words, self.options["run_dir"]
        how = {name: options[name] for name in ("resume", "overwrite")}
        keeping, before = RetentionPolicy(options["keep"], options["keep_every_s"]), self.parallel
        moves: dict[str, Any] = {}
        folder = run_dir or _default_run_dir(Path("runs") / self.name, place, last=any(how.values()))
        if options["resume"]:
            before, moves = as_before(RunFolder(folder), self.parallel)
        config = _configured(preset(self.name), self.model, self.parallel | before, moves | named(self.sizes), words)
        corpus = _corpus(config, options["data"], words, options["text_field"])
        offer_cpu_devices(max(config.parallel.num_shards // (place.num_processes if place else 1), 1))
        if place is not None:
            agree(place, Store(), _options(config, corpus, run_dir, place) | how | dataclasses.asdict(keeping))
        return prepare(config, corpus, folder, **how, keeping=keeping, tell=tell)

    def dry_run(self, target: str) -> None:
        """Compiles a step for a machine that need not be there, and prints what it needs."""
        try:
            if self.name in dry_run.PRESETS:
                dry_run.show_published(self.name, Target.parse(target), self.parallel, self.sizes, self.model)
            else:
                config = _configured(preset(self.name), self.model, self.parallel, self.sizes, self.words)
                dry_run.show(config, Target.parse(target))
        except ValueError as error:
            raise UserError(str(error)) from error


def _carry_out(
    prepared: Callable[[Tell], Run], console: Console, stop: StopRequest, watched: Callable[[], MetricLoggerConfig]
) -> None:
    """Prepares and executes a run, and tells of it."""
    if hidden := shadowed_installation():
        _print(console, f"{hidden}, which has custom calls, is passed by for this folder: pip install -e .")
    try:
        watching = watched()
        run = prepared(partial(_print, console))
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        _introduce(console, run)
        summary = execute(run, console, stop, watching)
        if summary:
            _conclude(console, summary, run.folder.path)
    except OSError as error:
        raise UserError(in_words(error)) from error


def _corpus(config: TrainConfig, data: list[str] | None, tokenizer: Tokenizer, text_field: str) -> Corpus:
    if data:
        return corpus_from(data, tokenizer, vocab_size=config.model.vocab_size, text_field=text_field)
    if tokenizer != Bytes():
        raise ValueError("tokenizer is given, but no data; expected --data with it")
    return default_corpus(config.max_corpus_bytes)


def _place(
    distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> Place | None:
    """Finds which of several processes this is, `None` if it is alone."""
    if distributed:
        return detect_process(coordinator, num_processes, process_id, timeout_s)
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} is {value!r}, but distributed is not set; expected --distributed with it")
    return None


def _joined(place: Place | None, timeout_s: float) -> AbstractContextManager:
    """Joins the other processes, and ends with them; does nothing for a process that is alone."""
    if place is None:
        return nullcontext()
    join(place, timeout_s)
    return PeerMonitor(place, Store())


def _options(config: TrainConfig, corpus: Corpus, run_dir: Path | None, place: Place) -> dict:
    """Collects what has to be the same on all processes."""
    options = dataclasses.asdict(config) | {"data": corpus.fingerprint, "run_dir": run_dir and str(run_dir)}
    options |= {package: metadata.version(package) for package in PACKAGES}
    with suppress(metadata.PackageNotFoundError):
        # A checkout need not be installed.
        options |= {"jax_moe_lb": metadata.version("jax_moe_lb")}
    return options | {"num_processes": place.num_processes}


def _default_run_dir(first: Path, place: Place | None, *, last: bool) -> Path:
    """Numbers the runs of a preset, so that a run that no folder was named for harms no other.

    Args:
        first: the folder of the first run.
        place: which of several processes this is, all of which have to choose the same; `None` if it is alone.
        last: whether to return the folder of the last run instead of that of the next.
    """
    others = {path.name.removeprefix(f"{first.name}-"): path for path in first.parent.glob(f"{first.name}-*")}
    folders = {1: first} | {int(number): path for number, path in others.items() if number.isdigit()}
    number = max((number for number, path in folders.items() if RunFolder(path).has_run), default=0)
    number = max(number, 1) if last else number + 1
    if place is not None:
        # One of them may begin to write before another looks.
        number = shared_number(place, Store(), "run", number)
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def _configured(
    config: TrainConfig, model: dict[str, Any], parallel: dict[str, Any], sizes: dict[str, Any], tokenizer: Tokenizer
) -> TrainConfig:
    """Changes the preset by what was given on the command line."""
    words = {} if tokenizer == Bytes() else {"vocab_size": tokenizer.vocab_size}
    of = dataclasses.replace(config.model, **words | named(model))
    on = dataclasses.replace(config.parallel, **named(parallel))
    if parallel["replica_slots"] and not system_named(on.system).replica_slots:
        slots = parallel["replica_slots"]
        raise ValueError(f"replica_slots is {slots}; expected none with system {on.system}, which makes no replicas")
    sizes = named(sizes)
    if system_named(on.system).relocates:
        sizes = {"relocate_interval": RELOCATE_INTERVAL} | sizes
    return dataclasses.replace(config, model=of, parallel=on, **sizes)


def _introduce(console: Console, run: Run) -> None:
    config, corpus = run.config, run.corpus
    devices = f"{config.parallel.data_parallel} x {config.parallel.expert_parallel} {jax.devices()[0].platform} devices"
    where = f"{config.tokens_per_step} {corpus.unit}s a step, in {run.folder.path}"
    _print(console, f"{config.parallel.system} on {devices}, {where}")
    lengths = f"{corpus.length(held_out=False):,} + {corpus.length(held_out=True):,}"
    _print(console, f"data: {lengths} {corpus.unit}s of {corpus.source}")
    _print(
        console,
        f"{corpus.unit}-unigram entropy of the validation text: {_nats(corpus.unigram_entropy_nats, corpus.unit)}",
    )


def _conclude(console: Console, summary: dict, run_dir: Path) -> None:
    unit, entropy_nats = summary["unit"], summary["unigram_entropy_nats"]
    loss = _nats(summary["validation_loss_nats"], unit)
    _print(console, f"validation loss {loss}; {unit}-unigram entropy {_nats(entropy_nats, unit)}")
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    _print(console, f"imbalance {before:.2f} -> {after:.2f}, {summary['tokens_per_s']:,.0f} tokens/s")
    _print(
        console,
        f"{summary['wall_s']:.0f} s, of which compiling {summary['compile_s']:.0f} s; see {run_dir}/report.html",
    )


def _nats(value: float, unit: str) -> str:
    return f"{value:.3f} nats/{unit} ({value / math.log(2):.3f} bits)"


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()

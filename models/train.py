"""Train a mixture-of-experts language model, or tune a checkpoint: `python -m models.train tiny`."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from jax_moe_lb.aot import Target
from jax_moe_lb.cli.output import CheckedCommand, OutputPath
from jax_moe_lb.core import FileLimits, shadowed_installation
from jax_moe_lb.layer.system import OPTIONS
from jax_moe_lb.layer.systems import NAMES, system_named
from models import settings
from models.config import PRESETS, TUNING, ModelConfig, MultiProcessConfig, TrainConfig
from models.console import USER_ERRORS, FileLimitsOption, UserError, say, show
from models.data.chat import ChatTemplate, Variables, has_chat_template, read_variables
from models.data.corpus import Corpus
from models.data.sources import check_held_out, corpus_from, default_corpus
from models.data.tokenizers import Bytes, Tokenizer, TokenizerFile, end_tokens
from models.dry_run import step as dry_run
from models.mesh import offer_cpu_devices
from models.multi_process.peer_monitor import PeerMonitor, Store, agree, shared_number
from models.multi_process.rendezvous import Place, detect_process, join
from models.multi_process.stalls import Progress
from models.run_folder.checkpoints import steps_in
from models.run_folder.files import RESUMING, in_words, is_number
from models.run_folder.metrics import RunFolder
from models.run_folder.trackers import MetricLoggerConfig
from models.settings import LIST, Given, in_section, layered, updated
from models.training.faults import StopRequest
from models.training.loop import PACKAGES, Run, Tell, execute, prepare
from models.training.resume import as_before, check_continues
from models.training.source import PUBLISHED_NAMES, source_of, with_sizes

RELOCATE_INTERVAL = 50  # default of `relocation.interval`, in steps, for a system with relocation
CONFIG = f"Checkpoint folder, .yaml file, or one of {', '.join([*PRESETS, *PUBLISHED_NAMES])}."
SYSTEM = f"NAME[:KEY=VALUE,...][+DISPATCH]: {NAMES}; keys {', '.join(OPTIONS)}."
MESH = "Axes and sizes, data=2,expert=4,domain=4,stage=2: groups, ranks in each, ranks that share weights, stages."
DATA = "File or folder of text, JSON lines of text or messages, or token arrays; or PATH:WEIGHT; repeatable."
TEMPLATE_SET = "Variable of the chat template for all conversations, such as enable_thinking=false; repeatable."
RUN_DIR = "Output folder. [default: runs/CONFIG or runs/CHECKPOINT-tuned, then ...-2; the last to resume or overwrite]"
RESUME = "Continue from the newest checkpoint, with its mesh and system unless given; =auto: start if there is none."
DISTRIBUTED = "Join other processes; --set multi_process.KEY=VALUE overrides the detection."
DRY_RUN = "Compile the training step for a target such as h100:1x8, without training."
LOGGER = "tensorboard (event files in the run folder) or wandb=PROJECT; repeatable."
SET = f"Value of a key; repeatable, the last one counts. --set {LIST} prints all keys."
NEWEST, AUTO = "newest", "auto"  # values of `--resume`


class TrainCommand(CheckedCommand):
    """Command whose option `--resume` has an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--resume` its value; typer has no options with optional values."""
        return super().parse_args(ctx, [f"--resume={NEWEST}" if text == "--resume" else text for text in args])


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=TrainCommand)
def train(
    config: Annotated[str | None, typer.Argument(help=CONFIG, metavar="CONFIG")] = None,
    system: Annotated[str | None, typer.Option(metavar="NAME[:KEY=VALUE,...]", help=SYSTEM)] = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXIS=SIZE,...", help=MESH)] = None,
    data: Annotated[list[str] | None, typer.Option(metavar="PATH[:WEIGHT]", help=DATA)] = None,
    template_set: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help=TEMPLATE_SET)] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, in place of steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of parameters and batches.")] = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="FOLDER", help=RUN_DIR), OutputPath("")] = None,
    resume: Annotated[str | None, typer.Option("--resume", metavar="[=auto]", help=RESUME)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move the run in the folder aside.")] = False,
    distributed: Annotated[bool, typer.Option("--distributed", help=DISTRIBUTED)] = False,
    target: Annotated[str | None, typer.Option("--dry-run", metavar="TARGET", help=DRY_RUN)] = None,
    profile: Annotated[int, typer.Option(metavar="STEPS", help="Steps to trace into the run folder.")] = 0,
    loggers: Annotated[list[str] | None, typer.Option("--logger", metavar="NAME", help=LOGGER)] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help=SET)] = None,
    file_limits: FileLimitsOption = 1,
) -> None:
    """Train a model or tune a checkpoint; write metrics, checkpoints and a report."""
    try:
        with _user_errors():
            limits = FileLimits().scaled(file_limits)
            texts = [text for text in assignments or () if text != LIST]
            options = _given(system, mesh, steps, seed, texts)
            name = config or options.get("model", {}).get("checkpoint") or "tiny"
            base, given = _config_named(name, options, limits)
            if len(texts) < len(assignments or ()):
                typer.echo(settings.list_keys(updated(base, given)))
                raise typer.Exit
            asked = TrainArgs(
                name, base, given, epochs, data or [], template_set or [], run_dir, resume, overwrite, limits
            )
            watching = _loggers(loggers or [], profile)
            if target is not None:
                if distributed:
                    expected = "expected one of them, as one process compiles the step for all devices"
                    raise ValueError(f"distributed is set beside dry_run; {expected}")
                asked.dry_run(target)
                raise typer.Exit
            processes = updated(base.multi_process, given.get("multi_process", {}), "multi_process.")
        place = _place(distributed, processes)
        progress = Progress()
        with _joined(place, processes, progress), StopRequest() as stop:
            console = Console(quiet=place is not None and place.process_id > 0)
            _carry_out(partial(asked.prepare, place), console, stop, watching, progress)
    except UserError as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error
    if stop.exit_code:
        raise typer.Exit(stop.exit_code)


@dataclass(frozen=True)
class TrainArgs:
    """Command line of one training run."""

    name: str  # preset, published model, or path of a checkpoint or YAML file
    base: TrainConfig  # the preset, or the defaults for a checkpoint or file
    given: Given  # fields of `TrainConfig` given by the file and the options
    epochs: float | None  # passes over the data; `None` for the number of steps
    data: list[str]  # paths of the text; empty for the default text
    template_set: list[str]  # variables of the chat template, NAME=VALUE
    run_dir: Path | None  # run folder; `None` for a numbered one
    # `NEWEST` continues a run; `AUTO` continues it from a complete checkpoint, or else starts; `None` starts
    resume: str | None
    overwrite: bool  # if True, move an earlier run aside
    limits: FileLimits  # limits of each input file

    def __post_init__(self) -> None:
        if self.resume not in (None, NEWEST, AUTO):
            raise ValueError(f"resume is {self.resume!r}; expected --resume or --resume={AUTO}")
        if self.resume is not None and self.overwrite:
            raise ValueError("both overwrite and resume are set; expected one of them")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; expected a finite number above 0")
        if self.epochs is not None and "steps" in self.given:
            raise ValueError(f"epochs is {self.epochs} and steps is {self.given['steps']}; expected one of them")

    def prepare(self, place: Place | None, tell: Tell) -> Run:
        """Validate all inputs and prepare the run; see `models.training.loop.prepare`."""
        before = self._folder(place)
        resume = self._continues(before, place)
        config = self._configured(as_before(before, self.given) if resume else self.given)
        config = _with_time(config, place)
        corpus = _corpus(config, self.data, self.template_set, self.limits)
        config = self._for_epochs(config, corpus)
        offer_cpu_devices(max(config.parallel.num_shards // (place.num_processes if place else 1), 1))
        if place is not None:
            options = {"resume": self.resume, "overwrite": self.overwrite}
            agree(place, Store(), _options(config, corpus, self.run_dir, place) | options)
        restart = self.resume == AUTO and not resume
        how = {"resume": resume, "overwrite": self.overwrite, "restart": restart}
        return prepare(config, corpus, before.path, **how, tell=tell, limits=self.limits)

    def _folder(self, place: Place | None) -> RunFolder:
        # `.` and `..` have no name of their own.
        name = os.path.basename(os.path.abspath(self.name)).removesuffix(".yaml").removesuffix(".yml")
        first = Path("runs") / (f"{name}-tuned" if Path(self.name).is_dir() else name)
        folder = self.run_dir or _default_run_dir(first, place, last=bool(self.resume or self.overwrite))
        return RunFolder(folder, self.limits)

    def _for_epochs(self, config: TrainConfig, corpus: Corpus) -> TrainConfig:
        """Return the configuration with the steps of the given epochs, the last one whole."""
        if self.epochs is None:
            return config
        corpus.check_length(config.batch.sequence_length)
        sequences = self.epochs * corpus.num_sequences(config.batch.sequence_length)
        return dataclasses.replace(config, steps=math.ceil(sequences / config.batch.size))

    def _continues(self, folder: RunFolder, place: Place | None) -> bool:
        """Return whether the run continues from a checkpoint, as process 0 finds it."""
        resume = self.resume == NEWEST or (self.resume == AUTO and bool(steps_in(folder.checkpoints)))
        # Other processes may read the folder after process 0 has saved a checkpoint.
        return resume if place is None else bool(shared_number(place, Store(), "resume", int(resume)))

    def dry_run(self, target: str) -> None:
        """Check the options, compile the training step for a target machine and print its requirements."""
        place, before = Target.parse(target), self._folder(None)
        resume, is_published = self._continues(before, None), self.name in PUBLISHED_NAMES
        given = as_before(before, self.given) if resume else self.given
        config = dry_run.published_run(self.name, place, given) if is_published else self._configured(given)
        has_padding = False
        # A step for a checkpoint compiles without any data, too.
        if resume or self.data or self.template_set or self.epochs is not None or config.data.validation is not None:
            corpus = _corpus(config, self.data, self.template_set, self.limits)
            corpus.check_length(config.batch.sequence_length)
            config, has_padding = self._for_epochs(config, corpus), corpus.has_padding
            if resume:
                check_continues(config, corpus.fingerprint, before)
        dry_run.show(config, place, self.limits, has_padding=has_padding)

    def _configured(self, given: Given) -> TrainConfig:
        """Return the configuration of the run, with the sizes of its checkpoint or tokenizer."""
        model, data = (updated(getattr(self.base, key), given.get(key, {}), f"{key}.") for key in ("model", "data"))
        source, words = source_of(model, self.limits), {}
        if source is None and data.tokenizer is not None:
            words = {"model": {"vocab_size": TokenizerFile(Path(data.tokenizer), self.limits).vocab_size}}
        parallel = given.get("parallel", {})
        name = parallel.get("system", self.base.parallel.system)
        with in_section("parallel"):
            system = system_named(name)
            if (slots := parallel.get("replica_slots")) and not system.replica_slots:
                raise ValueError(f"replica_slots is {slots}; expected none, as system {name} makes no replicas")
        moves = {"relocation": {"interval": RELOCATE_INTERVAL}} if system.relocates and source is None else {}
        given = with_sizes(given, source)
        return updated(self.base, layered(words, moves, given))


def _config_named(name: str, options: Given, limits: FileLimits) -> tuple[TrainConfig, Given]:
    """Return a preset, or the defaults for a checkpoint or file, and the fields given by file and options."""
    if Path(name).suffix in (".yaml", ".yml"):
        given = layered(settings.read_file(Path(name), limits), options)
        return TrainConfig() if given.get("model", {}).get("checkpoint") is None else TUNING, given
    if name not in (*PRESETS, *PUBLISHED_NAMES) and not Path(name).is_dir():
        expected = f"one of {', '.join(sorted(PRESETS))}, a checkpoint folder or a .yaml file"
        raise ValueError(f"config is {name!r}; expected {expected}")
    base = PRESETS.get(name) or dataclasses.replace(TUNING, model=ModelConfig(checkpoint=name))
    if (other := options.get("model", {}).get("checkpoint", base.model.checkpoint)) != base.model.checkpoint:
        raise ValueError(f"model.checkpoint is {other!r}; expected none beside CONFIG {name!r}")
    return base, options


def _given(
    system: str | None, mesh: str | None, steps: int | None, seed: int | None, assignments: Sequence[str]
) -> Given:
    """Return the fields of `TrainConfig` given by options."""
    numbers = {name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None}
    return settings.combined(
        numbers,
        settings.read_system(system) if system is not None else {},
        settings.read_mesh(mesh) if mesh is not None else {},
        settings.read_assignments(assignments),
    )


def _loggers(names: list[str], profile: int) -> MetricLoggerConfig:
    tensorboard, wandb = False, None
    for name in names:
        kind, _, project = name.partition("=")
        if name == "tensorboard":
            tensorboard = True
        elif kind == "wandb" and project:
            if wandb not in (None, project):
                raise ValueError(f"logger is {name!r}; expected one project of wandb, beside wandb={wandb}")
            wandb = project
        else:
            raise ValueError(f"logger is {name!r}; expected tensorboard or wandb=PROJECT")
    return MetricLoggerConfig(tensorboard, wandb, profile)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Convert `ValueError` into `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _carry_out(
    prepared: Callable[[Tell], Run],
    console: Console,
    stop: StopRequest,
    watching: MetricLoggerConfig,
    progress: Progress,
) -> None:
    """Prepare and execute a run, and print its progress."""
    if hidden := shadowed_installation():
        show(console, f"this folder shadows {hidden} and has no custom calls; run pip install -e .")
    try:
        with _user_errors():
            run = prepared(partial(show, console))
    except OSError as error:
        raise UserError(f"{error.filename!r} cannot be read or written: {error.strerror}; {RESUMING}") from error
    try:
        _introduce(console, run)
        summary = execute(run, console, stop, watching, progress)
        if summary:
            _conclude(console, summary, run.folder.path)
    except OSError as error:
        raise UserError(in_words(error)) from error


def _with_time(config: TrainConfig, place: Place | None) -> TrainConfig:
    """Return the configuration with the local time of process 0, unless it has a time or no chat template."""
    # Encode the local time as if it were UTC, as other processes may be in another time zone.
    seconds = int(datetime.now().replace(tzinfo=UTC).timestamp())
    if place is not None:
        # Share it in any case: `agree` reports later that processes have different options.
        seconds = shared_number(place, Store(), "now", seconds)
    if config.model.checkpoint is None or config.data.now is not None:
        return config
    now = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()
    return dataclasses.replace(config, data=dataclasses.replace(config.data, now=now))


def _corpus(config: TrainConfig, data: list[str], template_set: list[str], limits: FileLimits) -> Corpus:
    variables = read_variables(template_set)
    if config.data.now is not None:
        # Both renderers have a function of this name, which this variable replaces.
        variables = {"strftime_now": datetime.fromisoformat(config.data.now).strftime} | variables
    tokenizer, chat = _tokenizer(config, variables, limits)
    if template_set and chat is None:
        raise ValueError(f"template_set is {template_set[0]!r}; expected a checkpoint with a chat template")
    options: dict[str, Any] = {"vocab_size": config.model.vocab_size, "text_field": config.data.text_field}
    options |= {"limits": limits, "chat": chat}
    if not data and not isinstance(tokenizer, Bytes):
        raise ValueError("data is required: the tokens are not bytes. Pass --data")
    if config.data.validation is not None:
        check_held_out(data, config.data.validation)
    corpus = corpus_from(data, tokenizer, **options) if data else default_corpus(config.data.max_corpus_bytes)
    if config.data.validation is None:
        return corpus
    return corpus.validated_by(corpus_from([config.data.validation], tokenizer, **options))


def _tokenizer(config: TrainConfig, fixed: Variables, limits: FileLimits) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return the tokenizer of a run, and the chat template of its checkpoint."""
    path, source = config.data.tokenizer, source_of(config.model, limits)
    folder = None if source is None else source.folder
    if folder is None:
        if path is None and source is not None:
            raise ValueError(f"data.tokenizer is None; expected a tokenizer.json for {config.model.checkpoint}")
        return Bytes() if path is None else TokenizerFile(Path(path), limits), None
    ends = end_tokens(folder, limits)
    file = folder / "tokenizer.json" if path is None else Path(path)
    words, answers = TokenizerFile(file, limits, ends[0] if ends else None), config.data.answers
    has_chat = has_chat_template(folder, limits)
    return words, ChatTemplate(folder, limits, answers, fixed, words.tokenizer) if has_chat else None


def _place(distributed: bool, processes: MultiProcessConfig) -> Place | None:
    """Return the coordinates of this process, `None` for a single process."""
    given = {name: getattr(processes, name) for name in ("coordinator", "num_processes", "process_id")}
    if distributed:
        return detect_process(**given, timeout_s=processes.join_timeout_s)
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"multi_process.{name} is {value!r}, but distributed is not set; expected --distributed with it"
            )
    return None


def _joined(place: Place | None, processes: MultiProcessConfig, progress: Progress) -> AbstractContextManager:
    """Join the other processes, in a context ending with them; no operation for a single process."""
    if place is None:
        return nullcontext()
    return PeerMonitor(place, join(place, processes.join_timeout_s), progress, processes.stall_timeout_s)


def _options(config: TrainConfig, corpus: Corpus, run_dir: Path | None, place: Place) -> dict:
    """Return the options required to be equal on all processes."""
    options = dataclasses.asdict(config) | {"data": corpus.fingerprint, "run_dir": run_dir and str(run_dir)}
    del options["multi_process"]
    options |= {package: metadata.version(package) for package in PACKAGES}
    with suppress(metadata.PackageNotFoundError):
        # A checkout may be used without installation.
        options |= {"jax_moe_lb": metadata.version("jax_moe_lb")}
    return options | {"num_processes": place.num_processes}


def _default_run_dir(first: Path, place: Place | None, *, last: bool) -> Path:
    """Return the default run folder, numbered so that a run does not overwrite earlier ones."""
    others = {path.name.removeprefix(f"{first.name}-"): path for path in first.parent.glob(f"{escape(first.name)}-*")}
    later = {int(number): path for number, path in others.items() if is_number(number) and int(number) > 1}
    folders = {1: first} | later
    number = max((number for number, path in folders.items() if RunFolder(path).has_run), default=0)
    number = max(number, 1) if last else number + 1
    if place is not None:
        # Use the number of process 0, as it may write files before another process looks.
        number = shared_number(place, Store(), "run", number)
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def _introduce(console: Console, run: Run) -> None:
    config, corpus = run.config, run.corpus
    devices = f"{config.parallel.sizes} {jax.devices()[0].platform} devices"
    where = f"{config.tokens_per_step} {corpus.unit}s a step, in {run.folder.path}"
    show(console, f"{config.parallel.system} on {devices}, {where}")
    lengths = f"{corpus.length(held_out=False):,} + {corpus.length(held_out=True):,}"
    show(console, f"data: {lengths} {corpus.unit}s of {corpus.source}")
    for note in corpus.notes(config.batch.sequence_length):
        show(console, note)
    entropy = _nats(corpus.unigram_entropy_nats, corpus.unit)
    show(console, f"{corpus.unit}-unigram entropy of the validation text: {entropy}")


def _conclude(console: Console, summary: dict, run_dir: Path) -> None:
    unit, entropy_nats = summary["unit"], summary["unigram_entropy_nats"]
    loss = _nats(summary["validation_loss_nats"], unit)
    show(console, f"validation loss {loss}; {unit}-unigram entropy {_nats(entropy_nats, unit)}")
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    show(console, f"imbalance {before:.2f} -> {after:.2f}, {summary['tokens_per_s']:,.0f} tokens/s")
    seconds = f"{summary['wall_s']:.0f} s, of which compiling {summary['compile_s']:.0f} s"
    show(console, f"{seconds}; see {run_dir}/report.html")


def _nats(value: float, unit: str) -> str:
    return f"{value:.3f} nats/{unit} ({value / math.log(2):.3f} bits)"


if __name__ == "__main__":
    app()

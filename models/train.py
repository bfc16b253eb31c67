"""This program trains a mixture-of-experts language model: `python -m models.train --preset tiny`."""

import dataclasses
import math
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import numpy as np
import typer
from jax.experimental import multihost_utils
from rich.console import Console

from models.data import Corpus, corpus_from, default_corpus
from models.loop import execute, prepare
from models.parallel import default_system, offer_cpu_devices, system_names
from models.presets import PRESETS, TrainConfig, preset
from models.recording import RunFolder
from models.stopping import StopRequest

RUN_DIR = "Where files go. [default: runs/PRESET, then runs/PRESET-2, ...; the last of them to resume or overwrite]"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def train(
    name: Annotated[str, typer.Option("--preset", help=f"Sizes: {', '.join(PRESETS)}.")] = "tiny",
    system: Annotated[str | None, typer.Option(help=f"Who balances the load: {', '.join(system_names())}.")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="Groups of ranks side by side.")] = None,
    expert_parallel: Annotated[int | None, typer.Option(help="Ranks in a group.")] = None,
    distributed: Annotated[bool, typer.Option("--distributed", help="One of several processes.")] = False,
    replica_slots: Annotated[int | None, typer.Option(help="Slots per rank beyond its home experts.")] = None,
    headroom: Annotated[float | None, typer.Option(help="Receive buffer over the mean load.")] = None,
    ranks_per_domain: Annotated[int | None, typer.Option(help="Ranks among which expert weights may move.")] = None,
    relocate_interval: Annotated[int | None, typer.Option(help="Steps between moves of experts' homes.")] = None,
    relocate_min_gain: Annotated[float | None, typer.Option(help="Least gain, a fraction, for such a move.")] = None,
    force_balanced: Annotated[bool, typer.Option("--force-balanced", help="Route round robin: the ideal.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimizer.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step, over all devices.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Bytes of a sequence.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters and batches.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="File or folder of text; may be repeated.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help=RUN_DIR)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the run in the folder aside, and start anew.")
    ] = False,
) -> None:
    """Trains a model and writes metrics, checkpoints and a report into a run folder."""
    if distributed:
        _join_processes()
    console = Console(quiet=distributed and jax.process_index() > 0)
    parallel: dict[str, Any] = {"system": system, "data_parallel": data_parallel, "expert_parallel": expert_parallel}
    parallel |= {"replica_slots": replica_slots, "headroom": headroom, "ranks_per_domain": ranks_per_domain}
    sizes: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length}
    sizes |= {"learning_rate": learning_rate, "seed": seed}
    sizes |= {"relocate_interval": relocate_interval, "relocate_min_gain": relocate_min_gain}
    with StopRequest() as stop:
        try:
            config = _configured(preset(name), parallel, sizes, force_balanced)
            corpus = default_corpus(config.max_corpus_bytes) if not data else corpus_from(data)
            if not distributed:
                offer_cpu_devices(config.parallel.num_shards)
            if run_dir is None:
                run_dir = _default_run_dir(Path("runs") / name, last=resume or overwrite, distributed=distributed)
            tell = partial(_print, console)
            run = prepare(config, corpus, run_dir, resume=resume, overwrite=overwrite, tell=tell)
        except ValueError as error:
            _refuse(str(error))
        _introduce(console, config, corpus, run_dir)
        summary = execute(run, console, stop)
        if summary:
            _conclude(console, summary, run_dir)
    if stop.exit_code:
        raise typer.Exit(stop.exit_code)


def _default_run_dir(first: Path, *, last: bool, distributed: bool) -> Path:
    """Numbers the runs of a preset, so that a run that no folder was named for harms no other.

    Args:
        first: the folder of the first run.
        last: whether to return the folder of the last run instead of that of the next.
        distributed: whether other processes have to choose the same.
    """
    others = {path.name.removeprefix(f"{first.name}-"): path for path in first.parent.glob(f"{first.name}-*")}
    folders = {1: first} | {int(number): path for number, path in others.items() if number.isdigit()}
    number = max((number for number, path in folders.items() if RunFolder(path).has_run), default=0)
    number = max(number, 1) if last else number + 1
    if distributed:
        # One of them may begin to write before another looks.
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def _join_processes() -> None:
    """Has JAX find the other processes of the cluster; before anything else uses it."""
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        _refuse(f"distributed is set; expected a cluster that jax.distributed.initialize() detects: {error}")


def _configured(
    config: TrainConfig, parallel: dict[str, Any], sizes: dict[str, Any], force_balanced: bool
) -> TrainConfig:
    """Changes the preset by what was given on the command line."""

    def given(options: dict) -> dict:
        # `None` is an option that was not given, 0 one that was.
        return {name: value for name, value in options.items() if value is not None}

    model = dataclasses.replace(config.model, force_balanced=force_balanced or config.model.force_balanced)
    on = dataclasses.replace(config.parallel, **given(parallel))
    if parallel["replica_slots"] and not default_system(on.system).replica_slots:
        slots = parallel["replica_slots"]
        raise ValueError(f"replica_slots is {slots}; expected none with system {on.system}, which makes no replicas")
    return dataclasses.replace(config, model=model, parallel=on, **given(sizes))


def _refuse(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def _introduce(console: Console, config: TrainConfig, corpus: Corpus, run_dir: Path) -> None:
    entropy_nats = corpus.unigram_entropy_nats
    devices = f"{config.parallel.data_parallel} x {config.parallel.expert_parallel} {jax.devices()[0].platform} devices"
    _print(console, f"{config.parallel.system} on {devices}, {config.tokens_per_step} bytes a step, in {run_dir}")
    _print(console, f"data: {len(corpus.train):,} + {len(corpus.validation):,} bytes of {corpus.source}")
    _print(console, f"byte-unigram entropy of the validation text: {_nats(entropy_nats)}")


def _conclude(console: Console, summary: dict, run_dir: Path) -> None:
    entropy_nats = summary["unigram_entropy_nats"]
    _print(
        console, f"validation loss {_nats(summary['validation_loss_nats'])}; byte-unigram entropy {_nats(entropy_nats)}"
    )
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    _print(console, f"imbalance {before:.2f} -> {after:.2f}, {summary['tokens_per_s']:,.0f} tokens/s")
    _print(
        console,
        f"{summary['wall_s']:.0f} s, of which compiling {summary['compile_s']:.0f} s; see {run_dir}/report.html",
    )


def _nats(value: float) -> str:
    return f"{value:.3f} nats/byte ({value / math.log(2):.3f} bits)"


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()

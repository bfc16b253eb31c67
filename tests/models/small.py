"""Runs and models small enough for a test, and refusals of command lines."""

import dataclasses
import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from jax_moe_lb import System
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import (
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
)
from models.data.corpus import Corpus
from models.decoder.model import Decoder
from models.mesh import make_mesh, make_system, place_batch
from models.run_folder.metrics import RunFolder
from models.tiny_checkpoint import tiny_config
from models.training.loop import execute, prepare
from models.training.step import make_programs

CONFIG = TrainConfig(
    model=ModelConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, num_experts=16),
    parallel=ParallelConfig(expert_parallel=8),
    steps=8,
    batch=BatchConfig(size=16, sequence_length=16),
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
    validation=ValidationConfig(interval=4, batches=1),
    checkpoints=CheckpointConfig(interval=4),
)
ONE_ROUND = "plain:headroom=2.0,max_rounds=1"
"""System whose steps on two ranks take one round, without a program for further ones."""

CORPUS = Corpus.of_text(b"the quick brown fox jumps over the lazy dog. " * 200, "a fox")


def sets(*assignments: str) -> list[str]:
    """Return the command-line options of assignments."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def on(data_parallel: int, expert_parallel: int, system: str) -> TrainConfig:
    return dataclasses.replace(CONFIG, parallel=ParallelConfig(data_parallel, expert_parallel, system))


def filled(shapes, seed=0):
    """Return arrays of random numbers, without compiling an initialization."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        value = rng.uniform(0.5, 1.5, shape.shape) if len(shape.shape) < 2 else rng.normal(0, 0.2, shape.shape)
        return jax.device_put(jnp.asarray(value, shape.dtype), shape.sharding)

    return jax.tree.map(leaf, shapes)


def tiny_decoder(name, *, predict_further=False, **changed):
    """Return the configuration of a tiny model with some fields changed."""
    fields = Fields(json.dumps(json.loads(tiny_config(name)) | changed))
    return configured(fields, predict_further=predict_further)


def decoder_config(name, num_layers, num_further=0):
    """Return the configuration of a tiny model with 32 channels."""
    further = {"num_nextn_predict_layers": num_further} if num_further else {}
    sizes = {"num_hidden_layers": num_layers, "hidden_size": 32}
    return tiny_decoder(name, predict_further=num_further > 0, **sizes, **further)


def random_decoder(config, mesh, system=System(), seed=0):
    make = lambda: Decoder(config, mesh=mesh, system=system, rngs=nnx.Rngs(0))  # noqa: E731
    graph, shapes = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, filled(shapes, seed))


def programs_of(config, decoder=None, *, has_padding=False):
    mesh, system = make_mesh(config.parallel), make_system(config.parallel)
    return make_programs(config, mesh, system, decoder, has_padding=has_padding)


programs = functools.cache(programs_of)


def batch(config, step=1):
    tokens = CORPUS.batch(config.seed, step, config.batch.size, config.batch.sequence_length)
    return place_batch(tokens, make_mesh(config.parallel))


def losses(run):
    """Return the loss of each step, from the folder of a run or a `RunFolder`."""
    return [row["loss"] for row in (run if isinstance(run, RunFolder) else RunFolder(run)).rows("step")]


def run(config, run_dir, *, resume=False):
    """Train, and write all files except the report, whose figures take a second."""
    with mock.patch("models.training.loop.write_report"):
        return execute(prepare(config, CORPUS, run_dir, resume=resume), Console(quiet=True))


def tensors_in(folder):
    """Return the tensors of a checkpoint in one file."""
    return load_file(folder / "model.safetensors")


def are_equal(tensors, others):
    """Return whether two sets of tensors have the same names and bits."""
    one, other = ({name: (v.dtype, v.tobytes()) for name, v in each.items()} for each in (tensors, others))
    return one == other


def refusal(app, *arguments):
    """Return the only line that a command prints on bad arguments, without the word `error`."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").rstrip("\n")

"""A training run small enough for a test."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from jax_moe_lb import System
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


def random_decoder(config, mesh, system=System(), seed=0):
    make = lambda: Decoder(config, mesh=mesh, system=system, rngs=nnx.Rngs(0))  # noqa: E731
    graph, shapes = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, filled(shapes, seed))


@functools.cache
def programs(config):
    return make_programs(config, make_mesh(config.parallel), make_system(config.parallel))


def batch(config, step=1):
    """Return the batch of a step on the mesh."""
    tokens = CORPUS.batch(config.seed, step, config.batch.size, config.batch.sequence_length)
    return place_batch(tokens, make_mesh(config.parallel))


def losses(run):
    """Return the loss of each step, from the folder of a run or a `RunFolder`."""
    return [row["loss"] for row in (run if isinstance(run, RunFolder) else RunFolder(run)).rows("step")]


def run(config, run_dir, *, resume=False):
    """Train, and write all files except the report, whose figures take a second."""
    with mock.patch("models.training.loop.write_report"):
        return execute(prepare(config, CORPUS, run_dir, resume=resume), Console(quiet=True))

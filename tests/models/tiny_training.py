"""`models.train` with a model small enough for runs of seconds: `python -m tests.models.tiny_training`."""

import dataclasses

import models.train
from models import config as presets
from models.config import CheckpointConfig, ModelConfig, ParallelConfig, TrainConfig, ValidationConfig
from tests.models.small import CONFIG, CORPUS

TINY: TrainConfig = dataclasses.replace(
    CONFIG,
    model=ModelConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, num_experts=4),
    parallel=ParallelConfig(expert_parallel=2, system="greedy"),
    validation=ValidationConfig(interval=8, batches=1),
    checkpoints=CheckpointConfig(interval=2),
)


def main() -> None:
    presets.PRESETS["tiny"] = TINY
    models.train.default_corpus = lambda max_bytes: CORPUS
    models.train.app()


if __name__ == "__main__":
    main()

"""Configuration and presets of training runs."""

import math
from dataclasses import dataclass

from models.model_config import (
    COMPUTE_DTYPES,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    require_finite,
    require_one_of,
    require_positive,
)

OPTIMIZERS = ("adamw", "muon", "adafactor", "sgd")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
ANSWERS = ("all", "last")


@dataclass(frozen=True)
class BatchConfig:
    """Batch of one optimizer step.

    Args:
        size: sequences per step, over all devices.
        sequence_length: tokens per sequence.
        accumulate: microbatches per step. Each is routed and planned on its own, and gradients are summed, which saves
            memory. Use 1 (default) if the batch fits.

    Raises:
        ValueError: a number is below 1.
    """

    size: int = 32
    sequence_length: int = 128
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "sequence_length", "accumulate"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and its learning rate schedule.

    Args:
        learning_rate: peak learning rate.
        schedule: "cosine" (default) and "linear" decay to a tenth of the peak; "constant" stays at the peak; "wsd"
            stays there for the first four fifths of the steps, then decays linearly.
        warmup_steps: steps until the peak, at most a fifth of all steps.
        weight_decay: weight decay, of matrices alone; x learning rate.
        clip_norm: maximum global gradient norm.
        name: "adamw" (default); "muon" for matrices of layers, with "adamw" for the rest; "adafactor", with factored
            second moments; or "sgd", with momentum.
        state_dtype: dtype of the optimizer's state, float32 or bfloat16, which is rounded stochastically.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    learning_rate: float = 3e-3
    schedule: str = "cosine"
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    name: str = "adamw"
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        require_one_of("name", self.name, OPTIMIZERS)
        require_one_of("state_dtype", self.state_dtype, COMPUTE_DTYPES)
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number above 0")
        for name in ("warmup_steps", "weight_decay"):
            require_finite(name, getattr(self, name))
        require_one_of("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class DataConfig:
    """Text and tokenizer.

    Args:
        text_field: JSON field containing the document in each line of a `.jsonl` file.
        tokenizer: path of a `tokenizer.json`; `None` tokenizes into bytes, or as the checkpoint does.
        max_corpus_bytes: size of the default text in bytes, used if no data are given.
        validation: path of held-out data; `None` holds out a part of the training data.
        within_documents: if True, attention of a checkpoint's model stays within a document, and positions count from
            its start. Models without a checkpoint attend to earlier documents.
        answers: answers of a conversation to learn: "all", or "last" for those after the last message of a user.

    Raises:
        ValueError: `max_corpus_bytes` is below 1, or `answers` has another value.
    """

    text_field: str = "text"
    tokenizer: str | None = None
    max_corpus_bytes: int = 4_000_000
    validation: str | None = None
    within_documents: bool = True
    answers: str = "all"

    def __post_init__(self) -> None:
        require_one_of("answers", self.answers, ANSWERS)
        require_positive("max_corpus_bytes", self.max_corpus_bytes)


@dataclass(frozen=True)
class ValidationConfig:
    """Validation during the run.

    Args:
        interval: steps between validations.
        batches: batches per validation; each validation uses the same ones.

    Raises:
        ValueError: a number is below 1.
    """

    interval: int = 25
    batches: int = 4

    def __post_init__(self) -> None:
        for name in ("interval", "batches"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and their retention.

    Args:
        interval: steps between checkpoints.
        keep: number of newest checkpoints to keep (default 2, in case the newest is damaged). Older ones are deleted.
        keep_every_s: seconds between checkpoints to keep permanently; `None` keeps none permanently.

    Raises:
        ValueError: a number is below 1.
    """

    interval: int = 100
    keep: int = 2
    keep_every_s: int | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "keep"):
            require_positive(name, getattr(self, name))
        if self.keep_every_s is not None:
            require_positive("keep_every_s", self.keep_every_s)


@dataclass(frozen=True)
class RelocationConfig:
    """Relocation of home experts to other ranks.

    Args:
        interval: steps between relocations; `None` disables relocation.
        min_gain: minimum relative reduction of the load of a layer's busiest domain for its experts to move, as a
            fraction.

    Raises:
        ValueError: a number is out of range.
    """

    interval: int | None = None
    min_gain: float = 0.02

    def __post_init__(self) -> None:
        if self.interval is not None:
            require_positive("interval", self.interval)
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain is {self.min_gain}; expected at least 0 and less than 1")


@dataclass(frozen=True)
class MultiProcessConfig:
    """Coordinates of this process in a multi-process run; `models.multi_process.rendezvous` detects each `None`.

    Args:
        coordinator: HOST:PORT of process 0; `None` detects it as `jax.distributed` does.
        num_processes: number of processes of the run; `None` detects it.
        process_id: index of this process, from 0; `None` detects it.
        join_timeout_s: timeout for all processes to join, in seconds.
        stall_timeout_s: seconds without progress after which the run ends, as if a process were lost. Choose it longer
            than the longest step, validation and checkpoint. `None`: never if a process is stopped; if all respond,
            1800 s, or 10 times the longest interval between two steps if that is longer.

    Raises:
        ValueError: `stall_timeout_s` is not a finite number of at least 10.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout_s: float = 60.0
    stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.stall_timeout_s is not None and not 10 <= self.stall_timeout_s < math.inf:
            raise ValueError(
                f"stall_timeout_s is {self.stall_timeout_s}; expected a finite number of at least 10, or None"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of a training run; the defaults are the preset `tiny`.

    Args:
        model: sizes of the model.
        parallel: mesh and load-balancing system.
        batch: batch of one step.
        optimizer: optimizer and learning rate schedule.
        lora: low-rank adapters of a checkpoint.
        data: text and tokenizer.
        validation: validation during the run.
        checkpoints: checkpoints and their retention.
        relocation: relocation of home experts.
        multi_process: coordinates of this process.
        steps: optimizer steps, over which the learning rate decays.
        seed: seed of parameters and batches.

    Raises:
        ValueError: a number is out of range, or the batch size is not a multiple of microbatches x devices.
    """

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    relocation: RelocationConfig = RelocationConfig()
    multi_process: MultiProcessConfig = MultiProcessConfig()
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("steps", self.steps)
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")
        parallel, batch = self.parallel, self.batch
        if batch.size % (self.num_microbatches * parallel.data_parallel * parallel.expert_parallel):
            times = f" x microbatches {parallel.num_microbatches}" if parallel.stages > 1 else ""
            times += f" x batch.accumulate {batch.accumulate}" if batch.accumulate > 1 else ""
            shards = parallel.data_parallel * parallel.expert_parallel
            raise ValueError(
                f"batch.size is {batch.size}; expected a multiple of the {shards} shards, "
                f"data_parallel {parallel.data_parallel} x expert_parallel {parallel.expert_parallel}{times}"
            )
        if parallel.stages > 1 and self.model.checkpoint is None:
            raise ValueError(f"parallel.stages is {parallel.stages}; expected 1 without model.checkpoint")
        if self.lora.rank and self.model.checkpoint is None:
            raise ValueError(f"lora.rank is {self.lora.rank}; expected 0 without model.checkpoint")
        if parallel.fsdp and self.model.embed_dim % parallel.data_parallel:
            raise ValueError(
                f"parallel.fsdp is set with data_parallel {parallel.data_parallel}; expected a divisor of "
                f"model.embed_dim {self.model.embed_dim}"
            )

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step, each routed and planned on its own."""
        return self.batch.accumulate * self.parallel.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step."""
        return self.batch.size * self.batch.sequence_length


REFERENCE = TrainConfig(
    model=ModelConfig(
        num_layers=4,
        embed_dim=2048,
        num_heads=16,
        mlp_dim=768,
        num_experts=128,
        experts_per_token=8,
        compute_dtype="bfloat16",
        scan_layers=True,
    ),
    batch=BatchConfig(size=8, sequence_length=4096),
    optimizer=OptimizerConfig(learning_rate=3e-4),
)

SMALL = TrainConfig(
    model=ModelConfig(num_layers=3, embed_dim=256, num_heads=4, mlp_dim=256, num_experts=32),
    steps=300,
    batch=BatchConfig(size=16, sequence_length=256),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    data=DataConfig(max_corpus_bytes=8_000_000),
)

TUNING = TrainConfig(
    steps=100, batch=BatchConfig(size=8, sequence_length=512), optimizer=OptimizerConfig(learning_rate=1e-5)
)
"""Defaults for a checkpoint."""

PRESETS = {"tiny": TrainConfig(), "small": SMALL, "reference": REFERENCE}
"""Presets by name.

`tiny` learns English and Python from bytes in minutes on two CPU cores. `small` has 20 million parameters and trains on
twice as much text. `reference` has four layers with the sizes of Qwen3-30B-A3B,
for eight accelerators with 4096 tokens each; most measurements of compiled programs use it.
"""


def preset(name: str) -> TrainConfig:
    """Return the preset called `name`."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]

"""Configuration and presets of training runs."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from jax_moe_lb.core.checks import Count, Least, Natural, NonNegative, Positive, checked_fields, shown
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.layer.system import DISPATCHES

MOST_COPIES = 2**31 - 1  # most token copies of a step
NUM_BYTES = 256  # vocabulary size of the byte tokenizer
COMPUTE_DTYPES = ("float32", "bfloat16")
REMAT = ("none", "full")
OPTIMIZERS = ("adamw", "muon", "adafactor", "sgd")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
ANSWERS = ("all", "last")


def require_one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of the names."""
    if value not in names:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(names)}")


@dataclass(frozen=True)
@checked_fields
class ModelConfig:
    """Sizes of a decoder with a mixture of experts in every layer, or a checkpoint with its sizes."""

    num_layers: Annotated[Count, "Transformer blocks"] = 4
    embed_dim: Annotated[Count, "`H`, the width of the model"] = 128
    num_heads: Annotated[Count, "attention heads; `embed_dim` must be a multiple of `2 * num_heads`"] = 4
    mlp_dim: Annotated[Count, "`F`, the inner width of an expert"] = 128
    num_experts: Annotated[Count, "`E`, experts per layer"] = 16
    experts_per_token: Annotated[Count, "`K`, experts per token"] = 2
    compute_dtype: Annotated[str, "dtype of activations and matrix products, float32 or bfloat16"] = "float32"
    vocab_size: Annotated[Count, "vocabulary size (default 256, for bytes, or that of `data.tokenizer`)"] = NUM_BYTES
    remat: Annotated[str | None, 'residuals of a block: "none" for all, "full" for the input, or names to keep'] = None
    z_loss: Annotated[NonNegative, "weight of the router z-loss (ST-MoE), usually 1e-3; 0 omits it"] = 0.0
    aux_loss: Annotated[NonNegative, "weight of the balancing loss (Switch Transformer), usually 1e-2; 0 omits it"] = (
        0.0
    )
    bias_rate: Annotated[NonNegative, "step size of the routing biases (DeepSeek-V3), usually 1e-3; 0 keeps them"] = 0.0
    checkpoint: Annotated[str | None, "folder to tune, or a published model with random parameters"] = None
    param_dtype: Annotated[str, "dtype of the parameters, float32 or bfloat16"] = "float32"
    further_weight: Annotated[NonNegative, "weight of the multi-token prediction loss, usually 0.3; 0 for none"] = 0.0

    def __post_init__(self) -> None:
        # Rotary embeddings rotate the channels of a head in pairs.
        if self.checkpoint is None and self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"num_heads is {self.num_heads}; expected to divide embed_dim {self.embed_dim} evenly")
        for name in ("compute_dtype", "param_dtype"):
            require_one_of(name, getattr(self, name), COMPUTE_DTYPES)
        if self.checkpoint is None and self.further_weight:
            raise ValueError(f"further_weight is {self.further_weight!r}; expected 0.0 without a checkpoint")
        names = (*CHECKPOINT_NAMES, "attention", "stream")
        if self.remat not in (None, *REMAT) and not set(self.remat.split(",")) <= set(names):
            raise ValueError(f"remat is {self.remat!r}; expected none, full, or names out of {','.join(names)}")


@dataclass(frozen=True)
@checked_fields
class LoraConfig:
    """Low-rank adapters of a checkpoint's attention and experts, which alone are trained (LoRA)."""

    rank: Annotated[Natural, "rank of the adapters; 0 trains all parameters"] = 0
    alpha: Annotated[Positive, "factor on an adapter's product, x rank"] = 16.0
    targets: Annotated[str | None, "modules with adapters, as `q_proj,v_proj`; `None`: attention and experts"] = None

    def __post_init__(self) -> None:
        for name, usual in {"alpha": LoraConfig.alpha, "targets": None}.items():
            if not self.rank and getattr(self, name) != usual:
                raise ValueError(f"{name} is {getattr(self, name)!r} with rank 0; expected {usual}. Set lora.rank")


@dataclass(frozen=True)
@checked_fields
class ParallelConfig:
    """Mesh and load-balancing system."""

    data_parallel: Annotated[Count, "data-parallel groups, each with all experts"] = 1
    expert_parallel: Annotated[Count, "`R`, ranks per group"] = 8
    system: Annotated[str, "text `NAME[:OPTION=VALUE,...][+DISPATCH]`; see `jax_moe_lb.systems.system_named`"] = "exact"
    replica_slots: Annotated[int | None, "replica slots per rank; `None` takes the default of the system"] = None
    headroom: Annotated[float | None, "receive buffer size, x mean load; `None` takes the default of the system"] = None
    ranks_per_domain: Annotated[Count | None, "ranks among which expert weights move; `None` takes the whole group"] = (
        None
    )
    max_rounds: Annotated[Count | None, "maximum rounds compiled into a step; `None` for no limit"] = None
    dispatch: Annotated[str | None, '"direct", "once", "forward" or "rails"; `None`: by `dispatch_by_rule`'] = None
    stages: Annotated[Count, "pipeline stages of a checkpoint's layers with experts; 1 for no pipeline"] = 1
    repeats: Annotated[Count, "times a microbatch passes each stage; a stage then has this many blocks of layers"] = 1
    microbatches: Annotated[int | None, "microbatches in the pipeline, a multiple of `stages`, the default"] = None
    layers_before: Annotated[Natural, "layers with experts before the pipeline, if it cannot divide all of them"] = 0

    def __post_init__(self) -> None:
        self._check_pipeline()
        if self.dispatch is not None:
            require_one_of("dispatch", self.dispatch, tuple(DISPATCHES))
        if self.ranks_per_domain is not None and self.expert_parallel % self.ranks_per_domain:
            expected = f"a divisor of expert_parallel {self.expert_parallel}"
            raise ValueError(f"ranks_per_domain is {self.ranks_per_domain}; expected {expected}")

    def _check_pipeline(self) -> None:
        if self.num_microbatches < 1 or self.num_microbatches % self.stages:
            raise ValueError(f"microbatches is {self.microbatches}; expected a multiple of stages {self.stages}")
        for name, usual in {"repeats": 1, "microbatches": None, "layers_before": 0}.items():
            if self.stages == 1 and getattr(self, name) != usual:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {usual} without a pipeline. Set stages")

    @property
    def num_shards(self) -> int:
        """Number of devices of the mesh, over which the batch is split."""
        return self.data_parallel * self.expert_parallel * self.stages

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in the pipeline, 1 without one."""
        return self.stages if self.microbatches is None else self.microbatches

    @property
    def axes(self) -> str:
        """Names of the fields with the sizes of the mesh, for messages."""
        return "data_parallel x expert_parallel" + " x stages" * (self.stages > 1)

    @property
    def sizes(self) -> str:
        """Sizes of the mesh, in the order of `axes`."""
        return f"{self.data_parallel} x {self.expert_parallel}" + f" x {self.stages}" * (self.stages > 1)


@dataclass(frozen=True)
@checked_fields
class BatchConfig:
    """Batch of one optimizer step."""

    size: Annotated[Count, "sequences per step, over all devices"] = 32
    sequence_length: Annotated[Count, "tokens per sequence"] = 128
    accumulate: Annotated[Count, "microbatches per step, routed and planned on their own"] = 1


@dataclass(frozen=True)
@checked_fields
class OptimizerConfig:
    """Optimizer and its learning rate schedule."""

    learning_rate: Annotated[Positive, "peak learning rate"] = 3e-3
    schedule: Annotated[str, 'decay after the warm-up: "cosine", "linear", "wsd", or "constant" for none'] = "cosine"
    warmup_steps: Annotated[Natural, "steps until the peak, at most a fifth of all steps"] = 20
    weight_decay: Annotated[NonNegative, "weight decay, of matrices alone; x learning rate"] = 0.1
    clip_norm: Annotated[Positive, "maximum global gradient norm"] = 1.0
    name: Annotated[str, '"adamw", "muon" for matrices of layers, "adafactor" or "sgd"'] = "adamw"
    state_dtype: Annotated[str, "dtype of the state of the optimizer, float32 or bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require_one_of("name", self.name, OPTIMIZERS)
        require_one_of("state_dtype", self.state_dtype, COMPUTE_DTYPES)
        require_one_of("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
@checked_fields
class DataConfig:
    """Text and tokenizer."""

    text_field: Annotated[str, "JSON field containing the document in each line of a `.jsonl` file"] = "text"
    tokenizer: Annotated[str | None, "path of a `tokenizer.json`; `None`: bytes, or that of the checkpoint"] = None
    max_corpus_bytes: Annotated[Count, "size of the default text in bytes, used if no data are given"] = 4_000_000
    validation: Annotated[str | None, "path of held-out data; `None` holds out a part of the training data"] = None
    within_documents: Annotated[bool, "attention of a checkpoint's model stays within a document"] = True
    answers: Annotated[str, 'answers of a conversation to learn: "all", or "last" after the last user message'] = "all"
    now: Annotated[str | None, "time that a chat template sees, YYYY-MM-DDTHH:MM:SS; `None`: start of the run"] = None

    def __post_init__(self) -> None:
        require_one_of("answers", self.answers, ANSWERS)
        try:
            if self.now is not None:
                datetime.fromisoformat(self.now)
        except ValueError as error:
            raise ValueError(f"now is {shown(self.now)}; expected a time such as 2026-11-28T12:00:00") from error


@dataclass(frozen=True)
@checked_fields
class ValidationConfig:
    """Validation during the run."""

    interval: Annotated[Count, "steps between validations"] = 25
    batches: Annotated[Count, "batches per validation; each validation uses the same ones"] = 4


@dataclass(frozen=True)
@checked_fields
class CheckpointConfig:
    """Checkpoints and their retention."""

    interval: Annotated[Count, "steps between checkpoints"] = 100
    keep: Annotated[Count, "number of newest checkpoints to keep"] = 2
    keep_every_s: Annotated[Count | None, "seconds between checkpoints to keep for ever; `None` for none"] = None


@dataclass(frozen=True)
@checked_fields
class RelocationConfig:
    """Relocation of home experts to other ranks."""

    interval: Annotated[Count | None, "steps between relocations; `None` disables relocation"] = None
    min_gain: Annotated[float, "least reduction of a layer's highest domain load to move experts, a fraction"] = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain is {self.min_gain}; expected at least 0 and less than 1")
        if self.interval is None and self.min_gain != RelocationConfig.min_gain:
            raise ValueError(
                f"min_gain is {self.min_gain}; expected {RelocationConfig.min_gain} without relocation. Set interval"
            )


@dataclass(frozen=True)
@checked_fields
class MultiProcessConfig:
    """Coordinates of this process in a multi-process run; `models.multi_process.rendezvous` detects each `None`."""

    coordinator: Annotated[str | None, "HOST:PORT of process 0; `None` detects it as `jax.distributed` does"] = None
    num_processes: Annotated[int | None, "number of processes of the run; `None` detects it"] = None
    process_id: Annotated[int | None, "index of this process, from 0; `None` detects it"] = None
    join_timeout_s: Annotated[Positive, "timeout for all processes to join, in seconds"] = 60.0
    stall_timeout_s: Annotated[
        Annotated[float, Least(10.0)] | None,
        "seconds without progress after which the run ends, as if a process were lost; longer than the longest step, "
        "validation and checkpoint. `None`: never if a process is stopped; if all respond, 1800 s, or 10 times the "
        "longest interval between two steps if that is longer",
    ] = None


@dataclass(frozen=True)
@checked_fields
class TrainConfig:
    """Configuration of a training run; the defaults are the preset `tiny`."""

    model: ModelConfig = ModelConfig()  # sizes of the model
    parallel: ParallelConfig = ParallelConfig()  # mesh and load-balancing system
    batch: BatchConfig = BatchConfig()  # batch of one step
    optimizer: OptimizerConfig = OptimizerConfig()  # optimizer and learning rate schedule
    lora: LoraConfig = LoraConfig()  # low-rank adapters of a checkpoint
    data: DataConfig = DataConfig()  # text and tokenizer
    validation: ValidationConfig = ValidationConfig()  # validation during the run
    checkpoints: CheckpointConfig = CheckpointConfig()  # checkpoints and their retention
    relocation: RelocationConfig = RelocationConfig()  # relocation of home experts
    multi_process: MultiProcessConfig = MultiProcessConfig()  # coordinates of this process
    steps: Count = 200  # optimizer steps, over which the learning rate decays
    seed: Natural = 0  # seed of parameters and batches

    def __post_init__(self) -> None:
        parallel, batch = self.parallel, self.batch
        if batch.size % (self.num_microbatches * parallel.data_parallel * parallel.expert_parallel):
            times = f" x microbatches {parallel.num_microbatches}" if parallel.stages > 1 else ""
            times += f" x batch.accumulate {batch.accumulate}" if batch.accumulate > 1 else ""
            shards = parallel.data_parallel * parallel.expert_parallel
            raise ValueError(
                f"batch.size is {batch.size}; expected a multiple of the {shards} shards, "
                f"data_parallel {parallel.data_parallel} x expert_parallel {parallel.expert_parallel}{times}"
            )
        # The token copies of a step are counted in int32.
        most = MOST_COPIES // (batch.sequence_length * self.model.experts_per_token)
        if batch.size > most:
            copies = f"{batch.sequence_length} tokens x {self.model.experts_per_token} experts per token"
            raise ValueError(f"batch.size is {batch.size}; expected at most {most} sequences of {copies}")
        if parallel.stages > 1 and self.model.checkpoint is None:
            raise ValueError(f"parallel.stages is {parallel.stages}; expected 1 without model.checkpoint")
        if self.lora.rank and self.model.checkpoint is None:
            raise ValueError(f"lora.rank is {self.lora.rank}; expected 0 without model.checkpoint")

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step, each routed and planned on its own."""
        return self.batch.accumulate * self.parallel.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step."""
        return self.batch.size * self.batch.sequence_length


QWEN3_30B: dict[str, Any] = {"embed_dim": 2048, "num_heads": 16, "mlp_dim": 768, "num_experts": 128}
REFERENCE = TrainConfig(
    model=ModelConfig(4, **QWEN3_30B, experts_per_token=8, compute_dtype="bfloat16"),
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

# Defaults for a checkpoint.
TUNING = TrainConfig(
    steps=100, batch=BatchConfig(size=8, sequence_length=512), optimizer=OptimizerConfig(learning_rate=1e-5)
)

# Presets by name. `tiny` learns English and Python from bytes in minutes on two CPU cores. `small` has 20 million
# parameters and trains on twice as much text. `reference` has four layers with the sizes of Qwen3-30B-A3B, for eight
# accelerators with 4096 tokens each; most measurements of compiled programs use it.
PRESETS = {"tiny": TrainConfig(), "small": SMALL, "reference": REFERENCE}

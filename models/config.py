"""Presets of models and training runs.

A `UserError` ends the program with one line and an exit code of its own.
"""

import math
import sys
from dataclasses import dataclass

from jax_moe_lb.layer import CHECKPOINT_NAMES

USER_ERRORS = 2
"""The exit code of a process that does not begin, or goes no further, because of what the user asked for."""


class UserError(Exception):
    """The program ends with this line, since what the user asked for cannot be done."""


def say(line: str) -> None:
    """Prints one line to standard error at once, whole, whatever other threads and processes print."""
    sys.stderr.write(f"{' '.join(line.split())}\n")
    sys.stderr.flush()


NUM_BYTES = 256
"""The words of a vocabulary of bytes."""

COMPUTE_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
REMAT = ("none", "full")


def require_positive(name: str, value: int) -> None:
    """Refuses what is no number of things, with a `ValueError` unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")


@dataclass(frozen=True)
class ModelConfig:
    """These are the sizes of a decoder whose every feed-forward network is a mixture of experts.

    Args:
        num_layers: the blocks of attention and experts.
        embed_dim: `H`, the width of the model.
        num_heads: the heads of attention; it divides `embed_dim` into even parts.
        mlp_dim: `F`, the inner width of an expert.
        num_experts: `E`, the experts of a layer.
        experts_per_token: `K`, the experts of a token.
        force_balanced: whether to route round robin, the papers' ideal. It learns little; its speed is the bound.
        compute_dtype: the dtype of activations and products, "bfloat16" on accelerators. Parameters, optimizer,
            routers, norms and the loss are float32 in any case.
        scan_layers: whether the blocks are one loop, which is compiled once, and whose backward pass computes each
            block again but for routing, plan and attention. Otherwise all is kept, and few small blocks are faster.
        vocab_size: the words; 256, the default, are bytes.
        remat: what the backward pass of a block is given: "none" computes nothing again, "full" gives it the input
            alone, and names of `jax_moe_lb.layer.CHECKPOINT_NAMES` and "attention", with commas between them, are kept
            beside that. `None`, the usual choice, is what `scan_layers` says.
        z_loss: weighs the router's z-loss (ST-MoE), usually 1e-3; 0 leaves it out.
        aux_loss: weighs the load balance of experts (Switch Transformer), usually 1e-2; 0 leaves it out.
        bias_rate: the step of routing biases, which balance experts without a loss (DeepSeek-V3), usually 1e-3; 0
            makes no biases.

    Raises:
        ValueError: a size is below 1, the heads do not divide the width, a rate is below 0, or a word is none of those.
    """

    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    mlp_dim: int = 128
    num_experts: int = 16
    experts_per_token: int = 2
    force_balanced: bool = False
    compute_dtype: str = "float32"
    scan_layers: bool = False
    vocab_size: int = NUM_BYTES
    remat: str | None = None
    z_loss: float = 0.0
    aux_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("num_layers", "embed_dim", "num_heads", "mlp_dim", "num_experts", "experts_per_token", "vocab_size")
        for name in sizes:
            require_positive(name, getattr(self, name))
        for name in ("z_loss", "aux_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number of at least 0")
        # Rotary positions turn the channels of a head in pairs.
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"num_heads is {self.num_heads}; expected to divide embed_dim {self.embed_dim} evenly")
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(f"compute_dtype is {self.compute_dtype!r}; expected one of {', '.join(COMPUTE_DTYPES)}")
        names = (*CHECKPOINT_NAMES, "attention")
        if self.remat not in (None, *REMAT) and not set(self.remat.split(",")) <= set(names):
            raise ValueError(f"remat is {self.remat!r}; expected none, full, or names out of {','.join(names)}")


@dataclass(frozen=True)
class ParallelConfig:
    """These numbers say how the model lies on the machine.

    Args:
        data_parallel: the groups of ranks side by side, each with all experts.
        expert_parallel: `R`, the ranks in a group.
        system: the name of a function in `jax_moe_lb.layer.systems`.
        replica_slots: slots of a rank beyond its home experts, where the system makes replicas; `None` takes its
            default.
        headroom: the receive buffer over the mean load; `None` takes the system's default.
        ranks_per_domain: `M`, the ranks among which expert weights may move each microbatch; `None` takes all of a
            group.
        max_rounds: the rounds of the program of a step. A step whose plans need more is done again, by a second program
            that has as many as are needed. 1 suits GPUs of several nodes, whose hosts wait in each loop of rounds, if
            balanced loads stay below `headroom`; `None`, the usual choice, has one program that serves all.
        own_kernels: whether experts' products on Hopper are those of `jax_moe_lb`; see its `Exchange`. False is usual.
        fsdp: whether matrices and their optimizer state are split over `data_parallel`, too, and gathered for their
            layer, which saves memory and costs exchanges. Otherwise each group of ranks has all of them.

    Raises:
        ValueError: a number is out of range, the domains do not divide the group, or there is one group to split over.
    """

    data_parallel: int = 1
    expert_parallel: int = 8
    system: str = "exact"
    replica_slots: int | None = None
    headroom: float | None = None
    ranks_per_domain: int | None = None
    max_rounds: int | None = None
    own_kernels: bool = False
    fsdp: bool = False

    def __post_init__(self) -> None:
        require_positive("data_parallel", self.data_parallel)
        require_positive("expert_parallel", self.expert_parallel)
        if self.max_rounds is not None:
            require_positive("max_rounds", self.max_rounds)
        if self.fsdp and self.data_parallel == 1:
            raise ValueError("fsdp is set, but data_parallel is 1; expected at least 2 groups to split over")
        if self.ranks_per_domain is not None:
            require_positive("ranks_per_domain", self.ranks_per_domain)
            if self.expert_parallel % self.ranks_per_domain:
                raise ValueError(
                    f"ranks_per_domain is {self.ranks_per_domain}; "
                    f"expected a divisor of expert_parallel {self.expert_parallel}"
                )

    @property
    def num_shards(self) -> int:
        """Counts the devices of the mesh, over which the batch is split."""
        return self.data_parallel * self.expert_parallel


@dataclass(frozen=True)
class TrainConfig:
    """These numbers describe a training run; the defaults are those of the preset `tiny`.

    Args:
        model: the model that is trained.
        parallel: the devices and the system.
        steps: the steps of the optimizer, over which the learning rate decays.
        batch_size: the sequences of a step, over all devices.
        sequence_length: the tokens of a sequence.
        learning_rate: the learning rate at its peak.
        warmup_steps: the steps until the peak; at most a fifth of all steps are used for it.
        weight_decay: the weight decay of AdamW.
        clip_norm: the bound of the gradients' global norm.
        seed: the seed of parameters and batches.
        validation_interval: the steps between validations.
        validation_batches: the batches of one validation, always the same.
        checkpoint_interval: the steps between checkpoints.
        relocate_interval: the steps between moves of experts to other ranks; `None` lets homes stay.
        relocate_min_gain: a layer's experts move only if the load of its busiest domain falls by this fraction.
        max_corpus_bytes: how much of the default text is read.
        accumulate: the microbatches of a step, each with routing and plans of its own. Their gradients are added, so
            the step learns what it would of the whole batch, in less memory; 1 is usual where that fits.
        schedule: how the learning rate falls after its warm-up. "cosine", the usual one, and "linear" end at a tenth of
            the peak; "constant" stays there; "wsd" does so for the first four fifths of the steps, and then falls
            linearly.

    Raises:
        ValueError: a number is out of range, or the batch does not divide over microbatches and devices.
    """

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    steps: int = 200
    batch_size: int = 32
    sequence_length: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    validation_interval: int = 25
    validation_batches: int = 4
    checkpoint_interval: int = 100
    relocate_interval: int | None = None
    relocate_min_gain: float = 0.02
    max_corpus_bytes: int = 4_000_000
    accumulate: int = 1
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "validation_interval", "validation_batches")
        for name in (*counts, "checkpoint_interval", "max_corpus_bytes", "accumulate"):
            require_positive(name, getattr(self, name))
        if self.relocate_interval is not None:
            require_positive("relocate_interval", self.relocate_interval)
        if not 0 <= self.relocate_min_gain < 1:
            raise ValueError(f"relocate_min_gain is {self.relocate_min_gain}; expected at least 0 and less than 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected a finite number above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; expected one of {', '.join(SCHEDULES)}")
        if self.batch_size % (self.accumulate * self.parallel.num_shards):
            times = f" x accumulate {self.accumulate}" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size is {self.batch_size}; expected a multiple of the {self.parallel.num_shards} shards, "
                f"data_parallel {self.parallel.data_parallel} x expert_parallel {self.parallel.expert_parallel}{times}"
            )
        if self.parallel.fsdp and self.model.embed_dim % self.parallel.data_parallel:
            raise ValueError(
                f"fsdp is set with data_parallel {self.parallel.data_parallel}; expected a divisor of embed_dim "
                f"{self.model.embed_dim}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Counts the tokens that one step learns from."""
        return self.batch_size * self.sequence_length


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
    batch_size=8,
    sequence_length=4096,
    learning_rate=3e-4,
)

SMALL = TrainConfig(
    model=ModelConfig(num_layers=3, embed_dim=256, num_heads=4, mlp_dim=256, num_experts=32),
    steps=300,
    batch_size=16,
    sequence_length=256,
    learning_rate=1e-3,
    max_corpus_bytes=8_000_000,
)

PRESETS = {"tiny": TrainConfig(), "small": SMALL, "reference": REFERENCE}
"""`tiny` learns English and Python, byte by byte, in minutes on two CPU cores.

`small` has 20 million parameters and learns the same, of twice as much text; `benchmarks/bench_training.py` trains it.
`reference` has four layers of the sizes of Qwen3-30B-A3B, for eight accelerators with 4096 tokens each; most that is
said of compiled programs is said of it.
"""


def preset(name: str) -> TrainConfig:
    """Finds the preset of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]

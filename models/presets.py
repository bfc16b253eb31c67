"""Sizes of models and training runs, by name."""

import math
from dataclasses import dataclass


def require_positive(name: str, value: int) -> None:
    """Raises `ValueError` unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")


@dataclass(frozen=True)
class ModelConfig:
    """A byte-level decoder whose every feed-forward network is a mixture of experts.

    Args:
        num_layers: blocks of attention and experts.
        embed_dim: `H`.
        num_heads: of attention; divides `embed_dim` into even parts.
        mlp_dim: `F`, inner width of an expert.
        num_experts: `E`.
        experts_per_token: `K`.
        force_balanced: route round robin, the papers' ideal. Learns little; its speed is the bound.
    """

    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    mlp_dim: int = 128
    num_experts: int = 16
    experts_per_token: int = 2
    force_balanced: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "embed_dim", "num_heads", "mlp_dim", "num_experts", "experts_per_token"):
            require_positive(name, getattr(self, name))
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"num_heads is {self.num_heads}; expected to divide embed_dim {self.embed_dim} evenly")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model lies on the machine.

    Args:
        data_parallel: groups of ranks side by side, each with all experts.
        expert_parallel: `R`, ranks in a group.
        system: name of a function in `jax_moe_lb.systems`.
        replica_slots: slots per rank beyond the home experts', where the system makes replicas;
            `None`: its default.
        headroom: receive buffer over the mean load; `None`: the system's default.
        ranks_per_domain: `M`, ranks among which expert weights may move each microbatch; `None`: all of a group.
    """

    data_parallel: int = 1
    expert_parallel: int = 8
    system: str = "exact"
    replica_slots: int | None = None
    headroom: float | None = None
    ranks_per_domain: int | None = None

    def __post_init__(self) -> None:
        require_positive("data_parallel", self.data_parallel)
        require_positive("expert_parallel", self.expert_parallel)
        if self.ranks_per_domain is not None:
            require_positive("ranks_per_domain", self.ranks_per_domain)
            if self.expert_parallel % self.ranks_per_domain:
                raise ValueError(
                    f"ranks_per_domain is {self.ranks_per_domain}; "
                    f"expected a divisor of expert_parallel {self.expert_parallel}"
                )

    @property
    def num_shards(self) -> int:
        """Devices of the mesh, over which the batch is split."""
        return self.data_parallel * self.expert_parallel


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        model: what is trained.
        parallel: on which devices, by which system.
        steps: of the optimizer, over which the learning rate decays.
        batch_size: sequences per step, over all devices.
        sequence_length: bytes of a sequence.
        learning_rate: at its peak.
        warmup_steps: until then; at most a fifth of the steps.
        weight_decay: of AdamW.
        clip_norm: bound of the gradients' global norm.
        seed: of parameters and batches.
        validation_interval: steps between validations.
        validation_batches: batches of one validation, always the same.
        checkpoint_interval: steps between checkpoints.
        relocate_interval: steps between moves of experts to other ranks; `None`: homes stay.
        relocate_min_gain: a layer's experts move only if the load of its busiest domain falls by this fraction.
        max_corpus_bytes: how much of the default text is read.
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

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "validation_interval", "validation_batches")
        for name in (*counts, "checkpoint_interval", "max_corpus_bytes"):
            require_positive(name, getattr(self, name))
        if self.relocate_interval is not None:
            require_positive("relocate_interval", self.relocate_interval)
        if not 0 <= self.relocate_min_gain < 1:
            raise ValueError(f"relocate_min_gain is {self.relocate_min_gain}; expected at least 0 and less than 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected a finite number above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")
        if self.batch_size % self.parallel.num_shards:
            raise ValueError(
                f"batch_size is {self.batch_size}; expected a multiple of the {self.parallel.num_shards} shards, "
                f"data_parallel {self.parallel.data_parallel} x expert_parallel {self.parallel.expert_parallel}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step learns from."""
        return self.batch_size * self.sequence_length


PRESETS = {"tiny": TrainConfig()}
"""`tiny` learns English and Python, byte by byte, in minutes on two CPU cores."""


def preset(name: str) -> TrainConfig:
    """The preset of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]

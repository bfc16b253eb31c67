"""Configuration of a model, its adapters and its mesh."""

import math
from dataclasses import dataclass

from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.layer.system import DISPATCHES

NUM_BYTES = 256
"""Vocabulary size of the byte tokenizer."""

COMPUTE_DTYPES = ("float32", "bfloat16")
REMAT = ("none", "full")


def require_positive(name: str, value: int) -> None:
    """Raise `ValueError` unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")


def require_finite(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` is finite and at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; expected a finite number of at least 0")


def require_one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of the names."""
    if value not in names:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(names)}")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder with a mixture of experts in every layer, or a checkpoint with its sizes.

    Args:
        num_layers: Transformer blocks.
        embed_dim: `H`, the width of the model.
        num_heads: attention heads; `embed_dim` must be a multiple of `2 * num_heads`.
        mlp_dim: `F`, the inner width of an expert.
        num_experts: `E`, experts per layer.
        experts_per_token: `K`, experts per token.
        force_balanced: if True, route round robin, as an upper bound on speed. The router then learns little.
        compute_dtype: dtype of activations and matrix products, float32 or bfloat16. Routers, norms and the loss are
            always float32.
        scan_layers: if True, run the blocks as one `jax.lax.scan`. It compiles once and rematerializes each block in
            the backward pass except for routing, plan and attention. If False, all residuals are kept, which is faster
            for few small blocks.
        vocab_size: vocabulary size (default 256, for bytes). With `data.tokenizer`, the default is the size of the
            tokenizer's vocabulary.
        remat: residuals of a block. "none" keeps all; "full" keeps the block input alone; a comma-separated list of
            names from `jax_moe_lb.layer.CHECKPOINT_NAMES`, "attention" and "stream" keeps these as well. `None` follows
            `scan_layers`.
        z_loss: weight of the router z-loss (ST-MoE), usually 1e-3; 0 omits it.
        aux_loss: weight of the load-balancing loss (Switch Transformer), usually 1e-2; 0 omits it.
        bias_rate: step size of the routing biases (DeepSeek-V3), usually 1e-3; 0 omits the biases, or leaves those of
            a checkpoint unchanged. A published model with random parameters has the default 1e-3 if it has biases.
        checkpoint: folder of a checkpoint to tune, or a published model with random parameters, such as mixtral-8x7b.
            It has its own sizes and architecture; `None` builds the model of the keys above.
        param_dtype: dtype of the parameters of a checkpoint, float32 or bfloat16. Both are cast to `compute_dtype`
            for products. Updates of bfloat16 parameters are rounded stochastically.
        further_weight: weight of the multi-token prediction loss of a checkpoint, usually 0.3; 0 omits these layers.

    Raises:
        ValueError: a size is below 1, `embed_dim` is not a multiple of `2 * num_heads`, a rate is negative or not
            finite, or a dtype or `remat` name is unknown.
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
    checkpoint: str | None = None
    param_dtype: str = "float32"
    further_weight: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("num_layers", "embed_dim", "num_heads", "mlp_dim", "num_experts", "experts_per_token", "vocab_size")
        for name in sizes:
            require_positive(name, getattr(self, name))
        for name in ("z_loss", "aux_loss", "bias_rate", "further_weight"):
            require_finite(name, getattr(self, name))
        # Rotary embeddings rotate the channels of a head in pairs.
        if self.checkpoint is None and self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"num_heads is {self.num_heads}; expected to divide embed_dim {self.embed_dim} evenly")
        for name in ("compute_dtype", "param_dtype"):
            require_one_of(name, getattr(self, name), COMPUTE_DTYPES)
        for name, usual in {"param_dtype": "float32", "further_weight": 0.0}.items():
            if self.checkpoint is None and getattr(self, name) != usual:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {usual!r} without a checkpoint")
        names = (*CHECKPOINT_NAMES, "attention", "stream")
        if self.remat not in (None, *REMAT) and not set(self.remat.split(",")) <= set(names):
            raise ValueError(f"remat is {self.remat!r}; expected none, full, or names out of {','.join(names)}")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a checkpoint's attention and experts, which alone are trained (LoRA).

    The final model has them merged into its weights; the folder `adapter` has them alone.

    Args:
        rank: rank of the adapters; 0 trains all parameters.
        alpha: factor on an adapter's product, x rank.
        targets: names of the checkpoint's modules with adapters, separated by commas, such as `q_proj,v_proj`; `None`
            for attention and experts.

    Raises:
        ValueError: a number is negative, or `alpha` is 0.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str | None = None

    def __post_init__(self) -> None:
        require_finite("rank", self.rank)
        if self.targets is not None and not self.rank:
            raise ValueError(f"targets is {self.targets!r} with rank 0; expected none. Set lora.rank")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha is {self.alpha}; expected a finite number above 0")


@dataclass(frozen=True)
class ParallelConfig:
    """Mesh and load-balancing system.

    Args:
        data_parallel: data-parallel groups, each with all experts.
        expert_parallel: `R`, ranks per group.
        system: text of a system, `NAME[:OPTION=VALUE,...][+DISPATCH]`; see `jax_moe_lb.systems.system_named`.
        replica_slots: replica slots per rank; `None` takes the default of the system.
        headroom: receive buffer size, x mean load; `None` takes the default of the system.
        ranks_per_domain: `M`, ranks among which expert weights may move each microbatch; `None` takes the whole group.
        max_rounds: maximum rounds compiled into a step. If a plan needs more, a second program without the limit
            repeats the step. 1 suits multi-node GPUs, whose hosts wait in each loop of rounds, if balanced loads stay
            below `headroom`. `None` (default) compiles one program without a limit.
        dispatch: "direct" sends a row for each token copy, "once" a token to each rank that serves it; see `Once`.
            `None` chooses by rule; see `dispatch_by_rule`.
        fsdp: if True, also split matrices and their optimizer state over `data_parallel`, and gather each before use.
            This saves memory and adds communication. If False, each group holds all of them. A checkpoint's are always
            split over all devices.
        stages: pipeline stages of a checkpoint's layers with experts, each with groups of its own; 1 (default) for no
            pipeline. Other layers run on all devices.
        repeats: times a microbatch passes each stage; a stage then has this many blocks of layers.
        microbatches: microbatches in the pipeline, a multiple of `stages`; `None` takes `stages`.
        layers_before: layers with experts that run before the pipeline, on all devices. Set it if `stages * repeats`
            does not divide the number of layers.

    Raises:
        ValueError: a number is out of range, `ranks_per_domain` does not divide `expert_parallel`, `fsdp` is set
            with `data_parallel=1`, `microbatches` is no multiple of `stages`, or options of a pipeline are set without
            one.
    """

    data_parallel: int = 1
    expert_parallel: int = 8
    system: str = "exact"
    replica_slots: int | None = None
    headroom: float | None = None
    ranks_per_domain: int | None = None
    max_rounds: int | None = None
    dispatch: str | None = None
    fsdp: bool = False
    stages: int = 1
    repeats: int = 1
    microbatches: int | None = None
    layers_before: int = 0

    def __post_init__(self) -> None:
        self._check_pipeline()
        require_positive("data_parallel", self.data_parallel)
        require_positive("expert_parallel", self.expert_parallel)
        if self.max_rounds is not None:
            require_positive("max_rounds", self.max_rounds)
        if self.dispatch is not None:
            require_one_of("dispatch", self.dispatch, tuple(DISPATCHES))
        if self.fsdp and self.data_parallel == 1:
            raise ValueError("fsdp is set, but data_parallel is 1; expected at least 2 groups to split over")
        if self.ranks_per_domain is not None:
            require_positive("ranks_per_domain", self.ranks_per_domain)
            if self.expert_parallel % self.ranks_per_domain:
                raise ValueError(
                    f"ranks_per_domain is {self.ranks_per_domain}; "
                    f"expected a divisor of expert_parallel {self.expert_parallel}"
                )

    def _check_pipeline(self) -> None:
        require_positive("stages", self.stages)
        require_positive("repeats", self.repeats)
        require_finite("layers_before", self.layers_before)
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

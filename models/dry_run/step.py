"""Training steps compiled for absent clusters: presets of this project and published models."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_moe_lb.aot import ProgramReport, Target, compile_for, print_report, quiet_stderr, use_no_accelerators
from models.architectures.published import PUBLISHED, num_params, published_config
from models.config import ModelConfig, ParallelConfig, TrainConfig
from models.decoder.config import DecoderConfig
from models.decoder.layers import KEPT
from models.mesh import MESH_AXES, batch_sharding, make_system
from models.settings import Given, layered, updated
from models.training.step import SplitPrograms, make_programs, make_split_programs

BACKWARD = 3
"""A forward and backward pass is ideally three forward passes: a product has two gradients."""


def show(config: TrainConfig, target: Target) -> None:
    """Print what `dry_run` reports; the arguments are the same."""
    with quiet_stderr():
        report = dry_run(config, target)
    parallel = config.parallel
    where = f"{parallel.data_parallel} x {parallel.expert_parallel} devices of {target.name}"
    print_report(report, f"a step of {config.tokens_per_step} tokens, {parallel.system} on {where}")


def dry_run(config: TrainConfig, target: Target) -> ProgramReport:
    """Compile one step of training, optimizer included, and reports what a device of the target holds and does.

    Args:
        config: the sizes of the run.
        target: the machine; all of its devices take part.

    Raises:
        ValueError: the run does not fit the machine's number of devices, or its compiler refuses the step.
    """
    target.require_compiler()
    use_no_accelerators()
    mesh = mesh_of(config.parallel, target)
    programs = make_programs(config, mesh, make_system(config.parallel))
    shape = (config.batch.size, config.batch.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    ideal_flops = (
        ideal_flops_per_token(config.model, config.batch.sequence_length) * config.tokens_per_step // mesh.size
    )
    return compile_for(target, programs.step, (programs.state_shapes, tokens), mesh, ideal_flops=ideal_flops)


def ideal_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Count the operations of a step that one token needs, without those of the optimizer.

    Args:
        model: the sizes of the model.
        sequence_length: the tokens of a sequence, half of which a token attends to on average.
    """
    width = model.embed_dim
    attention = 4 * width * width + sequence_length * width
    experts = 3 * model.experts_per_token * width * model.mlp_dim + width * model.num_experts
    return 2 * BACKWARD * (model.num_layers * (attention + experts) + width * model.vocab_size)


def mesh_of(parallel: ParallelConfig, target: Target) -> Mesh:
    """Make the mesh `(data, expert)` of all devices of a target.

    Raises:
        ValueError: it has another number of devices.
    """
    devices = target.devices()
    if len(devices) != parallel.num_shards:
        raise ValueError(
            f"data_parallel x expert_parallel is {parallel.data_parallel} x {parallel.expert_parallel}; "
            f"expected a product of {len(devices)}, the devices of {target.name}"
        )
    grid = np.array(devices).reshape(parallel.data_parallel, parallel.expert_parallel)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


PRESETS = {name.lower(): name for name in PUBLISHED}
"""The names of presets, as the command line takes them, and of their models."""

SEQUENCE_LENGTH = 4096
"""The tokens of a sequence, of which every device has one, where nobody says."""

MOST_RANKS = 64
"""A group has so many ranks at most, where nobody says; larger clusters have several groups."""

ATTENTION_AGAIN = ("DeepSeek-V3", "GLM-4.5")
"""The backward pass of these computes attention again: that of 61 layers with 128 heads takes 40 GB of 4096 tokens."""


OWN_KEYS: dict[str, tuple[str, ...] | None] = {
    "model": None,
    "parallel": ("fsdp",),
    "batch": ("accumulate",),
    "relocation": ("interval",),
}
"""Keys by section that the step of a published model has no use for; `None` for all."""


@dataclass(frozen=True)
class PublishedRun:
    """These are the sizes of a step of a published model.

    Args:
        name: the model, a key of `PUBLISHED`.
        train: the devices, the system and the tokens; the sizes of its own model are not used.
    """

    name: str
    train: TrainConfig

    @classmethod
    def on(cls, preset: str, target: Target, given: Given) -> "PublishedRun":
        """Take what was given, and of the rest what is usual on a machine.

        Without sizes a group has as many ranks as divide the experts and the devices, `MOST_RANKS` at most; expert
        weights move inside a node each microbatch; and every device has one sequence of `SEQUENCE_LENGTH` tokens.

        Args:
            preset: a key of `PRESETS`.
            target: the machine.
            given: fields of `TrainConfig`.

        Raises:
            ValueError: a number is out of range, or the ranks do not make up the machine.
        """
        num_devices = math.prod(target.shape)
        name = PRESETS[preset]
        chosen = {key: value for key, value in given.get("parallel", {}).items() if value is not None}
        ranks = chosen.get("expert_parallel")
        if ranks is None:
            most = num_devices // chosen["data_parallel"] if chosen.get("data_parallel", 0) > 0 else num_devices
            ranks = _largest_divisor(math.gcd(published_config(name).num_experts, most), MOST_RANKS)
        on_node = num_devices // target.num_domains
        usual: dict[str, Any] = {
            "expert_parallel": ranks,
            "data_parallel": max(num_devices // ranks, 1) if ranks > 0 else 1,
        }
        usual["ranks_per_domain"] = math.gcd(on_node, ranks)
        parallel = updated(ParallelConfig(), usual | chosen, "parallel.")
        batch = {"size": parallel.num_shards, "sequence_length": SEQUENCE_LENGTH}
        numbers = layered({"batch": batch}, given, {"parallel": dataclasses.asdict(parallel)})
        return cls(name, updated(TrainConfig(), numbers))

    @property
    def config(self) -> DecoderConfig:
        """Read the sizes of the model: activations and products in bfloat16, parameters in float32."""
        return dataclasses.replace(published_config(self.name), compute_dtype="bfloat16", scan_layers=True)

    def programs(self, mesh: Mesh) -> SplitPrograms:
        """Build the programs for a mesh of `data` and `expert`, compiling nothing.

        Raises:
            ValueError: the experts do not divide over the ranks.
        """
        kept = tuple(name for name in KEPT if name != "attention") if self.name in ATTENTION_AGAIN else KEPT
        return make_split_programs(self.config, self.train, mesh, make_system(self.train.parallel), kept)

    def compile(self, target: Target) -> ProgramReport:
        """Compile one step, optimizer included, and reports what a device of the target holds and does.

        Raises:
            ValueError: it does not fit the machine's number of devices, or its compiler refuses it.
        """
        target.require_compiler()
        use_no_accelerators()
        mesh = mesh_of(self.train.parallel, target)
        programs = self.programs(mesh)
        shape = (self.train.batch.size, self.train.batch.sequence_length + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
        per_token = published_flops_per_token(self.config, self.train.batch.sequence_length)
        ideal_flops = per_token * self.train.tokens_per_step // mesh.size
        return compile_for(target, programs.step, (programs.state_shapes, tokens), mesh, ideal_flops=ideal_flops)

    def __str__(self) -> str:
        parallel, train = self.train.parallel, self.train
        tokens = f"{train.batch.size} sequences of {train.batch.sequence_length} tokens"
        groups = f"{parallel.data_parallel} x {parallel.expert_parallel} devices"
        return f"a step of {self.name}, {tokens}, {parallel.system} on {groups}"


def show_published(preset: str, target: Target, given: Given) -> None:
    """Print what `PublishedRun.compile` reports.

    Args:
        preset: a key of `PRESETS`.
        target: the machine.
        given: fields of `TrainConfig`, none of its model, since a published model has its own.

    Raises:
        ValueError: an option does not go with it, or the step does not compile.
    """
    for section, keys in OWN_KEYS.items():
        for key, value in given.get(section, {}).items():
            if value is not None and (keys is None or key in keys):
                raise ValueError(
                    f"{section}.{key} is {value!r}; expected none with config {preset}, whose step is compiled as it is"
                )
    run = PublishedRun.on(preset, target, given)
    with quiet_stderr():
        report = run.compile(target)
    print_report(report, f"{run} of {target.name}")


def refuse_training(preset: str) -> None:
    """Refuse to train a published model on bytes.

    Raises:
        ValueError: it is one.
    """
    if preset in PRESETS:
        raise ValueError(
            f"config is {preset!r}; expected --dry-run with it, since the text of a run is bytes: models.finetune "
            "tunes a checkpoint, and models.upcycle makes one"
        )


def published_flops_per_token(config: DecoderConfig, sequence_length: int) -> int:
    """Count the operations of a step that one token needs, without those of the optimizer.

    Args:
        config: the sizes of the model.
        sequence_length: the tokens of a sequence, of which a token attends to those before it, or a window of them.
    """
    # An embedding is looked up, not multiplied with.
    products = num_params(config)[1] - (0 if config.tie_embeddings else config.vocab_size * config.embed_dim)
    latent = config.latent
    channels = latent.plain_dim + latent.rotated_dim + latent.value_dim if latent else 2 * config.head_dim
    attention = sum(
        _keys_seen(sequence_length, config.window(layer)) * config.num_heads * channels
        for layer in range(config.num_layers)
    )
    return 2 * BACKWARD * (products + attention)


def _keys_seen(length: int, window: int | None) -> int:
    """Count the keys that a query sees on average."""
    reach = length if window is None else min(window, length)
    return (reach * (reach + 1) // 2 + (length - reach) * reach) // length


def _largest_divisor(number: int, most: int) -> int:
    return max(size for size in range(1, most + 1) if number % size == 0)

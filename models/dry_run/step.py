"""Training steps compiled for absent clusters: presets of this project and published models."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_moe_lb.aot import ProgramReport, Target, compile_for, print_report, quiet_stderr, use_no_accelerators
from jax_moe_lb.core import FileLimits
from models.architectures.published import num_params, published_config
from models.config import TUNING, ParallelConfig, TrainConfig
from models.decoder.config import DecoderConfig
from models.decoder.layers import KEPT
from models.mesh import batch_sharding, make_system, mesh_from
from models.settings import Given, layered, updated
from models.training.source import PUBLISHED_NAMES, preset_config, source_of, with_sizes
from models.training.step import make_programs

BACKWARD = 3  # ideal ratio of a forward and backward pass to a forward pass; each matrix product has two gradients


def show(config: TrainConfig, target: Target, limits: FileLimits = FileLimits(), *, has_padding: bool = False) -> None:
    """Compile one training step for a target and print its report; the arguments match `dry_run`."""
    with quiet_stderr():
        report = dry_run(config, target, limits, has_padding=has_padding)
    name, parallel = PUBLISHED_NAMES.get(config.model.checkpoint or ""), config.parallel
    sizes = f"{config.batch.size} sequences of {config.batch.sequence_length} tokens"
    where = f"{parallel.system} on {parallel.sizes} devices of {target.name}"
    print_report(report, f"a step of {f'{name}, ' if name else ''}{sizes}, {where}")


def dry_run(
    config: TrainConfig, target: Target, limits: FileLimits = FileLimits(), *, has_padding: bool = False
) -> ProgramReport:
    """Compile one training step, including the optimizer, and report memory and operations per device."""
    target.require_compiler()
    use_no_accelerators()
    mesh, source = mesh_of(config.parallel, target), source_of(config.model, limits)
    decoder = source.config if source else None
    programs = make_programs(config, mesh, make_system(config.parallel), decoder, has_padding=has_padding)
    shape, length = (config.batch.size, config.batch.sequence_length + 1), config.batch.sequence_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    per_token = decoder_flops_per_token(decoder or preset_config(config.model), length)
    ideal_flops = per_token * config.tokens_per_step // mesh.size
    return compile_for(target, programs.step, (programs.state_shapes, tokens), mesh, ideal_flops=ideal_flops)


def mesh_of(parallel: ParallelConfig, target: Target) -> Mesh:
    """Return the mesh of all devices of a target, see `models.mesh.make_mesh`."""
    devices = target.devices()
    if len(devices) != parallel.num_shards:
        raise ValueError(
            f"{parallel.axes} is {parallel.sizes}; expected a product of {len(devices)}, the devices of {target.name}"
        )
    return mesh_from(devices, parallel)


SEQUENCE_LENGTH = 4096  # default tokens per sequence; each device has one sequence
MOST_RANKS = 64  # default maximum of ranks per group; larger clusters have several groups
# Models whose backward pass rematerializes attention, except its sum with the residual stream. For 61 layers with 128
# heads, queries, keys, values and outputs take 40 GB at 4096 tokens.
ATTENTION_AGAIN = ("DeepSeek-V3", "GLM-4.5")


def published_run(preset: str, target: Target, given: Given) -> TrainConfig:
    """Combine the given fields of a run of a published model with the defaults for a target."""
    # By default, the ranks per group are the largest common divisor of experts and devices up to `MOST_RANKS`.
    # Expert weights move within a node each microbatch. Every device has one document of `SEQUENCE_LENGTH` tokens.
    name = PUBLISHED_NAMES[preset]
    chosen = {key: value for key, value in given.get("parallel", {}).items() if value is not None}
    num_devices = target.num_devices // max(chosen.get("stages", 1), 1)
    ranks = chosen.get("expert_parallel")
    if ranks is None:
        most = num_devices // chosen["data_parallel"] if chosen.get("data_parallel", 0) > 0 else num_devices
        divided = math.gcd(published_config(name).num_experts, most)
        ranks = max(size for size in range(1, MOST_RANKS + 1) if divided % size == 0)
    usual = {"expert_parallel": ranks, "data_parallel": max(num_devices // ranks, 1) if ranks > 0 else 1}
    usual["ranks_per_domain"] = math.gcd(target.num_devices // target.num_domains, ranks)
    parallel = updated(ParallelConfig(), usual | chosen, "parallel.")
    attention = "stream" if name in ATTENTION_AGAIN else "attention"
    kept = [attention if one == "attention" else one for one in KEPT]
    model = {"checkpoint": preset, "compute_dtype": "bfloat16", "remat": ",".join(kept)}
    size = parallel.data_parallel * parallel.expert_parallel * parallel.num_microbatches
    batch = {"size": size, "sequence_length": SEQUENCE_LENGTH}
    usual_given = {"model": model, "batch": batch, "data": {"within_documents": False}}
    config = updated(TUNING, layered(usual_given, given, {"parallel": dataclasses.asdict(parallel)}))
    return updated(config, with_sizes(given, source_of(config.model)))


def decoder_flops_per_token(config: DecoderConfig, sequence_length: int) -> int:
    """Return the ideal floating-point operations of a step per token, without the optimizer."""
    # An embedding is a lookup, not a matrix product.
    products = num_params(config)[1] - (0 if config.tie_embeddings else config.vocab_size * config.embed_dim)
    latent, delta = config.latent, config.delta
    channels = latent.plain_dim + latent.rotated_dim + latent.value_dim if latent else 2 * config.head_dim
    attention = sum(
        _keys_seen(sequence_length, config.window(layer), config.chunk(layer)) * config.num_heads * channels
        for layer in range(config.num_layers)
        if layer not in config.delta_layers
    )
    if delta is not None:
        # Reads of the state by keys and by queries, and its update.
        attention += 3 * len(config.delta_layers) * delta.num_heads * delta.key_dim * delta.value_dim
    return 2 * BACKWARD * (products + attention)


def _keys_seen(length: int, window: int | None, chunk: int | None) -> int:
    """Return the number of keys visible to a query, on average."""
    length = length if chunk is None else min(chunk, length)
    reach = length if window is None else min(window, length)
    return (reach * (reach + 1) // 2 + (length - reach) * reach) // length

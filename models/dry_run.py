"""`dry_run` compiles the training step for a machine that need not be there, and `show` prints what came out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_moe_lb.compiled import Report, Target, compile_for, print_report, quiet_stderr, use_no_accelerators
from models.parallel import MESH_AXES, batch_sharding, make_system
from models.presets import ModelConfig, TrainConfig
from models.training import make_programs

BACKWARD = 3
"""A forward and backward pass is ideally three forward passes: a product has two gradients."""


def show(config: TrainConfig, target: Target) -> None:
    """Prints what `dry_run` reports; the arguments are the same."""
    with quiet_stderr():
        report = dry_run(config, target)
    parallel = config.parallel
    where = f"{parallel.data_parallel} x {parallel.expert_parallel} devices of {target.name}"
    print_report(report, f"a step of {config.tokens_per_step} tokens, {parallel.system} on {where}")


def dry_run(config: TrainConfig, target: Target) -> Report:
    """Compiles one step of training, optimizer included, and reports what a device of the target holds and does.

    Args:
        config: the sizes of the run.
        target: the machine; all of its devices take part.

    Raises:
        ValueError: the run does not fit the machine's number of devices, or its compiler refuses the step.
    """
    target.require_compiler()
    use_no_accelerators()
    mesh = _mesh(config, target)
    programs = make_programs(config, mesh, make_system(config.parallel))
    shape = (config.batch_size, config.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    ideal_flops = ideal_flops_per_token(config.model, config.sequence_length) * config.tokens_per_step // mesh.size
    return compile_for(target, programs.step, (programs.state_shapes, tokens), mesh, ideal_flops=ideal_flops)


def ideal_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Counts the operations of a step that one token needs, without those of the optimizer.

    Args:
        model: the sizes of the model.
        sequence_length: the tokens of a sequence, half of which a token attends to on average.
    """
    width = model.embed_dim
    attention = 4 * width * width + sequence_length * width
    experts = 3 * model.experts_per_token * width * model.mlp_dim + width * model.num_experts
    return 2 * BACKWARD * (model.num_layers * (attention + experts) + width * model.vocab_size)


def _mesh(config: TrainConfig, target: Target) -> Mesh:
    devices, parallel = target.devices(), config.parallel
    if len(devices) != parallel.num_shards:
        raise ValueError(
            f"data_parallel x expert_parallel is {parallel.data_parallel} x {parallel.expert_parallel}; "
            f"expected a product of {len(devices)}, the devices of {target.name}"
        )
    grid = np.array(devices).reshape(parallel.data_parallel, parallel.expert_parallel)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

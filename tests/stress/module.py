"""The Flax layer, with parameters, bias, homes and state set before every call."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jax_moe_lb import ExpertConfig, MoE, Precision
from tests.stress.draws import WIDE_DTYPES
from tests.stress.float64_experts import Weights
from tests.stress.programs import Program
from tests.stress.strategies import Strategies
from tests.stress.transformations import Given, Step


def make_module_step(program: Program, strategies: Strategies) -> Step:
    length = program.rules().sequence_length
    layer = MoE(
        program.width,
        program.num_experts,
        **strategies._asdict(),
        experts=ExpertConfig(program.mlp_dim, gated=program.gated),
        # Parameters are wide, and rounded at the input of the layer.
        precision=Precision(program.dtype, WIDE_DTYPES[program.dtype]),
        rngs=nnx.Rngs(0),
    )

    def loss(layer: MoE, x: jax.Array, given: Given) -> tuple:
        by_sequence = x.reshape(-1, length, x.shape[-1])
        y, stats = layer(by_sequence, None if given.mask is None else given.mask.reshape(-1, length))
        y = y.reshape(x.shape)
        return (y.astype(given.target.dtype) * given.target).sum() + stats.loss.sum(), (y, stats)

    loss = nnx.remat(loss) if "checkpoint" in program.transformation else loss
    step = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def run(x: jax.Array, weights: Weights, given: Given, state: Any) -> tuple:
        for name, value in {**weights._asdict(), "bias": given.bias, "homes": given.homes}.items():
            if value is not None:
                replace_value(getattr(layer, name), value)
        if layer.state is not None:
            layer.state.set_value(state)
        (value, (y, stats)), (gradients, by_x) = step(layer, x, given)
        state = state if layer.state is None else layer.state.get_value()
        found = nnx.to_pure_dict(gradients)
        return (value, (y, stats, state)), (by_x, Weights(*(found.get(name) for name in Weights._fields)))

    return run


def replace_value(variable: nnx.Variable, value: jax.Array) -> None:
    """Set a value with the dtype and sharding of the old one."""
    old = variable.get_value()
    value = value.astype(old.dtype)
    variable.set_value(jax.device_put(value, old.sharding) if isinstance(old.sharding, NamedSharding) else value)

"""A compiled program of the random layer test, run on many inputs."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import Stats
from tests.stress.draws import Inputs
from tests.stress.float64_experts import Weights
from tests.stress.module import make_module_step
from tests.stress.programs import Program
from tests.stress.strategies import strategies_of
from tests.stress.transformations import Given, make_step


class Outcome(NamedTuple):
    """Outputs of a program: tokens stacked over microbatches, statistics over microbatches or layers."""

    value: np.ndarray
    y: np.ndarray
    stats: Stats
    state: Any
    x: np.ndarray  # its gradient
    weights: Weights  # gradients of weights, stacked over layers with separate weights


class Compiled:
    """Compiled program; `run` may be called repeatedly, with `state` as the balancer's initial state."""

    def __init__(self, program: Program) -> None:
        self.program, strategies = program, strategies_of(program)
        self.mesh, self.topology = strategies.mesh, strategies.topology
        make = make_module_step if program.transformation.startswith("module") else make_step
        self.step = make(program, strategies)
        state = strategies.system.balancer.init((self.topology.num_ranks, program.num_experts))
        # Every group of every layer has its own state.
        copies = ((program.layers,) if program.scans else ()) + (program.num_groups,)
        self.state = jax.tree.map(lambda leaf: np.broadcast_to(leaf, copies + np.shape(leaf)), state)

    def run(self, inputs: Inputs, state: Any) -> Outcome:
        program, stacked = self.program, self.program.microbatches > 1
        arrays = (array if stacked else array[0] for array in (inputs.x, inputs.mask, inputs.target))
        by_token = PartitionSpec(*[None] * stacked, self.topology.data_axes + self.topology.expert_axes)
        x, mask, target = (self._put(array, by_token) for array in arrays)
        weights = inputs.weights if program.own_weights else jax.tree.map(lambda leaf: leaf[0], inputs.weights)
        weights, bias, homes, state = self._put((weights, inputs.bias, inputs.homes, state), PartitionSpec())
        given = Given(mask if program.masked else None, target, bias, homes)
        # Outside jit, reverse mode on Explicit axes creates its first array on the mesh of the context.
        eager = program.explicit and program.transformation == "not jitted"
        with jax.set_mesh(self.mesh) if eager else contextlib.nullcontext():
            (value, (y, stats, state)), (by_x, by_weights) = self.step(x, weights, given, state)
        # Return host arrays, so that the state has the same placement in the next call, without a recompilation.
        return jax.device_get(Outcome(value, y, stats, state, by_x, by_weights))

    def _put(self, tree: Any, spec: PartitionSpec) -> Any:
        if not self.program.explicit:
            # Copies: a donated buffer must not share memory with the inputs of the reference.
            return jax.tree.map(jnp.array, tree)
        return jax.device_put(tree, NamedSharding(self.mesh, spec))

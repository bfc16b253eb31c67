"""A compiled program of the random layer test, run on many inputs."""

import contextlib
from collections.abc import Sequence
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
from tests.stress.transformations import Given, exported, make_step


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

    def __init__(self, program: Program, devices: Sequence[jax.Device] | None = None) -> None:
        devices = jax.devices() if devices is None else devices
        self.program, strategies = program, strategies_of(program, devices)
        self.mesh, self.topology = strategies.mesh, strategies.topology
        make = make_module_step if program.transformation.startswith("module") else make_step
        self.step = make(program, strategies)
        self.serialized = False
        state = strategies.system.balancer.init((self.topology.num_ranks, program.num_experts))
        # Every group of every layer has its own state.
        copies = ((program.layers,) if program.scans else ()) + (program.num_groups,)
        self.state = jax.tree.map(lambda leaf: np.broadcast_to(leaf, copies + np.shape(leaf)), state)
        # The same program on other devices, or the same ones in another order.
        alternates = program.transformation == "two meshes" and devices == jax.devices()
        self.other = Compiled(program, devices[::-1]) if alternates else None

    def run(self, number: int, inputs: Inputs, state: Any) -> Outcome:
        """Run the program; odd numbers run on the other mesh, if there is one."""
        if self.other is not None and number % 2:
            return self.other.run(number, inputs, state)
        program, stacked = self.program, self.program.microbatches > 1
        arrays = (array if stacked else array[0] for array in (inputs.x, inputs.mask, inputs.target))
        by_token = PartitionSpec(*[None] * stacked, self.topology.data_axes + self.topology.expert_axes)
        x, mask, target = (self._put(array, by_token) for array in arrays)
        weights = inputs.weights if program.own_weights else jax.tree.map(lambda leaf: leaf[0], inputs.weights)
        weights, bias, homes, state = self._put((weights, inputs.bias, inputs.homes, state), PartitionSpec())
        given = Given(mask if program.masked else None, target, bias, homes)
        if program.transformation == "exported" and not self.serialized:
            self.step, self.serialized = exported(self.step, (x, weights, given, state)), True
        # Outside jit, reverse mode on Explicit axes creates its first array on the mesh of the context.
        eager = program.explicit and program.transformation == "not jitted"
        with jax.set_mesh(self.mesh) if eager else contextlib.nullcontext():
            (value, (y, stats, state)), (by_x, by_weights) = self.step(x, weights, given, state)
        # Return host arrays, so that the state has the same placement in the next call, without a recompilation.
        return jax.device_get(Outcome(value, y, stats, state, by_x, by_weights))

    def faults(self) -> list[str]:
        """Return one line if a jitted step was compiled more than once."""
        if self.program.transformation in ("not jitted", "exported", "module", "module, checkpoint"):
            return []
        sizes = [one.step._cache_size() for one in (self, self.other) if one is not None]
        if max(sizes) > 1:
            return [f"the steps have {sizes} compiled programs; expected at most 1 each"]
        return []

    def _put(self, tree: Any, spec: PartitionSpec) -> Any:
        # An exported program runs on arrays of as many devices as its mesh has.
        if self.program.explicit or self.program.transformation == "exported":
            return jax.device_put(tree, NamedSharding(self.mesh, spec))
        # Copies: a donated buffer must not share memory with the inputs of the reference.
        return jax.tree.map(jnp.array, tree)

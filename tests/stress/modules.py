"""Compare random layers of `tests.stress.signatures` with the dense float64 layer.

`python -m tests.stress.modules FIRST LAST INPUTS` prints one JSON object per layer: its number, the number of inputs,
and the refusal or the differences.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator

if __name__ == "__main__":
    # Compilation dominates, as in the tests.
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quickly}".strip()

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import MoE, router_loss, use_virtual_cpu_devices
from tests.adapters import adapters_of, with_adapters
from tests.stress.dense_module import Tokens, dense
from tests.stress.signatures import WIDTH, draw_layer

TOLERANCES = {np.float64: 1e-11, np.float32: 1e-4}
"""Tolerance by the dtypes of tokens and parameters, relative to the largest entry."""


def prepare(layer: MoE, rng: np.random.Generator) -> None:
    """Set random biases, and add adapters to a third of the layers."""
    for name in ("up_bias", "gate_bias", "down_bias", "kernel_bias", "bias"):
        if (bias := getattr(layer, name)) is not None:
            value = jnp.asarray(0.2 * rng.normal(size=bias.shape), bias[...].dtype)
            bias[...] = jax.device_put(value, bias[...].sharding)
    if rng.random() < 1 / 3:
        everywhere = NamedSharding(layer.mesh, PartitionSpec())
        stored = jax.tree.map(jax.device_get, layer._experts())
        for name, value in adapters_of(with_adapters(jax.tree.map(jnp.asarray, stored))).items():
            if value is not None:
                setattr(layer, name, nnx.Param(jax.device_put(value, everywhere)))


def inputs_of(layer: MoE, rng: np.random.Generator) -> tuple[Array, Tokens, Array]:
    """Return tokens, also in odd numbers, their properties, and a target."""
    shape = shape_of(layer, rng)
    x, target = rng.normal(size=(2, *shape, WIDTH))
    given = {"mask": rng.random(shape) < 0.8} if rng.random() < 0.5 else {"mask": None}
    if len(shape) > 1 and rng.random() < 0.5:
        given |= {"segments": rng.integers(-1, 4, shape), "num_segments": 3}
    elif len(shape) == 1 and layer.losses.sequence:
        given |= {"segments": rng.integers(0, 3, shape), "num_segments": 4}
    if hasattr(layer.router, "with_experts") and rng.random() < 0.3:
        given |= replay(layer, shape, rng)
    tokens = Tokens(token_ids=rng.integers(0, 50, shape), key=jax.random.key(rng.integers(99)), **given)
    # Tokens are exact in float32.
    return jnp.asarray(x.astype(np.float32), jnp.float64), tokens, jnp.asarray(target)


def shape_of(layer: MoE, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the leading dimensions of tokens: sequences or none, and 0 tokens in a few layers."""
    shards = layer._num_groups() * layer.topology.num_ranks
    shapes = [(shards, int(rng.integers(1, 8))), (2, int(rng.integers(1, 4)), 4), (int(rng.integers(1, 60)),), (3, 5)]
    return shapes[rng.integers(len(shapes))]


def replay(layer: MoE, shape: tuple[int, ...], rng: np.random.Generator) -> dict:
    """Return experts of most tokens, some copies of none, and in half of the layers weights."""
    per_tok = layer.router.num_experts_per_tok
    per_tok = getattr(layer.router, "max_experts_per_tok", None) or per_tok
    order = rng.permuted(np.broadcast_to(np.arange(layer.kernel.shape[1]), (*shape, layer.kernel.shape[1])), axis=-1)
    experts = np.where(rng.random((*shape, per_tok)) < 0.1, -1, order[..., :per_tok])
    experts = np.where(rng.random((*shape, 1)) < 0.2, -1, experts)
    return {"experts": experts} | ({"weights": rng.random((*shape, per_tok))} if rng.random() < 0.5 else {})


class Compiled:
    """A random layer and its reference; raises the error of a refused layer."""

    def __init__(self, seed: int) -> None:
        self.layer, _ = draw_layer(seed)
        self.rng = np.random.default_rng([1, seed])
        prepare(self.layer, self.rng)
        self.inputs = inputs_of(self.layer, self.rng)
        # The reference numbers segments on the host.
        static = {"segments": self.inputs[1].segments, "num_segments": self.inputs[1].num_segments}
        graph, self.params, rest = nnx.split(self.layer, nnx.Param, ...)
        host_rest = jax.tree.map(on_host, rest)
        everywhere = NamedSharding(self.layer.mesh, PartitionSpec())

        def ours(params, x, tokens, target):
            segments = None if static["segments"] is None else jnp.asarray(static["segments"])
            given = tokens._asdict() | static | {"segments": segments}
            y, stats = nnx.merge(graph, params, rest, copy=True)(x, **given)
            y, loss = y.astype(jnp.float64), router_loss(stats).astype(jnp.float64)
            if jax.typeof(y).sharding.mesh.are_all_axes_explicit:
                y = jax.sharding.reshard(y, everywhere)
            return (y * target).sum() + loss, (y, loss, stats.fault.code)

        def reference(params, x, tokens, target):
            y, loss = dense(nnx.merge(graph, params, host_rest, copy=True), x, tokens._replace(**static))
            return (y * target).sum() + loss, (y, loss)

        self.ours, self.reference = (
            jax.jit(jax.value_and_grad(one, (0, 1), has_aux=True)) for one in (ours, reference)
        )

    def cases(self, number: int) -> Iterator[list[str]]:
        """Yield the differing values and gradients, one line each, for inputs of one shape."""
        x, tokens, target = self.inputs
        tokens = tokens._replace(segments=None, num_segments=None)
        for _ in range(number):
            yield self.compared(x, tokens, target)
            x, target = (jnp.asarray(self.rng.normal(size=x.shape).astype(np.float32), jnp.float64) for _ in range(2))
            if tokens.mask is not None:
                tokens = tokens._replace(mask=jnp.asarray(self.rng.random(x.shape[:-1]) < self.rng.random()))

    def compared(self, x: Array, tokens: Tokens, target: Array) -> list[str]:
        """Return one line per differing value or gradient."""
        rest = (x, tokens, target)
        (_, (y, loss, fault)), (by_params, by_x) = self.ours(self.params, *rest)
        want = self.reference(jax.tree.map(on_host, self.params), *rest)
        (_, (want_y, want_loss)), (want_by_params, want_by_x) = want
        if np.any(fault):
            return [f"fault.code is {np.ravel(fault).tolist()}"]
        got = {"y": y, "loss": loss, "gradient of x": by_x} | flat(by_params)
        wanted = {"y": want_y, "loss": want_loss, "gradient of x": want_by_x} | flat(want_by_params)
        precision = self.layer.precision
        dtypes = (precision.dtype or np.float64, precision.param_dtype)
        tolerance = max(TOLERANCES[np.dtype(dtype).type] for dtype in dtypes)
        return [line for name in got for line in difference(name, got[name], wanted[name], tolerance)]


def on_host(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(jax.device_get(leaf))


def flat(state: nnx.State) -> dict:
    return {f"gradient of {'.'.join(map(str, path))}": leaf[...] for path, leaf in nnx.to_flat_state(state)}


def difference(name: str, got: jax.Array, want: jax.Array, tolerance: float) -> list[str]:
    got, want = (np.asarray(jax.device_get(one), np.float64) for one in (got, want))
    error = np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-3)
    return [] if error <= tolerance else [f"{name} has a relative error of {error:.3g}"]


def main(first: int, last: int, number: int) -> None:
    use_virtual_cpu_devices(8)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        result: dict = {"layer": seed, "cases": 0, "refused": "", "faults": []}
        try:
            for faults in Compiled(seed).cases(number):
                result["cases"] += 1
                result["faults"] += faults
        except ValueError as error:
            line = " ".join(str(error).split())
            result["refused" if "; expected " in line else "faults"] = line if "; expected " in line else [line]
        except Exception as error:
            result["faults"].append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(json.dumps(result), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

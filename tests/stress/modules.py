"""Compare random layers of `tests.stress.signatures`, under random transformations, with the dense float64 layer.

`python -m tests.stress.modules FIRST LAST INPUTS` prints one JSON object per layer: its number, the number of inputs,
the refusal or the differences, the narrowest dtype, and the largest relative error.
"""

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

if __name__ == "__main__":
    # Compilation dominates, as in the tests.
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quickly}".strip()

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import MoE, use_virtual_cpu_devices
from jax_moe_lb.transport.once import ListDispatch
from tests.adapters import adapters_of, with_adapters
from tests.stress.dense_module import dense
from tests.stress.inputs import Inputs, draw_arguments, draw_fixed, draw_params, draw_shape, draw_tokens, on_host
from tests.stress.patterns import PATTERNS, Pattern
from tests.stress.signatures import DTYPES, Draw, draw_layer, plans_on_host
from tests.stress.sizes import with_sizes
from tests.stress.transformations import FORMS, LAYERS, TRANSFORMATIONS, Parts, Rest, exported, fits, residual, step_of

TOLERANCES = {"float64": 1e-14, "float32": 4e-6, "bfloat16": 2.5e-2}
"""Tolerance by the narrowest dtype, relative to the largest entry, or to the largest sum of absolute terms.

A bfloat16 number is rounded by at most 2^-9, about ten times on its way through a layer and back. Sums are kept in
float32, so their length does not matter. The largest errors of 612 inputs are 1.4e-15, 1.4e-6 and 1.1e-2.
"""

ROUNDED = {
    "float8_e4m3fn": {"float64": 1e-6, "float32": 0.08, "bfloat16": 0.08},
    "int8": {"float64": 1e-6, "float32": 0.01, "bfloat16": 0.05},
}
"""The same for outputs rounded by a transfer, by the dtypes of transfer and layer.

A rounding error may move an output to the next float8 number, by up to 1/14 of the largest one, or the next int8, by
1/127. In float64 only the scales are rounded, which are float32.
"""

CLEAR = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-4}
"""Minimum relative difference of scores, so that rounding does not change a choice."""


def layer_of(seed: int, devices: list[jax.Device] | None = None) -> tuple[MoE, Draw]:
    """Return a random layer, a third of them with adapters."""
    layer, draw = draw_layer(seed, devices)
    if np.random.default_rng([2, seed]).random() < 1 / 3:
        everywhere = NamedSharding(layer.mesh, PartitionSpec())
        for name, value in adapters_of(with_adapters(jax.tree.map(on_host, layer._experts()))).items():
            if value is not None:
                setattr(layer, name, nnx.Param(jax.device_put(value, everywhere)))
    return layer, draw


class Compiled:
    """A random layer under a transformation, and its reference; raises the error of a refused layer."""

    def __init__(self, seed: int) -> None:
        self.seed, self.dtypes = seed, Draw(seed, np.random.default_rng(0)).spread("dtypes", DTYPES)
        with self.mode():
            layer, draw = layer_of(seed)
            rng = np.random.default_rng([1, seed])
            self.transformation, self.form = transformation_of(layer, draw)
            flat, self.masked = self.form != "MoE", rng.random() < 0.5
            self.shape = draw_shape(layer, flat, rng)
            tokens = draw_arguments(layer, self.shape, flat, rng)
            # The reference numbers segments on the host.
            self.static = {"segments": tokens.segments, "num_segments": tokens.num_segments}
            self.tokens = jax.tree.map(on_host, tokens._replace(segments=None, num_segments=None))
            # The same program on the same devices in another order.
            others = [layer_of(seed, jax.devices()[::-1])[0]] if self.transformation == "two meshes" else []
            self.layers = [layer, *others]
            self.parts = [Parts.of(one) for one in self.layers]
            self.steps = [step_of(one, self.transformation, self.form, self.static) for one in self.layers]
            self.reference = jax.jit(reference_of(self.parts[0], self.static, self.dtypes[0], self.scans))
            self.serialized, self.largest = False, 0.0

    def __str__(self) -> str:
        options = f"{self.form}, {self.transformation}, {self.dtypes}, {self.shape}, {self.layers[0].system}"
        return f"layer {self.seed}: {options}, {self.layers[0].router}, {self.layers[0].topology}"

    @contextlib.contextmanager
    def mode(self, reference: bool = False) -> Iterator[None]:
        """Enable float64 if the layer or the reference needs it."""
        # Tokens of some layers are wider than their parameters.
        promotion = "standard" if reference or self.dtypes[0] == "float64" else "strict"
        ranks = jax.numpy_rank_promotion("allow" if reference else "raise")
        with jax.enable_x64(reference or "float64" in self.dtypes), jax.numpy_dtype_promotion(promotion), ranks:
            yield

    @property
    def scans(self) -> bool:
        return self.transformation.startswith("scan")

    @property
    def dtype(self) -> str:
        return next(dtype for dtype in ("bfloat16", "float32", "float64") if dtype in self.dtypes)

    def draw(self, number: int) -> tuple[str, Inputs, list[dict]]:
        """Return the inputs of this number, the name of their pattern, and the results of each microbatch."""
        # Layers start at different patterns.
        name = list(PATTERNS)[(self.seed * 5 + number) % len(PATTERNS)]
        for attempt in range(100):
            inputs = self.attempt(PATTERNS[name], np.random.default_rng([self.seed, number, attempt]))
            wanted = self.wanted(inputs)
            if all(one["margin"] > CLEAR[self.dtype] for one in wanted):
                return name, inputs, wanted
        raise AssertionError(f"layer {self.seed} has no clear input of pattern {name!r}, number {number}")

    def attempt(self, pattern: Pattern, rng: np.random.Generator) -> Inputs:
        # Outputs of a bfloat16 layer differ in the third digit, and must not change the experts of the next layer.
        if self.scans:
            pattern = replace(pattern, filling=0.0, noise=pattern.noise * (0.02 if self.dtype == "bfloat16" else 1.0))
        layer, parts = self.layers[0], self.parts[0]
        layers = LAYERS if "own" in self.transformation else 1
        drawn = [draw_params(layer, parts.params, pattern, rng) for _ in range(layers)]
        params = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn) if layers > 1 else drawn[0]
        batches = [
            draw_tokens(layer, self.shape, pattern if self.masked else replace(pattern, filling=0.0), rng)
            for _ in range(2 if self.transformation == "microbatches" else 1)
        ]
        x = np.stack([x for x, _ in batches])
        mask = np.stack([mask for _, mask in batches]) if self.masked else None
        x = x if self.masked else np.nan_to_num(x)
        # Tokens are exact in the dtype of the layer.
        x = x.astype(self.layers[0].precision.dtype or self.dtypes[0]).astype(self.dtypes[0])
        return Inputs(params, draw_fixed(parts.fixed, rng), x, mask, rng.normal(size=x.shape))

    def wanted(self, inputs: Inputs) -> list[dict]:
        with self.mode(reference=True):
            params, fixed = jax.tree.map(widened, (inputs.params, inputs.fixed))
            tokens = jax.tree.map(on_host, self.tokens)
            results = []
            for at in range(len(inputs.x)):
                mask = None if inputs.mask is None else jnp.asarray(inputs.mask[at])
                x, target = widened(inputs.x[at]), widened(inputs.target[at].astype(self.wide))
                results.append(jax.device_get(self.reference(params, fixed, x, tokens._replace(mask=mask), target)))
            return results

    @property
    def wide(self) -> Any:
        return np.float64 if "float64" in self.dtypes else np.float32

    def run(self, number: int, inputs: Inputs, state: Any) -> tuple:
        """Run the program; odd numbers run on the other mesh, if there is one."""
        at = number % len(self.layers)
        layer, parts = self.layers[at], self.parts[at]
        stacked = self.transformation == "microbatches"
        x, mask, target = (
            None if array is None else array if stacked else array[0]
            for array in (inputs.x, inputs.mask, inputs.target.astype(self.wide))
        )
        everywhere = NamedSharding(layer.mesh, PartitionSpec())
        # An exported program runs on arrays of as many devices as its mesh has.
        put = partial(jax.device_put, device=everywhere) if self.transformation == "exported" else jnp.array
        x, tokens, target = jax.tree.map(put, (x, self.tokens._replace(mask=mask), target))
        rest = Rest(like(inputs.fixed, parts.fixed), like(state, parts.state), tokens, target)
        arguments = (like(inputs.params, parts.params), x, rest)
        if self.transformation == "exported" and not self.serialized:
            self.steps[at], self.serialized = exported(self.steps[at], arguments), True
        # Outside jit, reverse mode on Explicit axes creates its first array on the mesh of the context.
        eager = self.transformation == "not jitted" and "Explicit" in str(layer.mesh.axis_types)
        with jax.set_mesh(layer.mesh) if eager else contextlib.nullcontext():
            # Host arrays: the state has the same placement in the next call, without a recompilation.
            return jax.device_get(self.steps[at](*arguments))

    def cases(self, number: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the kind of each input, and one line per differing value or gradient.

        A balancer with a history continues with the state of the previous input.
        """
        with self.mode():
            state = jax.device_get(self.parts[0].state)
            if self.scans:
                state = jax.tree.map(lambda leaf: np.stack([leaf] * LAYERS), state)
            for at in range(number):
                pattern, inputs, wanted = self.draw(at)
                (value, (y, stats, state)), (by_params, by_x) = self.run(at, inputs, state)
                got = {"value": value, "y": y, "loss": stats.loss, "gradient of x": by_x} | flat(by_params)
                yield pattern, [*self.differences(got, wanted), *count_differences(stats, wanted), *self.compilations()]

    def differences(self, got: dict, wanted: list[dict]) -> Iterator[str]:
        got["loss"] = np.asarray(got["loss"], np.float64).mean(-1).sum()
        for name in got:
            each = [one["values"][name] for one in wanted]
            # Losses and gradients of microbatches are sums.
            want = np.stack(each) if name in ("y", "gradient of x") else sum(each)
            size = sum(one["sizes"][name] for one in wanted)
            found = np.asarray(got[name], np.float64).reshape(np.shape(want))
            error, scale = np.abs(found - want).max(initial=0), max(np.abs(want).max(initial=0), size)
            relative = error / max(scale, 1e-300)
            self.largest = max(self.largest, 0.0 if self.rounds(name) else relative)
            # Also false if the error is NaN.
            if not relative <= max(TOLERANCES[self.dtype], self.rounds(name)):
                yield f"{name} has an error of {error:.3g} of {scale:.3g}, {relative:.3g}"

    def rounds(self, name: str) -> float:
        """Return the tolerance for rounded outputs, on which losses and gradients do not depend; 0 for these."""
        dispatch = self.layers[0].system.dispatch
        if dispatch.transfer is None or isinstance(dispatch, ListDispatch) or name not in ("y", "value"):
            return 0.0
        return ROUNDED[np.dtype(dispatch.transfer.dtype).name][self.dtype]

    def compilations(self) -> list[str]:
        """Return one line if a jitted step was compiled more than once."""
        if self.transformation in ("not jitted", "exported", "nnx.jit", "nnx.jit, nnx.remat"):
            return []
        sizes = [step._cache_size() for step in self.steps]
        return [f"the steps have {sizes} compiled programs; expected at most 1 each"] if max(sizes) > 1 else []


def transformation_of(layer: MoE, draw: Draw) -> tuple[str, str]:
    """Return a transformation supported by a layer, and the form of its call."""
    name, form = draw.spread("transformation", list(TRANSFORMATIONS)), draw.spread("form", list(FORMS))
    if name == "exported" and plans_on_host(layer.system.balancer):
        name = "jit"
    # Rounded outputs could change the experts of the next layer.
    if name.startswith("scan") and layer.system.dispatch.transfer is not None:
        name = "checkpoint"
    return name, form if fits(form, layer) and not name.startswith("nnx") else "MoE"


def widened(leaf: Any) -> jax.Array:
    leaf = np.asarray(leaf)
    return jnp.asarray(leaf, jnp.int64 if np.issubdtype(leaf.dtype, np.integer) else jnp.float64)


def like(values: Any, leaves: Any) -> Any:
    """Put values on the devices of a layer's arrays; layers of a scan have a leading dimension."""

    def one(value: np.ndarray, leaf: jax.Array) -> jax.Array:
        more = (None,) * (np.ndim(value) - leaf.ndim)
        sharding = leaf.sharding
        if more and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*more, *sharding.spec))
        # Copies, as a step may donate them.
        return jax.device_put(np.array(value), sharding)

    leaves, tree = jax.tree.flatten(leaves)
    return tree.unflatten(map(one, jax.tree.leaves(values), leaves))


def reference_of(parts: Parts, static: dict, dtype: str, scans: bool) -> Any:
    """Return the function to the values, gradients and counts of one microbatch, and the sizes of the values."""
    others, state = jax.tree.map(on_host, (parts.others, parts.state))
    num_experts = parts.params["kernel"].shape[-1]

    def loss(params, x, target, fixed, tokens):
        stacked, done, tokens = params["kernel"].get_value().ndim > 2, [], tokens._replace(**static)
        for at in range(LAYERS if scans else 1):
            mine = jax.tree.map(lambda leaf, at=at: leaf[at], params) if stacked else params
            done.append(dense(nnx.merge(parts.graph, mine, fixed, state, others, copy=True), x, tokens, dtype))
            y = done[-1].y
            x = x + residual(x.shape[-1], num_experts) * y if scans else y
        losses = sum(one.loss for one in done)
        facts = {
            "counts": jnp.stack([one.counts for one in done]),
            "dropped": jnp.stack([one.dropped for one in done]),
            "margin": jnp.stack([one.margin for one in done]).min(),
        }
        return (x * target).sum() + losses, (x, losses, facts)

    def values(params, x, target, fixed, tokens):
        out, gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x, target, fixed, tokens)
        (value, (y, losses, facts)), (by_params, by_x) = out, gradients
        return {"value": value, "y": y, "loss": losses, "gradient of x": by_x} | flat(by_params), facts

    def reference(params, fixed, x, tokens, target):
        def of_inputs(*inputs):
            return values(*inputs, fixed, tokens)

        (results, facts), (sizes, _) = with_sizes(of_inputs)(params, x, target)
        return {"values": results, "sizes": jax.tree.map(lambda leaf: leaf.max(initial=0), sizes), **facts}

    return reference


def flat(state: nnx.State) -> dict:
    return {f"gradient of {'.'.join(map(str, path))}": leaf[...] for path, leaf in nnx.to_flat_state(state)}


def count_differences(stats: Any, wanted: list[dict]) -> Iterator[str]:
    """Yield one line per count of any layer and microbatch with another value."""
    counts = np.concatenate([one["counts"] for one in wanted]).astype(int)
    num_ranks, experts = counts.shape[2:]
    served = np.reshape(stats.quota, (*counts.shape[:2], experts, num_ranks))
    by_expert = counts.sum(2)
    loads = {
        "counts": (stats.counts, counts),
        "load_before": (stats.load_before, by_expert.reshape(*by_expert.shape[:2], num_ranks, -1).sum(3)),
        "load_after": (stats.load_after, served.sum(2)),
        "quota by expert": (served.sum(3), by_expert),
        "dropped": (stats.dropped, np.concatenate([one["dropped"] for one in wanted])),
    }
    for name, (got, want) in loads.items():
        if not np.array_equal(np.reshape(got, want.shape), want):
            yield f"{name} is {np.reshape(got, want.shape).tolist()}; expected {want.tolist()}"
    if np.any(stats.fault.code):
        yield f"fault.code is {np.ravel(stats.fault.code).tolist()}; expected 0"
    if not ((np.ravel(stats.rounds) > 0) == (counts.sum((2, 3)).ravel() > 0)).all():
        yield f"rounds is {np.ravel(stats.rounds).tolist()}; expected some where there are token copies"


def compare(seed: int, number: int) -> dict:
    """Return the result of a layer on some inputs: refused in one line, or its differences from the reference."""
    result: dict = {"layer": seed, "cases": 0, "refused": "", "faults": []}
    with warnings.catch_warnings(action="ignore"):
        try:
            layer = Compiled(seed)
            # Shown if a test fails.
            print(layer, file=sys.stderr)
            for pattern, faults in layer.cases(number):
                result["faults"] += [f"input {result['cases']}, {pattern}: {fault}" for fault in faults]
                result["cases"] += 1
            result |= {"dtype": layer.dtype, "largest": layer.largest}
        except Exception as error:
            line = " ".join(str(error).split())
            if isinstance(error, ValueError) and "; expected " in line:
                result["refused"] = line
            else:
                traceback.print_exception(error)
                result["faults"].append(f"{type(error).__name__}: {line[:300]}")
    return result


def main(first: int, last: int, number: int) -> None:
    use_virtual_cpu_devices(8)
    for seed in range(first, last):
        print(json.dumps(compare(seed, number)), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

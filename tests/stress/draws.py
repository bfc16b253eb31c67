"""Random inputs of a program: expert preferences, magnitudes, and padding."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tests.stress.float64_experts import Weights
from tests.stress.float64_layer import Network, Rounding, Setting, identity, network
from tests.stress.float64_transfer import transferred
from tests.stress.patterns import PATTERNS, Pattern
from tests.stress.programs import SEED, Program

NUMPY_DTYPES = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
WIDE_DTYPES = {"float64": np.float64, "float32": np.float32, "bfloat16": np.float32}
PREFERENCE = 1 / 8
"""Difference between consecutive preferences of a token, similar in size to its features."""
CLEAR = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-4}
"""Minimum relative difference of scores, so that rounding does not change a choice."""


class Inputs(NamedTuple):
    """Inputs in the program's dtypes. Tokens, mask and target are stacked over microbatches, weights over layers."""

    x: np.ndarray
    mask: np.ndarray
    target: np.ndarray
    weights: Weights
    bias: np.ndarray | None
    homes: np.ndarray | None


def draw_inputs(program: Program, number: int) -> tuple[str, Inputs, list[Network]]:
    """Return the inputs of this number, the name of their pattern, and the reference of each microbatch."""
    # Programs start at different patterns, so that the shorter last program does not always use the same ones.
    name = list(PATTERNS)[(program.number * 5 + number) % len(PATTERNS)]
    for attempt in range(100):
        inputs = _draw(program, PATTERNS[name], np.random.default_rng([SEED, program.number, number, attempt]))
        answers = reference(program, inputs)
        if all(told.margin > CLEAR[program.dtype] for told in _routed(answers)):
            return name, inputs, answers
    raise AssertionError(f"{program} has no clear input of pattern {name!r}, number {number}")


def _draw(program: Program, pattern: Pattern, rng: np.random.Generator) -> Inputs:
    # Outputs of a bfloat16 layer differ in the third digit, and must not change the experts of the next layer.
    if program.scans:
        pattern = replace(pattern, filling=0.0, noise=pattern.noise * (0.02 if program.dtype == "bfloat16" else 1.0))
    dtype, layers = NUMPY_DTYPES[program.dtype], program.layers if program.own_weights else 1
    wide, experts = WIDE_DTYPES[program.dtype], program.num_experts
    batches = [_tokens(program, pattern, rng) for _ in range(program.microbatches)]
    inner = (layers, experts, program.width, program.mlp_dim)
    up, gate = 0.5 * rng.normal(size=(2, *inner))
    down = 0.5 * rng.normal(size=(layers, experts, program.mlp_dim, program.width))
    kernels = [_kernel(program, pattern, rng) for _ in range(layers)]
    gate = gate.astype(dtype) if program.gated else None
    return Inputs(
        np.stack([x for x, _ in batches]).astype(dtype),
        np.stack([mask for _, mask in batches]),
        rng.normal(size=(len(batches), *batches[0][0].shape)).astype(wide),
        # The router's weights stay wide, as in training.
        Weights(np.stack(kernels).astype(wide), up.astype(dtype), gate, down.astype(dtype)),
        (0.3 * rng.normal(size=experts)).astype(np.float32) if program.has_bias else None,
        rng.permutation(experts).astype(np.int32) if program.homes else None,
    )


def _kernel(program: Program, pattern: Pattern, rng: np.random.Generator) -> np.ndarray:
    """Return the router kernel. Layers number experts in different orders, and features must not break ties."""
    noise = 0.3 * pattern.noise * rng.normal(size=(program.features, program.num_experts))
    return np.concatenate([noise, pattern.strength / PREFERENCE * rng.permutation(np.eye(program.num_experts))])


def _tokens(program: Program, pattern: Pattern, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shards, tokens, experts = program.num_groups * program.num_ranks, program.num_tokens, program.num_experts
    liking = np.broadcast_to(pattern.liking(rng, shards, experts), (shards, experts))[:, None]
    wishes = liking + pattern.taste * rng.gumbel(size=(shards, tokens, experts))
    # Use integers, which are exact in every dtype.
    preferences = np.argsort(np.argsort(wishes, axis=-1), axis=-1)
    if pattern.levels:
        preferences = preferences * pattern.levels // experts
    features = pattern.features * rng.normal(size=(shards, 1 if pattern.alike else tokens, program.features))
    features = np.broadcast_to(features, (shards, tokens, program.features))
    x = pattern.tokens * np.concatenate([features, PREFERENCE * (preferences - experts // 2)], -1)
    mask = np.ones((shards, tokens), bool)
    if program.masked:
        mask = mask & pattern.padding(rng, shards, tokens)
    # Zero unless the pattern sets a filling, but never a token's values.
    x = np.where(mask[:, :, None], x, pattern.filling)
    return x.reshape(-1, program.width), mask.reshape(-1)


def residual(program: Program) -> np.ndarray | None:
    """Restrict the residual to features, so that tokens keep their preferences through all layers."""
    return 0.5 * (np.arange(program.width) < program.features) if program.scans else None


def roundings(program: Program) -> tuple[Rounding, Rounding]:
    """Return the rounding of tokens and of outputs by the transfer of a program."""
    if program.transfer == "none":
        return identity, identity
    rounding = partial(transferred, NUMPY_DTYPES[program.dtype], program.transfer, program.block)
    return rounding, rounding if program.quantizes_outputs else identity


def reference(program: Program, inputs: Inputs) -> list[Network]:
    def weights_of(layer: int) -> Weights:
        stacked = layer if program.own_weights else 0
        return Weights(*(None if array is None else array[stacked].astype(np.float64) for array in inputs.weights))

    answers = []
    for x, mask, target in zip(inputs.x, inputs.mask, inputs.target, strict=True):
        bias = None if inputs.bias is None else inputs.bias.astype(np.float64)
        setting = Setting(
            program.rules(),
            program.num_groups,
            program.num_ranks,
            mask,
            bias,
            inputs.homes,
            residual(program),
            *roundings(program),
        )
        layers = [weights_of(layer) for layer in range(program.layers)]
        answers.append(network(setting, x.astype(np.float64), layers, target.astype(np.float64)))
    return answers


def _routed(answers: list[Network]) -> list:
    return [told for answer in answers for layer in answer.layers for told in layer.routed]

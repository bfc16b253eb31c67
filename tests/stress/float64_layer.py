"""Dense mixture of experts in NumPy and float64, with a manual backward pass, independent of jax and the package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.stress.float64_experts import Sized, Weights, add_expert_gradients, add_product, expert_output
from tests.stress.float64_router import Routed, Rules, pull_back, route

Rounding = Callable[[np.ndarray], np.ndarray]
"""`[N, H] -> [N, H]`."""


def identity(rows: np.ndarray) -> np.ndarray:
    return rows


@dataclass(frozen=True)
class Setting:
    """Settings shared by all layers of a network.

    Tokens are ordered by group, and in each group by rank.
    """

    rules: Rules
    num_groups: int
    num_ranks: int
    mask: np.ndarray  # [C], False for padding
    bias: np.ndarray | None = None
    homes: np.ndarray | None = None  # the place of each expert
    residual: np.ndarray | None = None  # [H], `x + residual * y` of a layer is the next input; None for a single layer
    tokens: Rounding = identity  # rounding of tokens on their way to experts; its derivative counts as 1
    outputs: Rounding = identity  # the same for outputs; gradients of router weights use outputs before rounding

    def places(self, num_experts: int) -> np.ndarray:
        return np.arange(num_experts) if self.homes is None else self.homes

    def blocks(self) -> list[slice]:
        """Return the slice of tokens of each group."""
        length = len(self.mask) // self.num_groups
        return [slice(group * length, (group + 1) * length) for group in range(self.num_groups)]


class Layer(NamedTuple):
    """Forward pass of one layer."""

    x: np.ndarray  # padding is zero
    weights: Weights
    routed: list[Routed]  # per group
    chosen: Sized  # [C, K, H], output of each choice, before the router weight
    y: Sized
    counts: np.ndarray  # [D, R, E], by place


class Gradients(NamedTuple):
    """Gradients of tokens and weights, each with the size of its terms, to which rounding errors are proportional.

    Derivatives of activations count as 1 in sizes, as their arguments cancel, too.
    """

    x: np.ndarray
    weights: Weights
    x_size: np.ndarray
    sizes: Weights


def forward(setting: Setting, x: np.ndarray, weights: Weights) -> Layer:
    x = np.where(setting.mask[:, None], x, 0)
    num_experts, places = weights.kernel.shape[1], setting.places(weights.kernel.shape[1])
    logits, num_ranks = x @ weights.kernel, setting.num_ranks
    routed = [route(setting.rules, logits[block], setting.bias, setting.mask[block]) for block in setting.blocks()]
    chosen = Sized(*np.zeros((2, len(x), setting.rules.per_tok, x.shape[1])))
    sent = setting.tokens(x)
    counts = np.zeros((setting.num_groups, num_ranks, num_experts), int)
    for group, (block, told) in enumerate(zip(setting.blocks(), routed, strict=True)):
        ranks = np.arange(len(told.active)) // max(len(told.active) // num_ranks, 1)
        for expert, place in enumerate(places):
            tokens, choices = np.nonzero((told.experts == expert) & told.active[:, None])
            output = expert_output(sent[block][tokens], weights, place)
            chosen.value[block][tokens, choices], chosen.size[block][tokens, choices] = output
            counts[group, :, place] = np.bincount(ranks[tokens], minlength=num_ranks)
    factors = np.concatenate([told.weights for told in routed])[:, :, None]
    returned = setting.outputs(chosen.value.reshape(-1, x.shape[1])).reshape(chosen.value.shape)
    y = Sized((factors * returned).sum(1), (factors * chosen.size).sum(1))
    return Layer(x, weights, routed, chosen, y, counts)


def backward(setting: Setting, layer: Layer, by_y: np.ndarray, by_loss: float) -> Gradients:
    """Return the gradients, from those of the outputs and of each group's loss."""
    x, weights = layer.x, layer.weights
    sums, sizes = (Weights(*(None if array is None else np.zeros_like(array) for array in weights)) for _ in range(2))
    by_x, x_sizes, sent = np.zeros_like(x), np.zeros_like(x), setting.tokens(x)
    for block, told in zip(setting.blocks(), layer.routed, strict=True):
        for expert, place in enumerate(setting.places(weights.kernel.shape[1])):
            tokens, choices = np.nonzero((told.experts == expert) & told.active[:, None])
            upstream = told.weights[tokens, choices, None] * by_y[block][tokens]
            by_rows = add_expert_gradients(sent[block][tokens], weights, place, upstream, sums, sizes)
            # A token may choose an expert once.
            by_x[block][tokens] += by_rows.value
            x_sizes[block][tokens] += by_rows.size
        upstream = by_y[block][:, None]
        products = Sized(layer.chosen.value[block], layer.chosen.size[block]).times(upstream, np.abs(upstream))
        by_logits = Sized(*pull_back(setting.rules, told, products.value.sum(2), products.size.sum(2), by_loss))
        by_x[block] += by_logits.through(weights.kernel).value
        x_sizes[block] += by_logits.through(weights.kernel).size
        add_product(sums.kernel, sizes.kernel, x[block], by_logits)
    return Gradients(by_x, sums, x_sizes, sizes)


class Network(NamedTuple):
    """Loss `sum(outputs * target)` plus all router losses, over one or more layers, with all gradients."""

    value: Sized
    y: Sized
    x: Sized  # its gradient
    layers: list[Layer]
    gradients: list[Gradients]  # per layer


def network(setting: Setting, x: np.ndarray, layers: list[Weights], target: np.ndarray) -> Network:
    done, tokens = [], Sized(x, np.zeros_like(x))
    for weights in layers:
        done.append(forward(setting, tokens.value, weights))
        y, residual = done[-1].y, setting.residual
        tokens = y if residual is None else Sized(tokens.value + residual * y.value, tokens.size + residual * y.size)
    upstream, size, gradients = target, np.zeros_like(x), []
    for layer in reversed(done):
        by_y = upstream if setting.residual is None else setting.residual * upstream
        gradients.append(backward(setting, layer, by_y, 1.0))
        # Add the gradient of the residual connection.
        upstream = gradients[-1].x + (0 if setting.residual is None else upstream)
        size = size + gradients[-1].x_size
    losses, products = sum(told.loss for layer in done for told in layer.routed), tokens.times(target, np.abs(target))
    value = Sized(products.value.sum() + losses, products.size.sum() + losses)
    return Network(value, tokens, Sized(upstream, size), done, gradients[::-1])

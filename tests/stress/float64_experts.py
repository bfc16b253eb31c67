"""Experts in NumPy and float64, forward and backward, with the size of the terms in every sum."""

from typing import NamedTuple

import numpy as np


class Weights(NamedTuple):
    """Weights of one layer: the router's `[H, E]`, and the experts' `[E, H, F]` and `[E, F, H]`, by place."""

    kernel: np.ndarray
    up: np.ndarray
    gate: np.ndarray | None
    down: np.ndarray


class Sized(NamedTuple):
    """Numbers, and the size of the terms they are sums of."""

    value: np.ndarray
    size: np.ndarray

    def times(self, factor: np.ndarray, size: np.ndarray) -> "Sized":
        return Sized(self.value * factor, self.size * size)

    def through(self, matrix: np.ndarray) -> "Sized":
        """Propagate backward through a product with the matrix."""
        return Sized(self.value @ matrix.T, self.size @ np.abs(matrix).T)


def add_product(total: np.ndarray, size: np.ndarray, rows: np.ndarray, upstream: Sized) -> None:
    """Add the gradient of a matrix multiplied with `rows`."""
    total += rows.T @ upstream.value
    size += np.abs(rows).T @ upstream.size


def expert_output(rows: np.ndarray, weights: Weights, place: int) -> Sized:
    up = rows @ weights.up[place]
    hidden = gelu(up)[0] if weights.gate is None else silu(rows @ weights.gate[place])[0] * up
    return Sized(hidden @ weights.down[place], np.abs(hidden) @ np.abs(weights.down[place]))


def add_expert_gradients(
    rows: np.ndarray, weights: Weights, place: int, upstream: np.ndarray, sums: Weights, sizes: Weights
) -> Sized:
    """Add the gradients of an expert's weights to the sums; return the gradients of its rows."""
    up, by_output = rows @ weights.up[place], Sized(upstream, np.abs(upstream))
    by_hidden = by_output.through(weights.down[place])
    if weights.gate is None:
        hidden, slope = gelu(up)
        by_up = by_hidden.times(slope, np.ones_like(slope))
        by_rows = by_up.through(weights.up[place])
    else:
        gate, slope = silu(rows @ weights.gate[place])
        hidden, by_up = gate * up, by_hidden.times(gate, np.abs(gate))
        by_gate = by_hidden.times(up * slope, np.abs(up))
        add_product(sums.gate[place], sizes.gate[place], rows, by_gate)
        through_up, through_gate = by_up.through(weights.up[place]), by_gate.through(weights.gate[place])
        by_rows = Sized(through_up.value + through_gate.value, through_up.size + through_gate.size)
    add_product(sums.up[place], sizes.up[place], rows, by_up)
    add_product(sums.down[place], sizes.down[place], hidden, by_output)
    return by_rows


def silu(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `z * sigmoid(z)` and its derivative."""
    sigmoid = np.exp(-np.logaddexp(0, -z))
    return z * sigmoid, sigmoid * (1 + z * np.exp(-np.logaddexp(0, z)))


def gelu(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tanh approximation, and its derivative."""
    root = np.sqrt(2 / np.pi)
    tanh = np.tanh(root * (z + 0.044715 * z**3))
    slope = root * (1 + 3 * 0.044715 * z**2)
    return z * (1 + tanh) / 2, (1 + tanh) / 2 + z * (1 - tanh**2) * slope / 2

"""Recorded expert loads, and a synthetic substitute."""

import argparse

import numpy as np

Layers = dict[str, np.ndarray]
"""Tokens `[layers, E]` of each recording."""


def read(options: argparse.Namespace) -> Layers:
    if not options.loads:
        return {"synthetic": synthetic()[:: options.step]}
    return {file.stem: np.load(file)[:: options.step].astype(np.int32, casting="same_kind") for file in options.loads}


def synthetic() -> np.ndarray:
    popularity = np.random.default_rng(0).lognormal(0, 1, (58, 256))
    return (1e4 * popularity).astype(np.int32)


def on_first_rank(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return counts `[..., R, E]` with these sums; all tokens start on rank 0."""
    counts = np.zeros((*tokens.shape[:-1], num_ranks, tokens.shape[-1]), np.int32)
    counts[..., 0, :] = tokens
    return counts


def scattered(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return counts `[..., R, E]` with these sums; most tokens of an expert start on a few ranks."""
    rng = np.random.default_rng(0)
    starts = rng.dirichlet(np.full(num_ranks, 0.3), tokens.shape)
    # In memory order: copying a transposed array takes longer than a plan.
    return np.ascontiguousarray(np.moveaxis(rng.multinomial(tokens, starts), -1, -2), np.int32)


def mixed(loads: Layers, num_ranks: int, num_steps: int, copies: int) -> np.ndarray:
    """Return counts `[steps, 2, R, E]` of two layers, in which every rank serves a mix of the recordings.

    Half of a mix is that of the step and half the rank's own. Both are new in every step and uniform over all mixes.
    The layers are those at a third and two thirds of the model.
    """
    rng = np.random.default_rng(0)
    layers = np.stack([np.stack([load[len(load) // 3], load[2 * len(load) // 3]]) for load in loads.values()])
    shares = layers / layers.sum(2, keepdims=True)
    even = np.ones(len(loads))
    mixes = (rng.dirichlet(even, (num_steps, 1)) + rng.dirichlet(even, (num_steps, num_ranks))) / 2
    chances = np.einsum("srw,wle->slre", mixes, shares)
    return rng.multinomial(copies, chances).astype(np.int32)
